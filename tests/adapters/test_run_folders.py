"""A run's folder is refused with the names of its adapters, newest first and bounded."""

from pathlib import Path

import pytest

from loraplex.adapters.judge import judge_folder
from loraplex.adapters.peft.files import did_you_mean, newest_first
from loraplex.adapters.ref import AdapterRef
from loraplex.adapters.sources.hub import HubSource
from loraplex.adapters.sources.local import LocalSource
from loraplex.adapters.store.store import AdapterStore
from tests.adapter_folders import small_base, write_adapter
from tests.adapters.refusals import refusal
from tests.adapters.stub_hub import running_hub

BASE = small_base()
STEPS = (100, 90, 1000, 500, 20)


def write_run(folder: Path) -> Path:
    """As trainers leave it: checkpoints, of which the last was not written whole."""
    for step in STEPS:
        write_adapter(folder / f"checkpoint-{step}", BASE)
    (folder / "checkpoint-1100").mkdir()
    (folder / "checkpoint-1100" / "adapter_config.json").write_text("{}")
    (folder / "runs").mkdir()
    (folder / "trainer_state.json").write_text("{}")
    return folder


def said(store: AdapterStore, ref: AdapterRef) -> str:
    """The refusal for the missing config."""
    error = refusal(lambda: store.admit(ref, None))
    assert error is not None
    first = error.violations[0]
    assert (first.code, first.where) == ("missing_file", "adapter_config.json")
    return first.message


@pytest.mark.parametrize(
    ("place", "names", "text"),
    [
        ("local:run", [], ""),
        ("local:run", ["checkpoint-9"], "; did you mean local:run/checkpoint-9?"),
        (
            "hub:org/a",
            ["final", "checkpoint-9", "checkpoint-10"],
            "; did you mean hub:org/a/checkpoint-10 or hub:org/a/checkpoint-9 or hub:org/a/final?",
        ),
        ("local:checkpoint-2", ["../checkpoint-1"], "; did you mean local:checkpoint-1?"),
        ("/srv/run/checkpoint-2", ["../checkpoint-1"], "; did you mean /srv/run/checkpoint-1?"),
    ],
)
def test_words(place: str, names: list[str], text: str) -> None:
    assert did_you_mean(place, names) == text


def test_many_are_counted() -> None:
    names = [f"checkpoint-{step}" for step in range(1000)]
    text = did_you_mean("local:run", names)
    assert text.startswith("; did you mean local:run/checkpoint-999 or local:run/checkpoint-998 or")
    assert text.endswith("checkpoint-996 (and 996 more)?")
    assert newest_first(["b", "checkpoint-x", "checkpoint-3"]) == [
        "checkpoint-3",
        "b",
        "checkpoint-x",
    ]


def test_a_local_run(tmp_path: Path) -> None:
    write_run(tmp_path / "roots" / "run")
    write_run(tmp_path / "roots" / "deep" / "run")
    (tmp_path / "roots" / "linked").mkdir()
    (tmp_path / "roots" / "linked" / "checkpoint-1").symlink_to(
        tmp_path / "roots/run/checkpoint-90"
    )
    source = LocalSource((tmp_path / "roots",))
    store = AdapterStore(tmp_path / "store", BASE, {"local": source})
    newest = "local:run/checkpoint-1000 or local:run/checkpoint-500 or local:run/checkpoint-100"
    message = said(store, AdapterRef("local", "run"))
    assert f"did you mean {newest} or local:run/checkpoint-90 (and 1 more)?" in message
    deep = said(store, AdapterRef("local", "deep/run"))
    assert "did you mean local:.../run/checkpoint-1000 or" in deep
    assert "deep/" not in deep
    assert "did you mean" not in said(store, AdapterRef("local", "linked"))


def test_beside_a_checkpoint_that_is_not_whole(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run")
    (run / "checkpoint-1100" / "adapter_config.json").unlink()
    store = AdapterStore(tmp_path / "store", BASE, {"local": LocalSource((tmp_path,))})
    message = said(store, AdapterRef("local", "run/checkpoint-1100"))
    assert "did you mean local:.../checkpoint-1000 or local:.../checkpoint-500" in message
    alone = AdapterStore(tmp_path / "b", BASE, {"local": LocalSource((run / "checkpoint-1100",))})
    assert "did you mean" not in said(alone, AdapterRef("local", str(run / "checkpoint-1100")))


def test_the_check_of_a_folder(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run")
    error = refusal(lambda: judge_folder(run, BASE))
    assert error is not None
    assert f"did you mean {run}/checkpoint-1000 or" in error.violations[0].message


def test_a_repository(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run")
    with running_hub() as hub:
        hub.publish("org/run", run)
        store = AdapterStore(tmp_path / "store", BASE, {"hub": HubSource(hub.endpoint)})
        message = said(store, AdapterRef("hub", "org/run"))
    assert "did you mean hub:org/run/checkpoint-1000 or hub:org/run/checkpoint-500" in message
