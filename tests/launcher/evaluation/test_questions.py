"""Requests of an evaluation, what their answers say, and what is refused at once."""

import argparse
import json
from pathlib import Path
from typing import Any

import pytest

from loraplex.adapters.errors import CommandError
from loraplex.launcher.evaluation.command import _names
from loraplex.launcher.evaluation.questions import (
    LineAnswer,
    likelihoods,
    questions,
    read_answers,
    read_cases,
    verdicts,
)
from loraplex.launcher.evaluation.report import as_text, report_of, row_of
from loraplex.launcher.evaluation.scores import EvalLine
from loraplex.launcher.options import OptionError

CHAT = [{"role": "user", "content": "Two and two?"}]
CASES = [EvalLine(prompt="2+2=", answer="4", parameters={"stop": ["\n"]}), EvalLine(messages=CHAT)]


def test_adapters_come_one_after_the_other() -> None:
    asked = list(questions("exact", ["a", "b"], CASES, 9))
    assert [one.custom_id for one in asked] == ["a 1 0", "a 2 0", "b 1 0", "b 2 0"]
    body = {"temperature": 0, "max_tokens": 9, "stop": ["\n"], "prompt": "2+2=", "model": "a"}
    assert (asked[0].url, asked[0].body) == ("/v1/completions", body)
    assert (asked[3].url, asked[3].body["messages"]) == ("/v1/chat/completions", CHAT)


def test_choices_end_the_prompt_or_the_chat() -> None:
    lines = [EvalLine(prompt="2+2=", choices=["3", "4"]), EvalLine(messages=CHAT, choices=["5"])]
    first, second, chat = questions("choice", ["a"], lines, 9)
    assert [first.body["prompt"], second.body["prompt"]] == ["2+2=3", "2+2=4"]
    assert chat.body["messages"] == [*CHAT, {"role": "assistant", "content": "5"}]
    assert chat.body["continue_final_message"]
    assert {one.body["prompt_logprobs"] for one in (first, second, chat)} == {0}


def test_likelihoods_begin_where_choices_differ() -> None:
    """The tokens before are the same text, whose sums may round differently."""
    found = [
        LineAnswer(ids=(1, 2, 3), logprobs=(-9.0, -1.0, -2.0)),
        LineAnswer(ids=(1, 4), logprobs=(-8.5, -4)),
    ]
    assert likelihoods(found) == [-3.0, -4.0]
    assert likelihoods(found[:1]) == [0]


def test_judges_see_question_right_answer_and_answer() -> None:
    answers = {"a 1 0": LineAnswer(text="four"), "a 2 0": LineAnswer(fault="gone")}
    (asked,) = verdicts("wise", ["a"], CASES, answers)
    text = asked.body["messages"][0]["content"]
    assert all(part in text for part in ("2+2=", "Right answer:\n4\n", "Answer to judge:\nfour\n"))
    assert (asked.custom_id, asked.body["model"]) == ("a 1 0", "wise")


def test_a_judge_sees_the_images_of_a_line() -> None:
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
    content = [{"type": "text", "text": "What is "}, image, {"type": "text", "text": "?"}]
    case = EvalLine(messages=[{"role": "user", "content": content}], answer={"a": 1})
    (asked,) = verdicts("wise", ["a"], [case], {"a 1 0": LineAnswer(text="four")})
    *images, said = asked.body["messages"][0]["content"]
    assert images == [image]
    assert "user: What is [image]?" in said["text"]
    assert 'Right answer:\n{"a": 1}\n' in said["text"]
    assert "AAAA" not in said["text"]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "no lines"),
        ('{"prompt": "x", "answer": "y"}\n\n{"prompt": 3}\n', "line 3: Expected"),
        ('{"prompt": "x"}', "line 1: it has no `answer`"),
        ("nonsense", "line 1: "),
    ],
)
def test_files_that_are_refused(tmp_path: Path, text: str, words: str) -> None:
    (tmp_path / "f.jsonl").write_text(text)
    with pytest.raises(CommandError, match=words):
        read_cases(tmp_path / "f.jsonl", "exact")


def test_a_file_may_begin_with_a_byte_order_mark(tmp_path: Path) -> None:
    (tmp_path / "f.jsonl").write_text('{"prompt": "x", "answer": "y"}', "utf-8-sig")
    assert [case.prompt for case in read_cases(tmp_path / "f.jsonl", "exact")] == ["x"]


def record(custom_id: str, status: int, body: Any) -> str:
    response = {"status_code": status, "request_id": None, "body": body}
    whole = {"id": "batch_req_1_0", "custom_id": custom_id, "response": response, "error": None}
    return json.dumps(whole)


def test_answers_and_faults_are_read(tmp_path: Path) -> None:
    usage = {"prompt_tokens": 3, "completion_tokens": 1}
    entries = [None, {"7": {"logprob": -0.5}}, {"8": {"logprob": -1}}]
    chat = {"choices": [{"message": {"content": "x"}}], "usage": usage, "prompt_logprobs": entries}
    priced = {**usage, "cost": 0.25, "device_seconds": 0.5}
    text = {"choices": [{"text": "y"}], "usage": priced, "created": 5}
    (tmp_path / "out").write_text(record("chat", 200, chat) + "\n" + record("text", 200, text))
    (tmp_path / "err").write_text(record("bad", 404, {"error": {"message": "no adapter"}}))
    found = read_answers(tmp_path / "out", tmp_path / "err")
    assert found["chat"] == LineAnswer("x", (7, 8), (-0.5, -1.0), 3, 1)
    assert found["text"] == LineAnswer("y", (), (), 3, 1, 5, cost=0.25, device_s=0.5)
    assert found["bad"].fault == "no adapter"


def test_a_report_counts_what_failed_and_what_won() -> None:
    lines = [EvalLine(prompt="?", answer="x")] * 2
    answers = {
        f"{name} {n} 0": LineAnswer("x", created=n, prompt_tokens=2, cost=0.5 * n)
        for name in "ab"
        for n in (1, 2)
    }
    answers["b 2 0"] = LineAnswer(fault="no room")
    answers["b 1 0"] = LineAnswer("y", created=7)
    rows = [row_of("exact", name, lines, answers, {}) for name in "ab"]
    assert [(r.score, r.failed, r.seconds, r.prompt_tokens) for r in rows] == [
        (1, 0, 1, 4),
        (0, 1, 0, 0),
    ]
    assert [row.cost for row in rows] == [1.5, None]
    (pair,) = report_of("exact", rows).pairs
    assert (pair.wins, pair.losses, pair.ties, pair.p) == (1, 0, 0, 1.0)
    text = as_text(report_of("exact", rows))
    assert "0-1 (p 1)" in text
    assert text.endswith("b: no room\n")


def adapter(folder: Path) -> Path:
    folder.mkdir(parents=True)
    (folder / "adapter_config.json").write_text("{}")
    return folder


def test_folders_become_adapters(tmp_path: Path) -> None:
    run = tmp_path / "run"
    for step in (100, 20):
        adapter(run / f"checkpoint-{step}")
    (run / "checkpoint-300").mkdir()
    alone = adapter(tmp_path / "mine")
    arguments = argparse.Namespace(what=[str(run), str(alone), "sql"], url=None, adapters=["sql=x"])
    assert _names(arguments) == ["run-checkpoint-20", "run-checkpoint-100", "mine", "sql"]
    assert arguments.adapters[:2] == ["sql=x", f"run-checkpoint-20={run / 'checkpoint-20'}"]
    for what, url, words in (
        ([str(alone)], "http://x", "adapter push"),
        (["sql", "sql"], None, "twice"),
        ([str(tmp_path)], None, "neither"),
        (["./nowhere"], None, "neither"),
    ):
        with pytest.raises((OptionError, CommandError), match=words):
            _names(argparse.Namespace(what=what, url=url, adapters=None))
