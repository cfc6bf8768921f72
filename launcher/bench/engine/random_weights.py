"""A model's tensors with random numbers, made on its device, quantised ones in their layouts."""

import math
from dataclasses import replace

import torch

from loraplex.server.model.checkpoint.unpack import E2M1, SCALE_BIAS, Cut
from loraplex.server.model.linear.packed import PackedWeight
from loraplex.server.model.linear.quantise import NF4
from loraplex.server.model.quantisation.forms import (
    FOUR_BIT_BLOCK,
    AwqForm,
    EightBitForm,
    FourBitForm,
    Fp4Form,
    GptqForm,
    PackedForm,
    RowwiseForm,
    WeightForm,
)
from loraplex.server.model.spec.model_spec import ModelSpec, layer_path
from loraplex.server.model.weight_source import WeightSource
from loraplex.server.model.weights import ModelWeights, weights_of

STD = 0.02
_STD_OF_CODES = 2.9  # of E2M1, each code as likely as another
_INPUT_SCALE = 0.02
_ROWS = 2048  # that are drawn at once


def random_weights(model: ModelSpec, dtype: torch.dtype, device: torch.device) -> ModelWeights:
    """Makes every tensor of `model`, which is the device's part, in `dtype` on `device`: matrices
    of N(0, 0.02^2), biases of zeros, norms of ones. Matrices of layers are quantised as `model`
    says."""
    source = _RandomSource(model, dtype, device)
    with torch.inference_mode():
        return weights_of(source, model, model.embedding.tensor)


class _RandomSource(WeightSource):
    """Random tensors with the names and the shapes that a checkpoint of a model has."""

    def __init__(self, model: ModelSpec, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__(
            (), _forms(model), dtype, device, packed=device.type != "cpu", at_load=None
        )
        self._shapes = model.tensors()

    def has(self, name: str) -> bool:
        return name in self._shapes

    def mapped(self, name: str) -> torch.Tensor:
        shape = self._shapes[name]
        if name.endswith(("_blocks", "_scales")):
            codes = torch.empty(shape, dtype=torch.uint8, device=self.device)
            return codes.random_() if name.endswith("_blocks") else codes.fill_(_exponent(STD))
        made = torch.empty(shape, dtype=self.dtype, device=self.device)
        if name.endswith(("bias", "A_log")):
            return made.zero_()
        return made.normal_(std=STD) if len(shape) > 1 and "norm" not in name else made.fill_(1)

    def fill(self, path: str, cut: Cut, weight: torch.Tensor, *, transposed: bool = False) -> None:
        packed = self.packed_part(path, cut) if path in self.forms else None
        if packed is None:
            weight.normal_(std=STD)
        else:
            packed.dequantised(weight)

    def packed_part(self, path: str, cut: Cut) -> PackedWeight:
        return random_packed(self.forms[path], cut.shape, STD, self.device)

    def number(self, name: str) -> float:
        return 1.0

    def input_scale(self, path: str) -> float:
        return _INPUT_SCALE


def _forms(model: ModelSpec) -> dict[str, WeightForm]:
    """Forms of the layers' quantised matrices, by their paths."""
    if model.quantisation is None:
        return {}
    paths = (
        layer_path(index, matrix.path)
        for index, layer in enumerate(model.layers)
        for linear in layer.linears
        for matrix in linear.matrices()
    )
    found = ((path, model.quantisation.form(path)) for path in paths)
    return {path: form for path, form in found if form is not None}


def random_packed(
    form: WeightForm, shape: tuple[int, int], std: float, device: torch.device
) -> PackedWeight:
    """Makes a matrix of a form. shape: `[out, in]`. std: of its values, about."""
    match form:
        case EightBitForm(numbers="fp8"):
            return _fp8(form, shape, std, device)
        case EightBitForm() | RowwiseForm():
            return _codes(8, None, shape, std, device)
        case FourBitForm():
            return _of_table(NF4, FOUR_BIT_BLOCK, shape, 2 * std, device)
        case Fp4Form(group):
            return _of_table(E2M1, group, shape, std / _STD_OF_CODES, device)
        case AwqForm(group):
            return _codes(4, group, shape, std, device, zeros=True)
        case GptqForm(bits, group):
            return _codes(bits, group, shape, std, device, zeros=True)
        case PackedForm(bits, _, group, asymmetric):
            return _codes(bits, group, shape, std, device, zeros=asymmetric)


def _of_table(
    table: tuple[float, ...],
    group: int,
    shape: tuple[int, int],
    scale: float,
    device: torch.device,
) -> PackedWeight:
    weight = _codes(4, group, shape, scale, device)
    scales = torch.full_like(weight.scales, scale, dtype=torch.float32)
    return replace(weight, scales=scales, zeros=0, table=torch.tensor(table, device=device))


def _exponent(std: float) -> int:
    """Finds the exponent whose power of two gives random codes about this deviation."""
    return SCALE_BIAS + round(math.log2(std / _STD_OF_CODES))


def _fp8(
    form: EightBitForm, shape: tuple[int, int], std: float, device: torch.device
) -> PackedWeight:
    rows, columns = {"tensor": shape, "channel": (1, shape[1])}.get(form.scales, form.block)
    numbers = torch.empty(shape, dtype=torch.float8_e4m3fn, device=device)
    for first in range(0, shape[0], _ROWS):
        part = numbers[first : first + _ROWS]
        part.copy_(torch.randn(part.shape, device=device))
    blocks = (-(-shape[0] // rows), -(-shape[1] // columns))
    scales = torch.full(blocks, std, device=device)
    return PackedWeight(numbers, shape[1], 0, columns, scales, rows=rows)


def _codes(
    bits: int,
    group: int | None,
    shape: tuple[int, int],
    std: float,
    device: torch.device,
    *,
    zeros: bool = False,
) -> PackedWeight:
    """Draws quantised weights as codes, each as likely as another."""
    outputs, inputs = shape
    size = group or inputs
    groups = (outputs, -(-inputs // size))
    middle = 1 << bits - 1
    codes = torch.empty(outputs, inputs * bits // 8, dtype=torch.uint8, device=device)
    scales = torch.full(groups, std * 12**0.5 / (2 * middle), dtype=torch.float16, device=device)
    least: torch.Tensor | int = middle
    if zeros:
        least = torch.full(groups, middle, dtype=torch.uint8, device=device)
    return PackedWeight(codes.random_(), inputs, bits, size, scales, least)
