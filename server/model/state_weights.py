"""Weights of what mixes tokens by a state."""

from dataclasses import dataclass

import torch

from loraplex.adapters.sharding import Span
from loraplex.server.kernels.states.operands import Convolution, GatedNorm, StateGates, StateHeads
from loraplex.server.model.devices.sharding import sharded_states
from loraplex.server.model.linear.linear import Linear
from loraplex.server.model.spec.model_spec import layer_path
from loraplex.server.model.spec.state_spec import (
    CONV,
    DeltaNetSpec,
    Mamba2Spec,
    ShortConvSpec,
    StateSpec,
)
from loraplex.server.model.weight_source import WeightSource


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
