"""A model that two GPUs share, in bfloat16, with adapters of parity's table."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.server.model.gpu_trio import Trio, assert_near
from tests.server.model.sharding.processes import GroupDriver, enough_gpus

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not enough_gpus(2), reason="fewer than two CUDA devices"),
    pytest.mark.filterwarnings("ignore"),
]
# A row of parity's table -> what differs from it and from `gpu_trio.SIZES`.
MODELS: dict[str, dict[str, Any]] = {
    "llama3": {},
    "gemma3": {},
    "gpt-oss": {},
    "olmo3": {},
    "phi3": {"num_key_value_heads": 4},
    "qwen3-moe": {"moe_intermediate_size": 128},
}


@pytest.fixture(scope="module", params=MODELS)
def trio(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Trio]:
    folder = tmp_path_factory.mktemp("base")

    def make_gpu(base: Path, **options: Any) -> GroupDriver:
        return GroupDriver(base, 2, folder / "meeting", **options)

    found = Trio(request.param, MODELS[request.param], folder / "base", 24, make_gpu=make_gpu)
    assert found.gpu.devices()[0]._graphs is not None
    yield found
    found.close()


@pytest.mark.parametrize("chunk", [7, 64])
def test_base(trio: Trio, chunk: int) -> None:
    assert_near(trio, [-1] * 24, chunk)


def test_adapters_of_layers(trio: Trio) -> None:
    """These run in graphs: no adapter touches the embedding or the head."""
    assert_near(trio, trio.slots_of_layers, 64)


def test_every_adapter_in_one_batch(trio: Trio) -> None:
    assert_near(trio, [*trio.slots.values()], 11)
