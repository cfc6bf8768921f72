"""Weights of what mixes tokens by a state."""

from dataclasses import dataclass

import torch

from loraplex.adapters.sharding import Span
from loraplex.server.kernels.states.operands import Convolution, GatedNorm
from loraplex.server.model.devices.sharding import sharded_states
from loraplex.server.model.linear.linear import Linear
from loraplex.server.model.spec.model_spec import layer_path
from loraplex.server.model.spec.state_spec import DeltaNetSpec, ShortConvSpec, StateSpec
from loraplex.server.model.weight_source import WeightSource


@dataclass(frozen=True, slots=True)
class DeltaNetWeights:
    """Weights of a Gated DeltaNet, as `spec` says, which is the device's part. decay, dt_bias:
    float32 `[value_heads]`: a state is multiplied by `exp(decay * softplus(a + dt_bias))`.
    z_columns, gate_columns: int32, where the product `mixed` has z, and `gates` has b and a."""

    spec: DeltaNetSpec
    linears: tuple[Linear, ...]
    conv: Convolution
    decay: torch.Tensor
    dt_bias: torch.Tensor
    norm: GatedNorm
    z_columns: torch.Tensor
    gate_columns: torch.Tensor

    @classmethod
    def of(
        cls,
        spec: DeltaNetSpec,
        linears: tuple[Linear, ...],
        conv: torch.Tensor,
        decays: tuple[torch.Tensor, torch.Tensor],
        norm: torch.Tensor,
    ) -> "DeltaNetWeights":
        """Make the weights of the device's part. linears: in the order of the spec's. conv:
        `[channels, kernel]`. decays: as `decay` and `dt_bias`. norm: `[value_dim]`."""
        mixed, gates = (
            _columns(each, conv.device) for each in (spec.mixed_columns(), spec.gate_columns())
        )
        channels, z = mixed.split((spec.num_channels, spec.value_size))
        normed = GatedNorm(norm.repeat(spec.value_heads), spec.epsilon, spec.value_dim)
        return cls(spec, linears, Convolution(channels, conv), *decays, normed, z, gates)


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


StateWeights = DeltaNetWeights | ShortConvWeights


def load_states(source: WeightSource, spec: StateSpec, layer: int) -> StateWeights:
    """Read the device's part. layer: 0-based."""
    linears = tuple(source.linear(linear, layer) for linear in spec.linears)
    match sharded_states(spec, source.shard.count):
        case DeltaNetSpec() as part:
            path = layer_path(layer, part.path)
            logs, shift = (
                source.heads(source.mapped(f"{path}.{name}").float()).to(source.device, copy=True)
                for name in ("A_log", "dt_bias")
            )
            weight, _ = _convolution(source, f"{path}.conv1d", spec.channel_spans, bias=False)
            norm = source.get(f"{path}.norm.weight")
            return DeltaNetWeights.of(part, linears, weight, (-logs.exp(), shift), norm)
        case ShortConvSpec() as part:
            path = layer_path(layer, part.path)
            weight, bias = _convolution(source, path, spec.channel_spans, bias=part.bias)
            return ShortConvWeights.of(part, linears, weight, bias)


def _convolution(
    source: WeightSource, path: str, spans: tuple[Span, ...], *, bias: bool
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The device's `[channels, kernel]` and `[channels]` of a convolution by channel."""
    weight = source.rows(source.mapped(f"{path}.weight").squeeze(1), spans)
    return weight, source.rows(source.mapped(f"{path}.bias"), spans) if bias else None


def _columns(numbers: list[int] | range, device: torch.device) -> torch.Tensor:
    return torch.tensor(numbers, dtype=torch.int32, device=device)
