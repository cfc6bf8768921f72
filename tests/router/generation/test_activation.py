"""Where an activated adapter begins to act, beside PEFT's own search."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from peft import LoraConfig
from peft.tuners.lora.variants import calculate_alora_offsets

from loraplex.router.generation.tokenise import adapter_from

IDS = st.one_of(st.integers(0, 2), st.integers(0, 1 << 40))


@pytest.mark.parametrize(
    ("prompt", "invocation", "begins"),
    [
        ([1, 2, 3], (), 0),
        ([1, 2, 3], (2, 3), 1),
        ([2, 3, 2, 3, 4], (2, 3), 2),
        ([2, 2, 2], (2, 2), 1),
        ([1, 2], (3,), None),
        ([1], (1, 2), None),
        ([0, 1 << 8, 1], (1,), 2),
        ([1 << 8, 0], (1,), None),
    ],
)
def test_table(prompt: list[int], invocation: tuple[int, ...], begins: int | None) -> None:
    assert adapter_from(prompt, invocation) == begins


def test_no_search_takes_longer_than_its_texts() -> None:
    """A search that tries all places takes hours here."""
    half = [1] * 250_000
    assert adapter_from(half * 2, (*half, 2, *half)) is None
    assert adapter_from([*half, 2, *half], (*half, 2, *half)) == 0
    assert adapter_from(half, (1 << 8,)) is None


@given(prompt=st.lists(IDS, min_size=1, max_size=12), data=st.data())
def test_as_peft_finds_it(prompt: list[int], data: st.DataObject) -> None:
    own = st.integers(0, len(prompt) - 1).flatmap(
        lambda at: st.integers(1, 3).map(lambda count: prompt[at : at + count])
    )
    invocation = data.draw(st.one_of(own, st.lists(IDS, min_size=1, max_size=3)))
    config = LoraConfig(alora_invocation_tokens=invocation, task_type="CAUSAL_LM")
    [offset] = calculate_alora_offsets({"a": config}, "a", torch.tensor([prompt]))
    begins = None if offset is None else len(prompt) - offset
    assert adapter_from(prompt, tuple(invocation)) == begins
