"""Quantised models on a GPU in bfloat16, with adapters, beside the reference operations."""

from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest

from loraplex.server.kernels.linear.matrix import PackedMatrix
from tests.kernels.batches import on_gpu
from tests.server.model.gpu_trio import Trio, assert_near
from tests.server.model.quantised.checkpoints import save_quantised
from tests.server.model.quantised.formats import (
    BY_TOKEN,
    FP8,
    INT4_128,
    INT8,
    INT_BY_TOKEN,
    Format,
    awq,
    compressed,
    four_bits,
    fp8,
    gptq,
)

pytestmark = [*on_gpu, pytest.mark.filterwarnings("ignore")]
# Groups that divide the rows of `gpu_trio.SIZES`.
FORMATS: dict[str, Format] = {
    "fp8-rows": compressed("float-quantized", FP8, BY_TOKEN),
    "fp8-blocks": fp8([128, 128]),
    "awq": awq(128),
    "gptq-order": gptq(group=64, desc_act=True),
    "int4": compressed("pack-quantized", INT4_128),
    "nf4": four_bits("nf4", nested=True),
    "int8": compressed("int-quantized", INT8, INT_BY_TOKEN),
}
ROWS = 24


@pytest.fixture(scope="module", params=[*FORMATS, "fp8-cache", "int8-cache"])
def trio(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Trio]:
    folder, options = tmp_path_factory.mktemp("base"), dict[str, Any]()
    is_quantised = request.param in FORMATS
    if not is_quantised:
        options["kv_dtype"] = request.param.removesuffix("-cache")
    else:
        options["save"] = partial(save_quantised, form=FORMATS[request.param])
    found = Trio("llama3", {}, folder, ROWS, **options)
    assert found.gpu.executor._graphs is not None
    layers = found.gpu.executor._decoder.weights.layers
    for linear in (linear for layer in layers for linear in layer.linears):
        assert isinstance(linear.weight, PackedMatrix) == is_quantised
    yield found
    found.close()


@pytest.mark.parametrize("chunk", [7, 64])
def test_base(trio: Trio, chunk: int) -> None:
    assert_near(trio, [-1] * ROWS, chunk)


@pytest.mark.parametrize("rows", [1, 8])
def test_few_rows_with_adapters(trio: Trio, rows: int) -> None:
    slots = trio.slots_of_layers
    assert_near(trio, slots[-rows:], 64)


def test_every_adapter_in_one_batch(trio: Trio) -> None:
    assert_near(trio, [*trio.slots.values()], 11)
