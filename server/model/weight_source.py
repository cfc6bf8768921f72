"""Tensors of a checkpoint, brought to the device as matrices of the layouts there are; with those
of what mixes tokens by a state."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from safetensors import SafetensorError, safe_open

from loraplex.adapters.base import WHOLE, Shard, Span, heads_of, pieces
from loraplex.server.kernels.linear.matrix import PackedMatrix
from loraplex.server.kernels.states.operands import Convolution, GatedNorm, StateGates, StateHeads
from loraplex.server.model.checkpoint.area import Area, Stored, UnpackedArea
from loraplex.server.model.checkpoint.checkpoint import CheckpointError, ModelFile
from loraplex.server.model.checkpoint.expert_tensors import ExpertTensors
from loraplex.server.model.checkpoint.stored_forms import StoredForms
from loraplex.server.model.checkpoint.unpack import Cut, cut_of, unpack
from loraplex.server.model.devices.sharding import sharded_states
from loraplex.server.model.linear.dense import ClippedLinear, DenseLinear
from loraplex.server.model.linear.linear import ExpertsLinear, Linear
from loraplex.server.model.linear.packed import PackedWeight, joined
from loraplex.server.model.linear.quantise import quantise
from loraplex.server.model.linear.quantised import QuantisedLinear, matrix_of, of_rounded_inputs
from loraplex.server.model.quantisation.forms import INPUT_SCALES, InputForm, WeightForm, input_form
from loraplex.server.model.spec.linear_spec import BOUNDS, LinearSpec
from loraplex.server.model.spec.model_spec import layer_path
from loraplex.server.model.spec.state_spec import (
    CONV,
    DeltaNetSpec,
    Mamba2Spec,
    ShortConvSpec,
    StateSpec,
)


class WeightSource:
    """Tensors by name out of memory-mapped files. forms: of quantised matrices. packed: these stay
    so where they can. at_load: what other matrices of layers become. shard: of the device,
    whose part of each matrix is taken."""

    def __init__(
        self,
        files: tuple[ModelFile, ...],
        forms: StoredForms,
        dtype: torch.dtype,
        device: torch.device,
        *,
        packed: bool,
        at_load: WeightForm | None,
        shard: Shard = WHOLE,
    ) -> None:
        self.shard = shard
        self._packed, self._at_load = packed, at_load
        self.dtype = dtype
        self.device = device
        self.forms = forms
        self._stored = {
            name: (file.path, tensor.name)
            for file in files
            for name, tensor in file.tensors.items()
        }
        try:
            self._files = {
                file.path: safe_open(str(file.path), framework="pt", device="cpu") for file in files
            }
        except (SafetensorError, OSError) as error:
            raise CheckpointError(f"cannot read the weights: {error}") from None

    def has(self, name: str) -> bool:
        """Whether the checkpoint holds a tensor of this name."""
        return name in self._stored

    def mapped(self, name: str) -> torch.Tensor:
        """Return a tensor as it is stored, in the file's memory."""
        path, stored = self._stored[name]
        try:
            tensor: torch.Tensor = self._files[path].get_tensor(stored)
        except (SafetensorError, OSError) as error:
            raise CheckpointError(f"{path}: {stored}: {error}") from None
        return tensor

    def get(self, name: str) -> torch.Tensor:
        """An own copy: the file may be replaced while we serve."""
        mapped = self.mapped(name)
        return torch.empty(mapped.shape, dtype=self.dtype, device=self.device).copy_(mapped)

    def table(self, name: str) -> torch.Tensor:
        """The device's rows of the embedding."""
        mapped = self.mapped(name)
        rows = Span(len(mapped))
        table = self._zeros(rows.width(self.shard.count), mapped.shape[1])
        mine = mapped[rows.piece(self.shard)]
        table[: len(mine)].copy_(mine)
        return table

    def heads(self, of_heads: torch.Tensor) -> torch.Tensor:
        """The device's heads. of_heads: `[heads, ...]`, of all."""
        return of_heads[heads_of(len(of_heads), self.shard)]

    def rows(self, matrix: torch.Tensor, spans: Sequence[Span]) -> torch.Tensor:
        """The device's rows of a matrix, whose rows spans share out."""
        mine = [matrix[piece.source] for piece in pieces(spans, self.shard)]
        return torch.cat(mine).to(self.device, self.dtype)

    def linear(self, spec: LinearSpec, layer: int | None = None) -> Linear:
        """The device's part. layer: 0-based, where the matrix is one of a layer's."""
        paths = [path_in(part.path, layer) for part in spec.parts]
        base = self._base(spec, paths, layer)
        if spec.clips and isinstance(base, DenseLinear):
            bounds = [torch.stack([self.get(f"{path}.{of}") for of in BOUNDS]) for path in paths]
            return ClippedLinear(base.weight, None, spec.widths, torch.stack(bounds))
        form = self._input_form(paths, layer)
        if form is None:
            return base
        # Matrices that are multiplied at once share one scale, the largest of theirs.
        scale = max(map(self.input_scale, paths)) if form.scales == "tensor" else None
        return of_rounded_inputs(base, form, scale)

    def _base(
        self, spec: LinearSpec, paths: Sequence[str], layer: int | None
    ) -> DenseLinear | QuantisedLinear:
        """The matrix, without what becomes of inputs."""
        cuts = [cut_of(spec, part, self.shard) for part in spec.parts]
        heights = [cut.shape[0] for cut in cuts]
        shape = (sum(heights), cuts[0].shape[1])
        bias = self._bias(spec, cuts, layer)
        if self._packed and all(path in self.forms for path in paths):
            matrix = self._matrix([*zip(paths, cuts, strict=True)])
            if matrix is not None and matrix.shape == shape:
                return QuantisedLinear(matrix, bias, self.dtype)
        weight = self._zeros(*shape)
        for path, cut, rows in zip(paths, cuts, weight.split(heights), strict=True):
            self.fill(path, cut, rows, transposed=spec.transposed)
        if layer is None or self._at_load is None:
            return DenseLinear(weight, bias)
        return self._quantised(weight, bias, self._at_load)

    def _input_form(self, paths: Sequence[str], layer: int | None) -> InputForm | None:
        """How inputs of a product are rounded; None = not at all."""
        at_load = None if layer is None else self._at_load
        found = {input_form(self.forms.get(path, at_load)) for path in paths}
        return found.pop() if len(found) == 1 else None

    def input_scale(self, path: str) -> float:
        """The one scale of a product's inputs. Raises CheckpointError where there is none."""
        scales = (self._optional(f"{path}.{name}") for name in INPUT_SCALES)
        stored = next((scale for scale in scales if scale is not None), None)
        scale = 0.0 if stored is None or not stored.numel() else float(stored.float().max())
        if not 0.0 < scale < math.inf:
            raise CheckpointError(
                f"{path}.{INPUT_SCALES[0]} must be a positive number, got {scale}"
                " (`--activations bf16` needs none)"
            )
        return scale

    def _quantised(
        self, weight: torch.Tensor, bias: torch.Tensor | None, form: WeightForm
    ) -> DenseLinear | QuantisedLinear:
        packed = quantise(weight, form)
        matrix = matrix_of(packed) if self._packed and packed is not None else None
        if matrix is not None:
            return QuantisedLinear(matrix, bias, self.dtype)
        if packed is not None:
            packed.dequantised(weight)
        return DenseLinear(weight, bias)

    def _zeros(self, *shape: int) -> torch.Tensor:
        """A tensor for parts of which some features may stay zero."""
        make = torch.empty if self.shard.count == 1 else torch.zeros
        return make(shape, dtype=self.dtype, device=self.device)

    def _matrix(self, parts: Sequence[tuple[str, Cut]]) -> PackedMatrix | None:
        """Quantised modules, one below the other; None where kernels cannot read them."""
        found = [self.packed_part(path, cut) for path, cut in parts]
        cut = [part for part in found if part is not None]
        whole = joined(cut) if len(cut) == len(found) else None
        return None if whole is None else matrix_of(whole)

    def fill(self, path: str, cut: Cut, weight: torch.Tensor, *, transposed: bool = False) -> None:
        """Write the device's part of a matrix. weight: `cut.shape`, which the matrix of the module
        at `path` is written to. transposed: it is stored so, where it is not quantised.
        """
        if path not in self.forms:
            stored = self.mapped(f"{path}.weight")
            cut.copy(stored.T if transposed else stored, weight)
        else:
            cut.dequantise(partial(self._unpacked, path, cut.whole), weight)

    def packed_part(self, path: str, cut: Cut) -> PackedWeight | None:
        """Read the device's part of a quantised matrix to the device; None where the part is none
        by itself.
        """
        part = cut.packed(partial(self._unpacked, path, cut.whole))
        return None if part is None else part.to(self.device)

    def _unpacked(self, path: str, shape: tuple[int, int], area: Area) -> UnpackedArea:
        """Read part of a quantised matrix to the host's memory. shape: of the whole matrix, `[out,
        in]`. area: what is read.
        """
        stored = Stored(lambda suffix: self._optional(f"{path}.{suffix}"), shape, area)
        try:
            return unpack(self.forms[path], stored)
        except ValueError as error:
            raise CheckpointError(f"{path}: {error}") from None

    def _optional(self, name: str) -> torch.Tensor | None:
        return self.mapped(name) if self.has(name) else None

    def number(self, name: str) -> float:
        """The one number of a tensor, as the model's dtype holds it."""
        return float(self.mapped(name).to(self.dtype).item())

    def kv_scale(self, path: str, of: str) -> float:
        """The scale of keys ("k") or values ("v"), under one of the names that writers use; 1
        without one.

        path: of the attention. Raises CheckpointError where the scale is no positive number.
        """
        for name in (f"{of}_scale", f"{of}_proj.{of}_scale", f"{of}_proj.output_scale"):
            stored = self._optional(f"{path}.{name}")
            if stored is None:
                continue
            scale = float(stored.float().max()) if stored.numel() else 0.0
            if not 0.0 < scale < math.inf:
                raise CheckpointError(f"{path}.{name} must be a positive number, got {scale}")
            return scale
        return 1.0

    def _bias(
        self, spec: LinearSpec, cuts: Sequence[Cut], layer: int | None
    ) -> torch.Tensor | None:
        """Writers of quantised weights store biases of zeros, too, where the model has none. Where
        devices sum their products, the first adds the bias."""
        paths = [path_in(part.path, layer) for part in spec.parts]
        parts = [
            self._optional(f"{path}.bias") if spec.bias or path in self.forms else None
            for path in paths
        ]
        if spec.sharding == "row" and self.shard.index > 0:
            return None
        if not spec.bias and not any(part is not None and part.any() for part in parts):
            return None
        heights = [cut.shape[0] for cut in cuts]
        bias = torch.zeros(sum(heights), dtype=self.dtype, device=self.device)
        for part, cut, rows in zip(parts, cuts, bias.split(heights), strict=True):
            if part is not None:
                cut.copy_rows(part, rows)
        return bias

    def experts(self, spec: LinearSpec, layer: int) -> ExpertsLinear:
        """The matrices of all experts of a layer."""
        cuts = [cut_of(spec, part, self.shard) for part in spec.parts]
        outputs, inputs = sum(cut.shape[0] for cut in cuts), cuts[0].shape[1]
        tensors = ExpertTensors(
            spec,
            cuts,
            lambda path: self.mapped(layer_path(layer, path)),
            lambda path, cut, weight: self.fill(layer_path(layer, path), cut, weight),
        )
        matrix = self._packed_experts(spec, cuts, layer, tensors) if self._packed else None
        weight: torch.Tensor | PackedMatrix
        if matrix is not None and matrix.shape[1] == inputs and outputs % matrix.rows == 0:
            weight = replace(matrix, matrices=spec.experts)
        else:
            weight = tensors.fill(self._zeros(spec.experts, outputs, inputs))
        if not spec.bias:
            return ExpertsLinear(weight)
        bias = self._zeros(spec.experts, outputs)
        if spec.sharding != "row" or self.shard.index == 0:
            tensors.fill_bias(bias)
        return ExpertsLinear(weight, bias)

    def _packed_experts(
        self, spec: LinearSpec, cuts: Sequence[Cut], layer: int, tensors: ExpertTensors
    ) -> PackedMatrix | None:
        """The packed matrices `[experts * out, in]` of all experts.

        None where they are not quantised, or not all in one layout that the kernels read.
        """
        if spec.stored is not None and spec.stored.form == "mxfp4":
            whole = tensors.packed()
            return None if whole is None else matrix_of(whole.to(self.device))
        paths = [layer_path(layer, matrix.path) for matrix in spec.matrices()]
        if not paths or not all(path in self.forms for path in paths):
            return None
        return self._matrix([*zip(paths, [*cuts] * spec.experts, strict=True)])


def path_in(path: str, layer: int | None) -> str:
    """The path of a module of the model, or of one of its layers."""
    return path if layer is None else layer_path(layer, path)


@dataclass(frozen=True, slots=True)
class RecurrentWeights:
    """Weights of a mixer that writes and reads a state, as `spec` says, which is the device's part.

    gates: of the last product before `out`. z_columns: int32, where a product has z, the last one
    if `gates_z`, else the first. heads: which write states and read them.
    """

    spec: DeltaNetSpec | Mamba2Spec
    linears: tuple[Linear, ...]
    conv: Convolution
    gates: StateGates
    norm: GatedNorm
    z_columns: torch.Tensor
    heads: StateHeads
    gates_z: bool = False

    @property
    def is_delta(self) -> bool:
        """Whether states move by the delta rule; else by Mamba-2's."""
        return isinstance(self.spec, DeltaNetSpec)


def delta_net_weights(
    spec: DeltaNetSpec,
    linears: tuple[Linear, ...],
    conv: torch.Tensor,
    decays: tuple[torch.Tensor, torch.Tensor],
    norm: torch.Tensor,
) -> RecurrentWeights:
    """Make the weights of the device's part. linears: in the order of the spec's. conv:
    `[channels, kernel]`. decays: as `StateGates` has them, and the bias. norm: `[value_dim]`.
    """
    mixed, gates = (
        _columns(each, conv.device) for each in (spec.mixed_columns(), spec.gate_columns())
    )
    channels, of_gates = spec.num_channels, 2 * spec.value_heads
    return RecurrentWeights(
        spec,
        linears,
        Convolution(mixed[:channels], conv),
        StateGates(gates[:of_gates], *decays, beta=spec.beta),
        GatedNorm(norm.repeat(spec.value_heads), spec.epsilon, spec.value_dim),
        torch.cat((mixed[channels:], gates[of_gates:])),
        StateHeads(spec.key_heads, spec.value_heads, spec.key_dim, spec.value_dim),
        spec.gates_z,
    )


def mamba2_weights(
    spec: Mamba2Spec,
    linears: tuple[Linear, ...],
    conv: tuple[torch.Tensor, torch.Tensor | None],
    numbers: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    norm: torch.Tensor | None,
) -> RecurrentWeights:
    """Make the weights of the device's part. linears: in the order of the spec's. conv:
    `[channels, kernel]` and `[channels]`. numbers: decay, bias and skip, as `StateGates` has them.
    norm: `[inner]`.
    """
    weight, bias = conv
    sizes = (spec.inner, spec.num_channels, spec.heads)
    z, channels, dt = _columns(range(sum(sizes)), weight.device).split(sizes)
    of_z, *of_channels, of_dt = spec.factors
    of_groups = spec.groups * spec.state
    parts = weight.split((spec.inner, of_groups, of_groups))
    weight = torch.cat([part * factor for part, factor in zip(parts, of_channels, strict=True)])
    return RecurrentWeights(
        spec,
        linears,
        Convolution(channels, weight, bias),
        StateGates(dt, *numbers, spec.limits, of_dt),
        GatedNorm(norm, spec.epsilon, spec.norm_size or spec.head_dim, spec.gate_first, of_z),
        z,
        StateHeads(spec.groups, spec.heads, spec.state, spec.head_dim),
    )


@dataclass(frozen=True, slots=True)
class ShortConvWeights:
    """Weights of a short convolution, as `spec` says, which is the device's part."""

    spec: ShortConvSpec
    linears: tuple[Linear, ...]
    conv: Convolution

    @classmethod
    def of(
        cls,
        spec: ShortConvSpec,
        linears: tuple[Linear, ...],
        weight: torch.Tensor,
        bias: torch.Tensor | None,
    ) -> "ShortConvWeights":
        """Make the weights of the device's part. linears: in the order of the spec's. weight:
        `[channels, kernel]`. bias: `[channels]`."""
        b, c, x = _columns(range(3 * spec.channels), weight.device).split(spec.channels)
        return cls(spec, linears, Convolution(x, weight, bias, torch.stack((b, c))))


StateWeights = RecurrentWeights | ShortConvWeights


def load_states(source: WeightSource, spec: StateSpec, layer: int) -> StateWeights:
    """Read the device's part. layer: 0-based."""
    linears = tuple(source.linear(linear, layer) for linear in spec.linears)
    match sharded_states(spec, source.shard.count):
        case DeltaNetSpec() as part:
            path = layer_path(layer, part.path)
            logs, shift = (_of_heads(source, f"{path}.{name}") for name in ("A_log", "dt_bias"))
            convs = [f"{path}.{name}.weight" for name, _ in part.convs or ((CONV, 0),)]
            stored = torch.cat([source.mapped(name).squeeze(1) for name in convs])
            weight = source.rows(stored, spec.channel_spans)
            norm = source.get(f"{path}.{part.norm}.weight")
            return delta_net_weights(part, linears, weight, (-logs.exp(), shift), norm)
        case Mamba2Spec() as part:
            path = layer_path(layer, part.path)
            conv = _convolution(source, f"{path}.{CONV}", spec.channel_spans, bias=part.bias)
            names = ("A_log", "dt_bias", "D")
            logs, shift, skip = (_of_heads(source, f"{path}.{name}") for name in names)
            numbers = (-logs.exp(), shift, skip)
            if part.norm_size is None:
                return mamba2_weights(part, linears, conv, numbers, None)
            norm = source.rows(source.mapped(f"{path}.norm.weight"), spec.channel_spans[:1])
            return mamba2_weights(part, linears, conv, numbers, norm)
        case ShortConvSpec() as part:
            path = layer_path(layer, part.path)
            weight, bias = _convolution(source, path, spec.channel_spans, bias=part.bias)
            return ShortConvWeights.of(part, linears, weight, bias)


def _of_heads(source: WeightSource, name: str) -> torch.Tensor:
    """The device's numbers of heads, float32."""
    return source.heads(source.mapped(name).float()).to(source.device, copy=True)


def _convolution(
    source: WeightSource, path: str, spans: tuple[Span, ...], *, bias: bool
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The device's `[channels, kernel]` and `[channels]` of a convolution by channel."""
    weight = source.rows(source.mapped(f"{path}.weight").squeeze(1), spans)
    return weight, source.rows(source.mapped(f"{path}.bias"), spans) if bias else None


def _columns(numbers: list[int] | range, device: torch.device) -> torch.Tensor:
    return torch.tensor(numbers, dtype=torch.int32, device=device)
