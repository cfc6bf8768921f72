"""A scale of a row's own is PEFT's scaling multiplied: float32, logprobs within 1e-4."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
from peft import PeftModel
from peft.tuners.lora import LoraLayer

from loraplex.server.engine.plan import ScaledSlot, StepPlan
from tests.kernels.batches import interpreted
from tests.server.model.adapter_zoo import zoo_of
from tests.server.model.driver import Driver, Stream, generate
from tests.server.model.families.parity import GREEDY, Served, assert_parity, prompt
from tests.server.model.families.variants import VARIANTS
from tests.server.model.gpu_pair import assert_same, small_pair
from tests.server.model.hub_models import make_model
from tests.server.model.sharding.lockstep import ShardedDriver

pytestmark = [
    pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore:The following .*_pattern keys:RuntimeWarning"),
]
SCALES = (0.5, -2.0, 3.25)


@contextmanager
def scaled(model: PeftModel, adapter: str | None, scale: float) -> Iterator[None]:
    layers = [m for m in model.modules() if isinstance(m, LoraLayer) and adapter in m.scaling]
    for layer in layers:
        layer.scaling[adapter] *= scale
    yield
    for layer in layers:
        layer.scaling[adapter] /= scale


def fill(driver: Driver, *slots: ScaledSlot) -> None:
    driver.run(StepPlan(0, [], [], [], [], [*slots]))


@pytest.mark.parametrize(
    ("name", "shards"),
    [
        pytest.param("llama3", 1, marks=pytest.mark.exhaustive),
        ("qwen3-moe", 1),
        pytest.param("gemma3", 2, marks=pytest.mark.exhaustive),
    ],
)
def test_each_row_has_its_scale(
    name: str, shards: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """One adapter with many scales, others beside it, and the base; slots are used again."""
    make: Any = Driver if shards == 1 else partial(ShardedDriver, shards=shards)
    served = Served(name, tmp_path_factory.mktemp("base"), None, make, shards)
    first = served.driver.executor.limits.adapter_slots
    for shift in (0, 1):
        names = [*served.slabs, *["rank16"] * 3]
        asked = [(each, SCALES[(i + shift) % 3]) for i, each in enumerate(names)]
        fill(
            served.driver,
            *(ScaledSlot(first + i, served.slots[n], scale) for i, (n, scale) in enumerate(asked)),
        )
        rows = [(each, 1.0, served.slots[each]) for each in (None, "rank16")]
        rows += [(each, scale, first + i) for i, (each, scale) in enumerate(asked)]
        streams = [
            Stream(served.driver, row, prompt(4 + row, row), slot=slot, sampling=GREEDY)
            for row, (_, _, slot) in enumerate(rows)
        ]
        generate(served.driver, streams, 3, 5)
        for (adapter, scale, _), stream in zip(rows, streams, strict=True):
            with scaled(served.oracle, adapter, scale):
                assert_parity(served.oracle, adapter, stream)
            stream.free()
    served.driver.close()


@interpreted
def test_kernels_read_a_slots_scale(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As the reference operations, in graphs of decodes and of prompts."""
    settings = {"num_hidden_layers": 1, "hidden_size": 32, "intermediate_size": 48}
    adapters = {"rank16": zoo_of(VARIANTS["llama3"])["rank16"]}
    folder = tmp_path_factory.mktemp("base")
    model = make_model("llama3", **settings)
    with small_pair(model, adapters, folder, monkeypatch) as pair:
        first = pair.gpu.executor.limits.adapter_slots
        for driver in (pair.reference, pair.gpu):
            fill(driver, ScaledSlot(first, 0, -2.0), ScaledSlot(first + 1, 0, 0.5))
        assert_same(pair, [first, 0, -1, first + 1])
        assert 4 in pair.graphs
