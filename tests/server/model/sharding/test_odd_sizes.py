"""Sizes that devices cannot share evenly, quantised matrices, and the same tokens as one device."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from adapters.sharding import Shard
from server.model.checkpoint.checkpoint import read_config
from server.model.weights import load_weights
from server.protocol import SamplingParams
from tests.server.model.adapter_zoo import ZOO, with_zoo
from tests.server.model.driver import EVERY_LOGPROB, Driver, Stream, generate
from tests.server.model.families.parity import assert_parity, prompt
from tests.server.model.hub_models import make_model, save_model
from tests.server.model.sharding.lockstep import ShardedDriver
from tests.server.model.slabs import pack

pytestmark = [
    pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore:The following .*_pattern keys:RuntimeWarning"),
]
GREEDY = SamplingParams(temperature=0.0, logprobs=EVERY_LOGPROB, prompt_logprobs=2)
# Of which rounding alone may choose the other.
NEAR = 1e-5


def load_zoo(driver: Driver, oracle: Any, shards: int) -> dict[str, int]:
    first, slots = 0, {}
    for slot, name in enumerate(ZOO):
        layout, slab = pack(oracle, name, shards=shards)
        assert driver.load(slot, layout, slab, first).error is None
        first += sum(layout.runs)
        slots[name] = slot
    return slots


@pytest.mark.parametrize("shards", [2, 4])
@pytest.mark.parametrize("inner", [98, 40])
def test_features_that_do_not_divide(shards: int, inner: int, tmp_path: Path) -> None:
    """98 inner features, and a vocabulary that neither 2 nor 4 shards of eights hold evenly."""
    model = make_model("llama3", intermediate_size=inner)
    driver = ShardedDriver(save_model(model, tmp_path), shards)
    oracle = with_zoo(model)
    slots = load_zoo(driver, oracle, shards)
    streams = [
        Stream(driver, row, prompt(5 + 3 * row, row), slot=slot, sampling=GREEDY)
        for row, slot in enumerate(slots.values())
    ]
    generate(driver, streams, 3, 7)
    for name, stream in zip(slots, streams, strict=True):
        assert_parity(oracle, name, stream)
    driver.close()


def run(driver: Driver, slots: list[int], sampling: SamplingParams) -> list[Stream]:
    streams = [
        Stream(driver, row, prompt(4 + 5 * row % 29, row), slot=slot, sampling=sampling, seed=row)
        for row, slot in enumerate(slots)
    ]
    generate(driver, streams, 24, 16)
    return streams


@pytest.mark.parametrize(
    "sampling",
    [GREEDY, SamplingParams(temperature=0.9, top_p=0.9, logprobs=EVERY_LOGPROB)],
    ids=["greedy", "drawn"],
)
@pytest.mark.parametrize("shards", [2, 4])
def test_the_same_as_one_device(shards: int, sampling: SamplingParams, tmp_path: Path) -> None:
    """Logprobs within 1e-5 of their size. Tokens differ only where the two best are nearer."""
    model = make_model("qwen2")
    folder, oracle = save_model(model, tmp_path), with_zoo(model)
    one, several = Driver(folder), ShardedDriver(folder, shards)
    slots = [-1, *load_zoo(one, oracle, 1).values()]
    load_zoo(several, oracle, shards)
    found = zip(run(one, slots, sampling), run(several, slots, sampling), strict=True)
    differing = tokens = 0
    for expected, stream in found:
        for ours, theirs in zip(stream.logprobs, expected.logprobs, strict=True):
            tokens += 1
            a, b = (dict(each.top) for each in (ours, theirs))
            assert all(abs(a[token] - b[token]) < NEAR * max(1, -b[token]) for token in a)
            if ours.token_id != theirs.token_id:
                best = sorted(b.values())[-2:]
                assert best[1] - best[0] < NEAR
                differing += 1
                break  # from here on the contexts differ
    print(f"{differing} of {tokens} tokens differ")
    assert differing * 10_000 <= tokens
    one.close()
    several.close()


@pytest.mark.parametrize("shards", [2, 4])
def test_parts_of_the_weights_are_the_whole(shards: int, tmp_path: Path) -> None:
    """Side by side, or summed, the parts of each matrix are what one device has."""
    folder = save_model(make_model("qwen2"), tmp_path)
    model = read_config(folder)
    load = partial(load_weights, folder, model, torch.float32, torch.device("cpu"))
    whole = load()
    parts = [load(shard=Shard(index, shards)) for index in range(shards)]
    x = torch.randn(3, model.hidden_size)
    down = whole.layers[0].linears[3]
    inner: Any = torch.randn(3, down.in_features)
    cut = inner.split(down.in_features // shards, 1)
    summed = sum(
        part.layers[0].linears[3].run(mine.contiguous())
        for part, mine in zip(parts, cut, strict=True)
    )
    torch.testing.assert_close(summed, down.run(inner), atol=1e-5, rtol=1e-5)
    logits = torch.cat([part.lm_head.run(x) for part in parts], 1)[:, : model.vocab_size]
    torch.testing.assert_close(logits, whole.lm_head.run(x))
