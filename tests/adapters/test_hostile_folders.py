"""Every hostile folder is refused with its reason, by the check and through the store."""

import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from loraplex.adapters.errors import AdapterError
from loraplex.adapters.judge import judge_folder
from loraplex.adapters.peft.validate import AdapterLimits
from loraplex.adapters.ref import AdapterRef
from loraplex.adapters.sources.local import LocalSource
from loraplex.adapters.store.store import AdapterStore
from tests.adapter_folders import small_base, write_adapter
from tests.adapters.hostile import cases
from tests.adapters.refusals import refusal, refused_as, violation_codes
from tests.adapters.spoils import UNPICKLED, write_good

BASE = small_base()
CASES = cases(BASE)


def within(seconds: float, call: Callable[[], object]) -> None:
    """Runs `call` on a thread: a hang is a failure, not the end of the tests."""
    failures: list[BaseException] = []

    def run() -> None:
        try:
            call()
        except BaseException as error:
            failures.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(seconds)
    assert not thread.is_alive(), "hangs"
    if failures:
        raise failures[0]


def test_the_folder_that_is_spoiled_is_good(tmp_path: Path) -> None:
    assert judge_folder(write_good(tmp_path / "a", BASE), BASE).manifest.ranks == (8,)
    assert len(CASES) >= 150


def test_what_is_no_weights_file_is_called_by_its_name(tmp_path: Path) -> None:
    """By the check, and by the store, which fetches no weights to find it out."""
    weights = "adapter_model.safetensors"
    pointer = write_good(tmp_path / "pointer", BASE)
    (pointer / weights).write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\n")
    sharded = write_good(tmp_path / "sharded", BASE)
    (sharded / weights).rename(sharded / "adapter_model-00001-of-00001.safetensors")
    store = AdapterStore(tmp_path / "store", BASE, {"local": LocalSource([tmp_path])})
    told = {pointer: "Git-LFS pointer", sharded: "the weights are in several files"}
    for folder, words in told.items():
        calls: list[Callable[[], object]] = [
            lambda folder=folder: judge_folder(folder, BASE),  # type: ignore[misc]
            lambda folder=folder: store.admit(AdapterRef("local", folder.name), None),  # type: ignore[misc]
        ]
        for call in calls:
            error = refusal(call)
            assert error is not None
            assert words in error.violations[0].message
            assert len(error.violations) == 1


def test_an_adapter_of_another_base_gets_advice(tmp_path: Path) -> None:
    folder = write_adapter(tmp_path / "a", BASE, config={"base_model_name_or_path": "x/y"})
    error = refusal(lambda: judge_folder(folder, BASE))
    assert error is not None
    assert "--model-name" in error.violations[0].message
    assert "--allow-other-base" in error.violations[0].message


@pytest.mark.parametrize("name", CASES)
def test_refused_by_the_check(name: str, tmp_path: Path) -> None:
    spoil, expected = CASES[name]
    folder = write_good(tmp_path / "a", BASE)
    spoil(folder)

    def check() -> None:
        assert refused_as(lambda: judge_folder(folder, BASE)) == expected
        error = refusal(lambda: judge_folder(folder))
        assert error is None or error.code in ("invalid", "too_large"), "without a base"

    within(60, check)
    assert not UNPICKLED.exists()


@pytest.mark.parametrize("name", CASES)
def test_refused_by_the_store_which_keeps_nothing(name: str, tmp_path: Path) -> None:
    spoil, expected = CASES[name]
    spoil(write_good(tmp_path / "root" / "a", BASE))
    store = AdapterStore(tmp_path / "store", BASE, {"local": LocalSource([tmp_path / "root"])})
    found: list[AdapterError | None] = []
    within(60, lambda: found.append(refusal(lambda: store.admit(AdapterRef("local", "a"), None))))
    (error,) = found
    assert error is not None
    codes = {violation.code for violation in error.violations} or {error.code}
    # Files of a wrong kind are refused before anything is read, and what the small files forbid
    # before the weights are fetched.
    assert codes <= expected | {"escaping_link", "not_found"}
    kept = [path for path in (tmp_path / "store").rglob("*") if path.is_file()]
    assert kept == []


def test_limits(tmp_path: Path) -> None:
    folder = write_adapter(tmp_path / "a", BASE, rank=9)
    limits = AdapterLimits(max_lora_rank=8)
    assert violation_codes(lambda: judge_folder(folder, BASE, limits)) == {"rank_too_large"}
    error = refusal(lambda: judge_folder(folder, BASE, AdapterLimits(max_bytes=1000)))
    assert error is not None
    assert error.code == "too_large"
    other = write_adapter(tmp_path / "b", BASE, config={"base_model_name_or_path": "x/y"})
    assert violation_codes(lambda: judge_folder(other, BASE)) == {"wrong_base"}
    judge_folder(other, BASE, AdapterLimits(allow_other_base=True))


@pytest.mark.parametrize(
    "name",
    ["org/base", "mirror/base", "Mirror/BASE", "/models/base/", "", "./base", "base"]
    + ["/c/hub/models--org--base/snapshots/0123abc", "models--org--base/snapshots/0123abc/"],
)
def test_names_of_the_same_base(name: str, tmp_path: Path) -> None:
    judge_folder(
        write_adapter(tmp_path / "a", BASE, config={"base_model_name_or_path": name}), BASE
    )


@pytest.mark.parametrize(
    "name", ["org/base-7b", "org", "base/other", "models--org--other/snapshots/base1"]
)
def test_names_of_another_base(name: str, tmp_path: Path) -> None:
    folder = write_adapter(tmp_path / "a", BASE, config={"base_model_name_or_path": name})
    assert violation_codes(lambda: judge_folder(folder, BASE)) == {"wrong_base"}


def test_a_missing_folder_is_not_found(tmp_path: Path) -> None:
    error = refusal(lambda: judge_folder(tmp_path / "none", BASE))
    assert error is not None
    assert error.code == "not_found"
