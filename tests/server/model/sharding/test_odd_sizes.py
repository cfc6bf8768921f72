"""Sizes that devices cannot share evenly, quantised matrices, and the same tokens as one device."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from loraplex.adapters.base import Shard
from loraplex.server.model.checkpoint.checkpoint import read_config
from loraplex.server.model.weights import load_weights
from loraplex.server.protocol import SamplingParams
from tests.grids import beyond
from tests.server.model.adapter_zoo import ZOO, with_zoo
from tests.server.model.driver import EVERY_LOGPROB, Driver, Stream, generate
from tests.server.model.families.parity import GREEDY, assert_parity, prompt
from tests.server.model.hub_models import make_model, save_model
from tests.server.model.sharding.lockstep import ShardedDriver
from tests.server.model.sharding.near import assert_near, load_adapters, run

pytestmark = [
    pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore:The following .*_pattern keys:RuntimeWarning"),
]


@pytest.mark.parametrize("shards", beyond(1, [2, 4]))
@pytest.mark.parametrize("inner", [98, 40])
def test_features_that_do_not_divide(shards: int, inner: int, tmp_path: Path) -> None:
    """98 inner features, and a vocabulary that neither 2 nor 4 shards of eights hold evenly."""
    model = make_model("llama3", intermediate_size=inner)
    driver = ShardedDriver(save_model(model, tmp_path), shards)
    oracle = with_zoo(model)
    slots = load_adapters(driver, oracle, shards, [*ZOO])
    streams = [
        Stream(driver, row, prompt(5 + 3 * row, row), slot=slot, sampling=GREEDY)
        for row, slot in enumerate(slots.values())
    ]
    generate(driver, streams, 3, 7)
    for name, stream in zip(slots, streams, strict=True):
        assert_parity(oracle, name, stream)
    driver.close()


@pytest.mark.parametrize(
    "sampling",
    [GREEDY, SamplingParams(temperature=0.9, top_p=0.9, logprobs=EVERY_LOGPROB)],
    ids=["greedy", "drawn"],
)
@pytest.mark.parametrize("shards", beyond(1, [2, 4]))
def test_the_same_as_one_device(shards: int, sampling: SamplingParams, tmp_path: Path) -> None:
    model = make_model("qwen2")
    folder, oracle = save_model(model, tmp_path), with_zoo(model)
    one, several = Driver(folder), ShardedDriver(folder, shards)
    slots = [-1, *load_adapters(one, oracle, 1, [*ZOO]).values()]
    load_adapters(several, oracle, shards, [*ZOO])
    assert_near(run(several, slots, sampling), run(one, slots, sampling))
    one.close()
    several.close()


@pytest.mark.parametrize("shards", beyond(1, [2, 4]))
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
