"""Differences by position, and what a machine without PEFT says."""

import importlib.util
from importlib.machinery import ModuleSpec
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loraplex.launcher.__main__ import main
from loraplex.launcher.parity.command import Difference, as_text, bucket, spreads


@pytest.mark.parametrize(
    ("position", "ends"),
    [(0, (0, 16)), (15, (0, 16)), (16, (16, 64)), (63, (16, 64)), (1024, (1024, 4096))],
)
def test_buckets_grow_fourfold(position: int, ends: tuple[int, int]) -> None:
    assert bucket(position) == ends


def test_spreads_by_part_and_bucket() -> None:
    found = spreads(
        [Difference(1, False, -0.5), Difference(20, True, 0.1), Difference(21, True, 0.3)]
    )
    rows = {one.tokens_at: (one.tokens, round(one.mean, 9), one.max) for one in found}
    assert rows == {
        "all": (3, 0.3, 0.5),
        "prompt": (1, 0.5, 0.5),
        "answer": (2, 0.2, 0.3),
        "0-15": (1, 0.5, 0.5),
        "16-63": (2, 0.2, 0.3),
    }
    assert as_text(found).splitlines()[1].split() == ["all", "3", "3.00e-01", "5.00e-01"]


def test_spreads_by_family_and_rank() -> None:
    found = spreads(
        [
            Difference(1, False, -0.5, "llama", "8"),
            Difference(2, False, 0.1, "llama", "64"),
            Difference(3, False, 0.3, "llama", "64"),
        ]
    )
    rows = {one.tokens_at: (one.tokens, one.max) for one in found}
    assert rows["family llama"] == rows["all"] == (3, 0.5)
    assert (rows["rank 8"], rows["rank 64"]) == ((1, 0.5), (2, 0.3))


tokens = st.builds(Difference, st.integers(0, 5000), st.booleans(), st.floats(-9, 9))


@given(st.lists(tokens))
def test_every_token_is_in_one_part_and_in_one_bucket(differences: list[Difference]) -> None:
    whole, prompt, answer, *buckets = spreads(differences)
    assert whole.tokens == prompt.tokens + answer.tokens == sum(one.tokens for one in buckets)
    assert whole.max == max(prompt.max, answer.max)
    assert whole.max == max([0.0, *(one.max for one in buckets)])


def test_without_peft_the_extra_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    find = importlib.util.find_spec

    def without(name: str) -> ModuleSpec | None:
        return None if name == "peft" else find(name)

    monkeypatch.setattr(importlib.util, "find_spec", without)
    with pytest.raises(SystemExit) as ended:
        main(["parity", "model", str(tmp_path), "--prompts", "nowhere"])
    assert ended.value.code == 1
    assert "peft is not installed: run `pip install 'loraplex[convert]'`" in capsys.readouterr().err
