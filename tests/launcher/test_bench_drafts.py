"""`loraplex bench drafts`: what it reads, what it counts, what it refuses."""

import json
from pathlib import Path

import pytest

from loraplex.launcher.__main__ import main
from loraplex.launcher.bench.drafts import texts
from loraplex.launcher.bench.drafts.replay import StepCurve, TaskTokens, replay, tokens_per_second

TOKENIZER = Path(__file__).parents[2] / "launcher/demo/model/tokenizer.json"
MUCH = 1 << 20
COUNT = list(range(40))


def steps(tasks: list[TaskTokens], *, others: bool) -> list[tuple[int, int]]:
    return [(step.drafted, step.accepted) for step in replay(tasks, 8, MUCH, others=others)]


def test_drafts_grow_with_the_match() -> None:
    # The first token follows nothing. One that follows another says less than eight do.
    found = steps([TaskTokens("edits", "a", COUNT, COUNT[:28])], others=False)
    assert found == [(0, 0), (3, 3), (8, 8), (8, 8), (8, 4)]


def test_other_answers_help_where_they_may() -> None:
    tasks = [TaskTokens("demo", "a", [100 + n], COUNT[:9]) for n in range(2)]
    assert sum(accepted for _, accepted in steps(tasks, others=False)) == 0
    assert steps(tasks, others=True)[-3:] == [(0, 0), (3, 3), (4, 3)]
    strangers = [task._replace(adapter=str(n)) for n, task in enumerate(tasks)]
    assert sum(accepted for _, accepted in steps(strangers, others=True)) == 0


def test_tokens_a_second_are_never_far_below_plain_steps() -> None:
    dear = StepCurve([1, 4, 512], [5.0, 5.0, 640.0])
    free = StepCurve([1, 512], [5.0, 5.0])
    tasks = [TaskTokens("edits", "a", COUNT, COUNT)]
    assert tokens_per_second(tasks, 4, dear, 8) == pytest.approx(4 / 5.0 * 1e3)
    assert tokens_per_second(tasks, 4, free, 8) > 5 * 4 / 5.0 * 1e3


@pytest.fixture
def folders(tmp_path: Path) -> Path:
    for version in ("old", "new"):
        (tmp_path / version).mkdir()
        lines = [f"value_{n} = {n}" for n in range(60)]
        (tmp_path / version / "a.py").write_text("\n".join([version, *lines]))
    parts = {f"part {n}": {f"field {m}": m for m in range(20)} for n in range(3)}
    (tmp_path / "a.json").write_text(json.dumps(parts))
    (tmp_path / "METADATA").write_text("Name: a\n\n" + "words of prose follow. " * 200)
    select = "SELECT " + ", ".join(f"column_{n}" for n in range(40)) + " FROM t"
    (tmp_path / "a.sql").write_text(f"{select};\n{select} WHERE x = 1;")
    return tmp_path


def test_each_kind_has_an_answer_that_its_files_hold(folders: Path) -> None:
    (edit,) = texts.edits(folders / "old", folders / "new")
    assert "old\n" in edit.prompt
    assert edit.answer.startswith("new\n")
    (extraction,) = texts.extraction(folders)
    assert json.loads(extraction.answer) == {f"field {m}": m for m in range(20)}
    (statement,) = texts.sql(folders)
    assert statement.answer.endswith("WHERE x = 1;")
    (prose,) = texts.prose(folders)
    assert prose.prompt + prose.answer == ("words of prose follow. " * 200)[:2000]


def run(folders: Path, *more: str) -> None:
    main(
        ["bench", "drafts", "--tokenizer", str(TOKENIZER), "--texts", str(folders), "--tasks", "2"]
        + ["--widths", "1,4", *more]
    )


def test_the_command_prints_a_line_for_each_kind(
    folders: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    times = folders / "times.json"
    times.write_text(step_times(1, {0: 5.0, 4: 5.5}) + step_times(8, {0: 5.0, 1: 6.0, 8: 9.0}))
    edits = ["--edits", str(folders / "old"), str(folders / "new"), "--sql", str(folders)]
    run(folders, *edits, "--step-times", str(times), "--json")
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    found = {(line["kind"], line["others"]): line for line in lines}
    assert found["edits", False]["tokens_a_step"]["4"] > 2
    assert found["edits", False]["gain"]["1"] > 2
    assert found["edits", False]["gain"].keys() == {"1", "8"}
    assert found["demo sentiment", True]["gain"] is None
    assert all(line["accepted"] <= line["drafted"] for line in lines)


def step_times(rows: int, by_draft: dict[int, float]) -> str:
    """As `bench decode` writes them."""
    lines = [{"B": rows, "D": 0, "draft": n, "median_ms": ms} for n, ms in by_draft.items()]
    return "".join(json.dumps(line) + "\n" for line in lines)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (step_times(1, {0: 5.0}), "1 rows need times"),
        (step_times(8, {1: 5.0, 2: 5.0}), "8 rows need times"),
        (step_times(1, {0: 0.0, 1: 5.0}), "1 rows need times"),
        ('{"B": 1}', "missing required field"),
        ("", "no steps"),
    ],
)
def test_wrong_step_times_are_refused(
    folders: Path, text: str, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    times = folders / "times.json"
    times.write_text(text)
    with pytest.raises(SystemExit):
        run(folders, "--step-times", str(times))
    assert words in capsys.readouterr().err


def test_a_folder_without_texts_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        run(tmp_path)
    assert f"{tmp_path}: no texts of a fitting length" in capsys.readouterr().err
