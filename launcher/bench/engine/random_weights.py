"""A model's tensors with random numbers, made on its device, quantised ones in their layouts."""

import math
from dataclasses import dataclass, replace

import torch

from loraplex.launcher.bench.errors import BenchError
from loraplex.server.model.checkpoint.area import whole
from loraplex.server.model.checkpoint.mxfp4 import E2M1, SCALE_BIAS
from loraplex.server.model.checkpoint.mxfp4 import grouped as grouped_mxfp4
from loraplex.server.model.latent_weights import LatentWeights
from loraplex.server.model.linear.dense import DenseLinear
from loraplex.server.model.linear.experts import ExpertsLinear, MoeWeights
from loraplex.server.model.linear.linear import Linear
from loraplex.server.model.linear.packed import Fp8Weight, GroupedWeight, PackedWeight
from loraplex.server.model.linear.quantise import NF4
from loraplex.server.model.linear.quantised import QuantisedLinear, matrix_of
from loraplex.server.model.linear.rounded import of_rounded_inputs
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
    input_form,
)
from loraplex.server.model.quantisation.quantisation import Quantisation
from loraplex.server.model.spec.latent_spec import LatentSpec
from loraplex.server.model.spec.linear_spec import MXFP4_BLOCK, LinearSpec
from loraplex.server.model.spec.model_spec import (
    AttentionSpec,
    Branch,
    EmbeddingSpec,
    LayerInputs,
    LayerSpec,
    MlpSpec,
    ModelSpec,
    NormSpec,
    layer_path,
)
from loraplex.server.model.spec.moe_spec import MoeSpec
from loraplex.server.model.spec.state_spec import DeltaNetSpec, Mamba2Spec, ShortConvSpec
from loraplex.server.model.state_weights import ShortConvWeights, delta_net_weights, mamba2_weights
from loraplex.server.model.weights import (
    AttentionWeights,
    BranchWeights,
    EmbeddingWeights,
    InputWeights,
    LayerNorm,
    LayerWeights,
    MlpWeights,
    ModelWeights,
    Norm,
    RmsNorm,
    StepWeights,
)

STD = 0.02
_STD_OF_CODES = 2.9  # of E2M1, each code as likely as another
_INPUT_SCALE = 0.02
_ROWS = 2048  # that are drawn at once


def random_weights(model: ModelSpec, dtype: torch.dtype, device: torch.device) -> ModelWeights:
    """Makes every tensor of `model` in `dtype` on `device`: matrices of N(0, 0.02^2), biases of
    zeros, norms of ones. Matrices of layers are quantised as `model` says."""
    make = _RandomWeights(dtype, device, model.quantisation)
    embedding = model.embedding
    embed = make.matrix(embedding.num_rows, embedding.size)
    head = DenseLinear(embed) if model.head.tied else make.linear(model.head.linear)
    layers = (make.layer(index, layer) for index, layer in enumerate(model.layers))
    return ModelWeights(
        embed, tuple(layers), make.norm(model.norm), head, {}, make.embedding(embedding)
    )


@dataclass(frozen=True, slots=True)
class _RandomWeights:
    dtype: torch.dtype
    device: torch.device
    quantisation: Quantisation | None

    def matrix(self, *shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=self.dtype, device=self.device).normal_(std=STD)

    def linear(self, spec: LinearSpec, layer: int | None = None) -> Linear:
        form = self._form(spec, layer)
        inputs = input_form(form)
        scale = _INPUT_SCALE if inputs is not None and inputs.scales == "tensor" else None
        return of_rounded_inputs(self._base(spec, form), inputs, scale)

    def _form(self, spec: LinearSpec, layer: int | None) -> WeightForm | None:
        if layer is None or self.quantisation is None:
            return None
        return self.quantisation.form(layer_path(layer, spec.parts[0].path))

    def _base(self, spec: LinearSpec, form: WeightForm | None) -> DenseLinear | QuantisedLinear:
        bias = self._bias(spec.out_features) if spec.bias else None
        shape = (spec.out_features, spec.in_features)
        if form is None:
            return DenseLinear(self.matrix(*shape), bias)
        packed = random_packed(form, shape, STD, self.device)
        if self.device.type == "cpu":
            weight = torch.empty(shape, dtype=self.dtype, device=self.device)
            return DenseLinear(packed.dequantised(weight), bias)
        matrix = matrix_of(packed)
        if matrix is None:
            raise BenchError(f"{spec.parts[0].path}: the kernels read no such groups")
        return QuantisedLinear(matrix, bias, self.dtype)

    def norm(self, spec: NormSpec) -> Norm:
        if spec.kind == "rms":
            return RmsNorm(self._ones(spec.size), spec.epsilon)
        bias = self._bias(spec.size) if spec.bias else None
        return LayerNorm(self._ones(spec.size), bias, spec.epsilon)

    def embedding(self, spec: EmbeddingSpec) -> EmbeddingWeights:
        places = spec.positions
        rows = 0 if places is None else spec.num_types * (places.rows - places.first)
        projection = None if spec.projection is None else self.linear(spec.projection)
        added = self.matrix(rows, spec.size) if rows else None
        inputs = self._inputs(spec.inputs)
        return EmbeddingWeights(added, self._optional(spec.norm), projection, inputs)

    def _inputs(self, spec: LayerInputs | None) -> InputWeights | None:
        if spec is None:
            return None
        table = self.matrix(spec.rows, spec.layers, spec.own_size)
        mine = slice(spec.own_size)
        return InputWeights(spec, table, self.linear(spec.linear), self.norm(spec.norm), mine)

    def layer(self, index: int, spec: LayerSpec) -> LayerWeights:
        steps = (
            StepWeights(
                tuple(self._branch(index, branch) for branch in step.branches),
                self._optional(step.pre),
                self._optional(step.post),
                tuple((self._optional(each.pre), self._optional(each.post)) for each in step.own),
                after=self._optional(step.after),
            )
            for step in spec.steps
        )
        return LayerWeights(tuple(steps))

    def _branch(self, index: int, spec: Branch) -> BranchWeights:
        match spec:
            case LatentSpec():
                q_a = None if spec.q_a is None else self.linear(spec.q_a, index)
                kv_a, q_b, o = (self.linear(each, index) for each in (spec.qkv, spec.q_b, spec.o))
                kv_b = DenseLinear(self.matrix(spec.kv_b.out_features, spec.latent))
                of_latents = RmsNorm(self._ones(spec.latent), spec.latent_norm.epsilon)
                q_norm = self._optional(spec.q_a_norm)
                return LatentWeights(spec, q_a, kv_a, q_b, kv_b, o, q_norm, of_latents)
            case AttentionSpec():
                heads = spec.num_heads + (spec.num_kv_heads if spec.k_norm else 0)
                return AttentionWeights(
                    self.linear(spec.qkv, index),
                    self.linear(spec.o, index),
                    self._ones(heads, spec.head_dim) if spec.q_norm else None,
                    self._ones(spec.num_heads).float() if spec.sinks else None,
                    gate=None if spec.gate is None else self.linear(spec.gate, index),
                )
            case DeltaNetSpec():
                ones = self._ones(spec.value_heads).float()
                return delta_net_weights(
                    spec,
                    tuple(self.linear(linear, index) for linear in spec.linears),
                    self.matrix(spec.num_channels, spec.kernel),
                    (-ones, ones),
                    self._ones(spec.value_dim),
                )
            case Mamba2Spec():
                ones = self._ones(spec.heads).float()
                bias = self._bias(spec.num_channels) if spec.bias else None
                return mamba2_weights(
                    spec,
                    tuple(self.linear(linear, index) for linear in spec.linears),
                    (self.matrix(spec.num_channels, spec.kernel), bias),
                    (-ones, ones, ones),
                    None if spec.norm_size is None else self._ones(spec.inner),
                )
            case ShortConvSpec():
                linears = tuple(self.linear(linear, index) for linear in spec.linears)
                bias = self._bias(spec.channels) if spec.bias else None
                conv = self.matrix(spec.channels, spec.kernel)
                return ShortConvWeights.of(spec, linears, conv, bias)
            case MlpSpec():
                gate_up, down = self.linear(spec.gate_up, index), self.linear(spec.down, index)
                numbers = self._ones(4).float() if spec.activation == "xielu" else None
                gate = None if spec.out_gate is None else self._chooser(spec.out_gate)
                return MlpWeights(spec, gate_up, down, numbers, gate)
            case MoeSpec():
                router = self._chooser(spec.router)
                experts = (self._experts(spec.gate_up, index), self._experts(spec.down, index))
                numbers = self._ones(spec.experts).float() if spec.correction else None
                norm = self._optional(spec.router_norm)
                scales = self._ones(spec.experts).float() if spec.scales else None
                latent = tuple(self.linear(each, index) for each in spec.latent)
                return MoeWeights(spec, router, *experts, numbers, norm, scales, latent)

    def _chooser(self, spec: LinearSpec) -> DenseLinear:
        bias = self._bias(spec.out_features) if spec.bias else None
        return DenseLinear(self.matrix(spec.out_features, spec.in_features), bias)

    def _experts(self, spec: LinearSpec, layer: int) -> ExpertsLinear:
        bias = self._bias(spec.experts, spec.out_features) if spec.bias else None
        packed = self._packed_experts(spec, layer)
        matrix = None if packed is None else matrix_of(packed)
        if matrix is not None and self.device.type != "cpu":
            return ExpertsLinear(replace(matrix, matrices=spec.experts), bias)
        return ExpertsLinear(self.matrix(spec.experts, spec.out_features, spec.in_features), bias)

    def _packed_experts(self, spec: LinearSpec, layer: int) -> PackedWeight | None:
        shape = (spec.experts * spec.out_features, spec.in_features)
        if spec.stored is not None and spec.stored.form == "mxfp4":
            return random_mxfp4(shape, STD, self.device)
        if self.quantisation is None or spec.stored is None or spec.stored.form != "each":
            return None
        form = self.quantisation.form(layer_path(layer, spec.parts[0].path.format(0)))
        return None if form is None else random_packed(form, shape, STD, self.device)

    def _optional(self, spec: NormSpec | None) -> Norm | None:
        return None if spec is None else self.norm(spec)

    def _bias(self, *shape: int) -> torch.Tensor:
        return torch.zeros(shape, dtype=self.dtype, device=self.device)

    def _ones(self, *shape: int) -> torch.Tensor:
        return torch.ones(shape, dtype=self.dtype, device=self.device)


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


def random_mxfp4(shape: tuple[int, int], std: float, device: torch.device) -> PackedWeight:
    """Makes a matrix in MXFP4; parameters as of `random_packed`."""
    blocks = torch.empty(shape[0], shape[1] // 2, dtype=torch.uint8, device=device).random_()
    scales = torch.empty(shape[0], shape[1] // MXFP4_BLOCK, dtype=torch.uint8, device=device)
    return grouped_mxfp4(blocks, scales.fill_(_exponent(std)), whole(shape)).weight


def _exponent(std: float) -> int:
    """Finds the exponent whose power of two gives random codes about this deviation."""
    return SCALE_BIAS + round(math.log2(std / _STD_OF_CODES))


def _fp8(form: EightBitForm, shape: tuple[int, int], std: float, device: torch.device) -> Fp8Weight:
    rows, columns = {"tensor": shape, "channel": (1, shape[1])}.get(form.scales, form.block)
    numbers = torch.empty(shape, dtype=torch.float8_e4m3fn, device=device)
    for first in range(0, shape[0], _ROWS):
        part = numbers[first : first + _ROWS]
        part.copy_(torch.randn(part.shape, device=device))
    blocks = (-(-shape[0] // rows), -(-shape[1] // columns))
    return Fp8Weight(numbers, torch.full(blocks, std, device=device), (rows, columns))


def _codes(
    bits: int,
    group: int | None,
    shape: tuple[int, int],
    std: float,
    device: torch.device,
    *,
    zeros: bool = False,
) -> GroupedWeight:
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
    return GroupedWeight(codes.random_(), inputs, bits, size, scales, least)
