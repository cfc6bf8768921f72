"""Families whose maths is not Llama's on a GPU, in bfloat16, with adapters of parity's table."""

from collections.abc import Iterator
from typing import Any

import pytest

from tests.kernels.batches import on_gpu
from tests.server.model.gpu_trio import Trio, assert_near

pytestmark = [*on_gpu, pytest.mark.filterwarnings("ignore")]
# A row of parity's table -> what differs from it and from `gpu_trio.SIZES`.
MODELS: dict[str, dict[str, Any]] = {
    "gemma": {},
    "gemma2": {},
    "gemma3": {},
    "gemma4": {"global_head_dim": 128},
    "glm4": {},
    "gpt-oss": {},
    "granite": {},
    "lfm2": {},
    "falcon-h1": {},
    "granite-h": {"mamba_d_head": 128},
    "ministral3": {},
    "mistral-window": {},
    "mixtral": {},
    "nemotron-h": {},
    "olmo3": {},
    "phi3": {"num_key_value_heads": 4},
    "qwen3-moe": {"moe_intermediate_size": 96},
    "qwen3.5": {},
    "smollm3-windows": {},
}


@pytest.fixture(scope="module", params=MODELS)
def trio(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Trio]:
    found = Trio(request.param, MODELS[request.param], tmp_path_factory.mktemp("base"), 24)
    assert found.gpu.executor._graphs is not None
    yield found
    found.close()


@pytest.mark.parametrize("chunk", [7, 64])
def test_base(trio: Trio, chunk: int) -> None:
    """So many sequences that experts, whose choice a rounding may change, even out."""
    assert_near(trio, [-1] * 24, chunk)


def test_adapters_of_layers(trio: Trio) -> None:
    """These run in graphs: no adapter touches the embedding or the head."""
    assert_near(trio, trio.slots_of_layers, 64)


def test_every_adapter_in_one_batch(trio: Trio) -> None:
    assert_near(trio, [*trio.slots.values()], 11)
