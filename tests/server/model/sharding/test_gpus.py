"""A model that two GPUs share, in bfloat16, with adapters of parity's table."""

import multiprocessing
from concurrent.futures import ProcessPoolExecutor
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


@pytest.mark.parametrize("name", MODELS)
def test_family(name: str, tmp_path: Path) -> None:
    """In its own process: only the first group of a process can share memory of GPUs."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as process:
        process.submit(_check, name, tmp_path).result()


def _check(name: str, folder: Path) -> None:
    def make_gpu(base: Path, **options: Any) -> GroupDriver:
        return GroupDriver(base, 2, folder / "meeting", **options)

    trio = Trio(name, MODELS[name], folder / "base", 24, make_gpu=make_gpu)
    try:
        assert trio.gpu.devices()[0]._graphs is not None
        for chunk in (7, 64):
            assert_near(trio, [-1] * 24, chunk)
        # In graphs: no adapter touches the embedding or the head.
        assert_near(trio, trio.slots_of_layers, 64)
        assert_near(trio, [*trio.slots.values()], 11)
    finally:
        trio.close()
