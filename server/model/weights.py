"""A model's weights on the device: packed as the decoder multiplies them, read from safetensors."""

import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors import SafetensorError, safe_open

from server.config import AtLoad
from server.kernels.linear.matrix import PackedMatrix
from server.model.checkpoint.checkpoint import CheckpointError, Shard, stored_tensors, tables
from server.model.checkpoint.expert_forms import as_stored
from server.model.checkpoint.expert_tensors import ExpertTensors
from server.model.checkpoint.stored_forms import StoredForms, stored_forms
from server.model.checkpoint.tensor_table import check_tensors, kinds
from server.model.checkpoint.text_part import model_shards
from server.model.checkpoint.unpack import Stored, unpack
from server.model.linear.dense import DenseLinear
from server.model.linear.experts import ExpertsLinear, MoeWeights
from server.model.linear.linear import Linear
from server.model.linear.packed import PackedWeight, joined
from server.model.linear.quantise import quantise
from server.model.linear.quantised import QuantisedLinear, matrix_of
from server.model.moe_spec import MoeSpec
from server.model.spec import (
    SINKS,
    AttentionSpec,
    LayerSpec,
    LinearSpec,
    MlpSpec,
    ModelSpec,
    NormSpec,
    layer_path,
)

log = logging.getLogger(__name__)


class Norm(NamedTuple):
    """An RMS norm. weight: `[features]`, as it is multiplied; float32 where the spec adds to it."""

    weight: torch.Tensor
    epsilon: float


@dataclass(frozen=True, slots=True)
class MlpWeights:
    """What `spec` computes with."""

    spec: MlpSpec
    gate_up: Linear
    down: Linear


class KvScales(NamedTuple):
    """Of one layer's keys and of its values in FP8: `number * scale`."""

    k: float = 1.0
    v: float = 1.0


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """One layer, as `server.model.spec.LayerSpec` names its parts. mlp: as its `mlp` says.

    qk_norm: `[heads + kv_heads, head_dim]`, one row a head of q, then of k. sinks: float32
    `[heads]`. kv_scales: those that the checkpoint has.
    """

    qkv: Linear
    o: Linear
    mlp: MlpWeights | MoeWeights
    pre_attention: Norm | None
    pre_mlp: Norm | None
    post_attention: Norm | None
    post_mlp: Norm | None
    qk_norm: torch.Tensor | None
    sinks: torch.Tensor | None = None
    kv_scales: KvScales = KvScales()

    @property
    def linears(self) -> tuple[Linear, ...]:
        """The matrices that every token is multiplied with."""
        mlp = self.mlp
        if isinstance(mlp, MoeWeights):
            return self.qkv, self.o, mlp.router
        return self.qkv, self.o, mlp.gate_up, mlp.down


@dataclass(frozen=True, slots=True)
class ModelWeights:
    """embed: `[vocab, hidden]`; the head's matrix is the same tensor when they are tied."""

    embed: torch.Tensor
    layers: tuple[LayerWeights, ...]
    norm: Norm
    lm_head: Linear


def load_weights(
    folder: Path,
    model: ModelSpec,
    dtype: torch.dtype,
    device: torch.device,
    *,
    packed: bool | None = None,
    at_load: AtLoad | None = None,
) -> ModelWeights:
    """Read the checkpoint, cast to `dtype`. packed: quantised matrices stay so where kernels read
    them, and else are dequantised; None = on a GPU. at_load: how other matrices of layers are
    quantised. Raises CheckpointError with everything that is
    missing, unexpected or of another shape."""
    shards = model_shards(folder, model)
    stored = stored_tensors(shards)
    model = as_stored(model, stored)
    left_out = check_tensors(folder, shards, model)
    if left_out:
        log.info("%d stored tensors change no token and are left out: %s", *kinds(left_out))
    embedding = tables(stored, model)[0]
    with torch.inference_mode():
        forms = stored_forms(model, stored)
        stays = device.type == "cuda" if packed is None else packed
        source = _Source(shards, forms, dtype, device, packed=stays, at_load=at_load)
        embed = source.get(embedding)
        layers = tuple(_load_layer(source, model, i) for i in range(model.num_layers))
        head = DenseLinear(embed) if model.head.tied else source.linear(model.head.linear)
        return ModelWeights(embed, layers, source.norm(model.norm), head)


class _Source:
    """Tensors by name out of memory-mapped shards. forms: of quantised matrices. packed: these stay
    so where they can."""

    def __init__(
        self,
        shards: tuple[Shard, ...],
        forms: StoredForms,
        dtype: torch.dtype,
        device: torch.device,
        *,
        packed: bool,
        at_load: AtLoad | None,
    ) -> None:
        self._packed, self._at_load = packed, at_load
        self.dtype = dtype
        self.device = device
        self._forms = forms
        self._stored = {
            name: (shard.path, tensor.name)
            for shard in shards
            for name, tensor in shard.tensors.items()
        }
        try:
            self._files = {
                shard.path: safe_open(str(shard.path), framework="pt", device="cpu")
                for shard in shards
            }
        except (SafetensorError, OSError) as error:
            raise CheckpointError(f"cannot read the weights: {error}") from None

    def _mapped(self, name: str) -> torch.Tensor:
        path, stored = self._stored[name]
        try:
            tensor: torch.Tensor = self._files[path].get_tensor(stored)
        except (SafetensorError, OSError) as error:
            raise CheckpointError(f"{path}: {stored}: {error}") from None
        return tensor

    def get(self, name: str) -> torch.Tensor:
        """An own copy: the file may be replaced while we serve."""
        mapped = self._mapped(name)
        return torch.empty(mapped.shape, dtype=self.dtype, device=self.device).copy_(mapped)

    def stack(self, names: tuple[str, ...]) -> torch.Tensor:
        """Several tensors one below the other, copied once."""
        parts = [self._mapped(name) for name in names]
        shape = (sum(part.shape[0] for part in parts), *parts[0].shape[1:])
        stacked = torch.empty(shape, dtype=self.dtype, device=self.device)
        row = 0
        for part in parts:
            stacked[row : row + part.shape[0]].copy_(part)
            row += part.shape[0]
        return stacked

    def linear(self, spec: LinearSpec, layer: int | None = None) -> Linear:
        """layer: 0-based, where the matrix is one of a layer's."""
        paths = [_path(part.path, layer) for part in spec.parts]
        if self._packed and all(path in self._forms for path in paths):
            parts = [
                self._unpacked(path, (part.out_features, spec.in_features))
                for path, part in zip(paths, spec.parts, strict=True)
            ]
            whole = joined(parts)
            matrix = None if whole is None else matrix_of(whole)
            if matrix is not None and matrix.shape == (spec.out_features, spec.in_features):
                return QuantisedLinear(matrix, self._bias(spec, layer), self.dtype)
        shape = (spec.out_features, spec.in_features)
        weight = torch.empty(shape, dtype=self.dtype, device=self.device)
        for part, rows in zip(spec.parts, weight.split(spec.widths), strict=True):
            self.fill(_path(part.path, layer), rows)
        bias = self._bias(spec, layer)
        if layer is None or self._at_load is None:
            return DenseLinear(weight, bias)
        return self._quantised(weight, bias, self._at_load)

    def _quantised(self, weight: torch.Tensor, bias: torch.Tensor | None, scheme: AtLoad) -> Linear:
        packed = quantise(weight, scheme)
        matrix = matrix_of(packed) if self._packed and packed is not None else None
        if matrix is not None:
            return QuantisedLinear(matrix, bias, self.dtype)
        if packed is not None:
            packed.dequantised(weight)
        return DenseLinear(weight, bias)

    def fill(self, path: str, weight: torch.Tensor) -> None:
        """weight: `[out, in]`, which the matrix of the module at `path` is written to."""
        if path in self._forms:
            packed = self._unpacked(path, weight.shape)
            packed.dequantised(weight.view(packed.shape))
        else:
            weight.copy_(self._mapped(f"{path}.weight"))

    def _unpacked(self, path: str, shape: Sequence[int]) -> PackedWeight:
        """On the device. shape: `[out, in]`."""
        stored = Stored(lambda suffix: self._optional(f"{path}.{suffix}"), *shape)
        try:
            return unpack(self._forms[path], stored).to(self.device)
        except ValueError as error:
            raise CheckpointError(f"{path}: {error}") from None

    def _optional(self, name: str) -> torch.Tensor | None:
        return self._mapped(name) if name in self._stored else None

    def kv_scale(self, path: str, of: str) -> float:
        """Of keys ("k") or values ("v"), under one of the names that writers give it; 1 where there
        is none. path: of the attention. Raises CheckpointError where it is no positive number."""
        for name in (f"{of}_scale", f"{of}_proj.{of}_scale", f"{of}_proj.output_scale"):
            stored = self._optional(f"{path}.{name}")
            if stored is None:
                continue
            scale = float(stored.float().max()) if stored.numel() else 0.0
            if not 0.0 < scale < math.inf:
                raise CheckpointError(f"{path}.{name} must be a positive number, got {scale}")
            return scale
        return 1.0

    def _bias(self, spec: LinearSpec, layer: int | None) -> torch.Tensor | None:
        """Writers of quantised weights store biases of zeros, too, where the model has none."""
        paths = [_path(part.path, layer) for part in spec.parts]
        if spec.bias:
            return self.stack(tuple(f"{path}.bias" for path in paths))
        parts = [self._optional(f"{path}.bias") for path in paths if path in self._forms]
        if not any(part is not None and part.any() for part in parts):
            return None
        bias = torch.zeros(spec.out_features, dtype=self.dtype, device=self.device)
        for path, rows in zip(paths, bias.split(spec.widths), strict=True):
            part = self._optional(f"{path}.bias") if path in self._forms else None
            if part is not None:
                rows.copy_(part)
        return bias

    def experts(self, spec: LinearSpec, layer: int) -> ExpertsLinear:
        """Of all experts of a layer."""
        tensors = self._expert_tensors(spec, layer)
        matrix = self._packed_experts(spec, layer, tensors) if self._packed else None
        weight: torch.Tensor | PackedMatrix
        if matrix is not None:
            weight = replace(matrix, matrices=spec.experts)
        else:
            shape = (spec.experts, spec.out_features, spec.in_features)
            weight = tensors.fill(torch.empty(shape, dtype=self.dtype, device=self.device))
        if not spec.bias:
            return ExpertsLinear(weight)
        bias = torch.empty(spec.experts, spec.out_features, dtype=self.dtype, device=self.device)
        return ExpertsLinear(weight, tensors.fill_bias(bias))

    def _packed_experts(
        self, spec: LinearSpec, layer: int, tensors: ExpertTensors
    ) -> PackedMatrix | None:
        """Of matrices `[experts * out, in]`; None where they are not quantised, or not all in one
        layout that the kernels read."""
        matrices = [m._replace(path=layer_path(layer, m.path)) for m in spec.matrices()]
        whole: PackedWeight | None = None
        if spec.stored is not None and spec.stored.form == "mxfp4":
            whole = tensors.packed().to(self.device)
        elif matrices and all(matrix.path in self._forms for matrix in matrices):
            whole = joined([self._unpacked(path, shape) for path, *shape in matrices])
        matrix = None if whole is None else matrix_of(whole)
        if matrix is None or matrix.shape[1] != spec.in_features:
            return None
        return matrix if spec.out_features % matrix.rows == 0 else None

    def _expert_tensors(self, spec: LinearSpec, layer: int) -> ExpertTensors:
        return ExpertTensors(
            spec,
            lambda path: self._mapped(layer_path(layer, path)),
            lambda path, weight: self.fill(layer_path(layer, path), weight),
        )

    def norm(self, spec: NormSpec, layer: int | None = None) -> Norm:
        name = f"{_path(spec.path, layer)}.weight"
        weight = self.get(name)
        if spec.offset:  # whose sum the model's dtype would round
            weight = self._mapped(name).float().to(self.device) + spec.offset
        return Norm(weight, spec.epsilon)


def _path(path: str, layer: int | None) -> str:
    return path if layer is None else layer_path(layer, path)


def _load_layer(source: _Source, model: ModelSpec, index: int) -> LayerWeights:
    spec = model.layers[index]
    norms = spec.norms

    def optional(norm: NormSpec | None) -> Norm | None:
        return None if norm is None else source.norm(norm, index)

    return LayerWeights(
        qkv=source.linear(spec.qkv, index),
        o=source.linear(spec.o, index),
        mlp=_load_mlp(source, spec, index),
        pre_attention=optional(norms.pre_attention),
        pre_mlp=optional(norms.pre_mlp),
        post_attention=optional(norms.post_attention),
        post_mlp=optional(norms.post_mlp),
        qk_norm=_qk_norm(source, spec.attention, index),
        sinks=source.get(layer_path(index, SINKS)).float() if spec.attention.sinks else None,
        kv_scales=KvScales(*(source.kv_scale(layer_path(index, "self_attn"), of) for of in "kv")),
    )


def _load_mlp(source: _Source, spec: LayerSpec, index: int) -> MlpWeights | MoeWeights:
    if not isinstance(spec.mlp, MoeSpec):
        gate_up, down = source.linear(spec.gate_up, index), source.linear(spec.down, index)
        return MlpWeights(spec.mlp, gate_up, down)
    router = layer_path(index, spec.mlp.router)
    bias = source.get(f"{router}.bias") if spec.mlp.router_bias else None
    return MoeWeights(
        spec.mlp,
        DenseLinear(source.get(f"{router}.weight"), bias),
        source.experts(spec.gate_up, index),
        source.experts(spec.down, index),
    )


def _qk_norm(source: _Source, spec: AttentionSpec, index: int) -> torch.Tensor | None:
    if spec.q_norm is None or spec.k_norm is None:
        return None
    q, k = (
        source.norm(norm, index).weight.view(-1, spec.head_dim).expand(heads, -1)
        for norm, heads in ((spec.q_norm, spec.num_heads), (spec.k_norm, spec.num_kv_heads))
    )
    return torch.cat((q, k))
