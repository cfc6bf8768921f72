"""Tensors of a checkpoint, brought to the device as matrices of the layouts there are."""

import math
from collections.abc import Sequence
from dataclasses import replace

import torch
from safetensors import SafetensorError, safe_open

from server.config import AtLoad
from server.kernels.linear.matrix import PackedMatrix
from server.model.checkpoint.checkpoint import CheckpointError, Shard
from server.model.checkpoint.expert_tensors import ExpertTensors
from server.model.checkpoint.stored_forms import StoredForms
from server.model.checkpoint.unpack import Stored, unpack
from server.model.linear.dense import DenseLinear
from server.model.linear.experts import ExpertsLinear
from server.model.linear.linear import Linear
from server.model.linear.packed import PackedWeight, joined
from server.model.linear.quantise import quantise
from server.model.linear.quantised import QuantisedLinear, matrix_of
from server.model.spec import LinearSpec, layer_path


class WeightSource:
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

    def mapped(self, name: str) -> torch.Tensor:
        """As it is stored, in the file's memory."""
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

    def stack(self, names: tuple[str, ...]) -> torch.Tensor:
        """Several tensors one below the other, copied once."""
        parts = [self.mapped(name) for name in names]
        shape = (sum(part.shape[0] for part in parts), *parts[0].shape[1:])
        stacked = torch.empty(shape, dtype=self.dtype, device=self.device)
        row = 0
        for part in parts:
            stacked[row : row + part.shape[0]].copy_(part)
            row += part.shape[0]
        return stacked

    def linear(self, spec: LinearSpec, layer: int | None = None) -> Linear:
        """layer: 0-based, where the matrix is one of a layer's."""
        paths = [path_in(part.path, layer) for part in spec.parts]
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
            self.fill(path_in(part.path, layer), rows)
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
            weight.copy_(self.mapped(f"{path}.weight"))

    def _unpacked(self, path: str, shape: Sequence[int]) -> PackedWeight:
        """On the device. shape: `[out, in]`."""
        stored = Stored(lambda suffix: self._optional(f"{path}.{suffix}"), *shape)
        try:
            return unpack(self._forms[path], stored).to(self.device)
        except ValueError as error:
            raise CheckpointError(f"{path}: {error}") from None

    def _optional(self, name: str) -> torch.Tensor | None:
        return self.mapped(name) if name in self._stored else None

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
        paths = [path_in(part.path, layer) for part in spec.parts]
        if spec.bias:
            return self.stack(tuple(f"{path}.bias" for path in paths))
        parts = [self._optional(f"{path}.bias") if path in self._forms else None for path in paths]
        if not any(part is not None and part.any() for part in parts):
            return None
        bias = torch.zeros(spec.out_features, dtype=self.dtype, device=self.device)
        for part, rows in zip(parts, bias.split(spec.widths), strict=True):
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
            lambda path: self.mapped(layer_path(layer, path)),
            lambda path, weight: self.fill(layer_path(layer, path), weight),
        )


def path_in(path: str, layer: int | None) -> str:
    """Of a module of the model, or of one of its layers."""
    return path if layer is None else layer_path(layer, path)
