"""A model's weights on the device: packed as the decoder multiplies them, read from safetensors."""

import logging
from dataclasses import dataclass
from math import prod
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from server.model.checkpoint.checkpoint import LM_HEAD, CheckpointError, Shard, read_shards, tables
from server.model.checkpoint.config import ModelConfig
from server.model.checkpoint.tensor_table import check_tensors, expected_tensors, kinds

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """One layer. Matrices are `[out_features, in_features]`.

    qkv: q, k and v stacked, `[(heads + 2 kv_heads) * head_dim, hidden]`; gate_up likewise.
    qk_norm: `[heads + kv_heads, head_dim]`, one row a head of q, then of k.
    """

    input_norm: torch.Tensor
    qkv: torch.Tensor
    qkv_bias: torch.Tensor | None
    qk_norm: torch.Tensor | None
    o: torch.Tensor
    o_bias: torch.Tensor | None
    post_norm: torch.Tensor
    gate_up: torch.Tensor
    gate_up_bias: torch.Tensor | None
    down: torch.Tensor
    down_bias: torch.Tensor | None


@dataclass(frozen=True, slots=True)
class ModelWeights:
    """embed and lm_head: `[vocab, hidden]`; the same tensor when they are tied."""

    embed: torch.Tensor
    layers: tuple[LayerWeights, ...]
    norm: torch.Tensor
    lm_head: torch.Tensor


def weights_bytes(config: ModelConfig, dtype: torch.dtype) -> int:
    """What they take on the device."""
    return sum(prod(shape) for shape in expected_tensors(config).values()) * dtype.itemsize


def load_weights(
    folder: Path, config: ModelConfig, dtype: torch.dtype, device: torch.device
) -> ModelWeights:
    """Read the checkpoint, cast to `dtype`. Raises CheckpointError with everything that is missing,
    unexpected or of another shape."""
    shards = read_shards(folder)
    left_out = check_tensors(folder, shards, config)
    if left_out:
        log.info("%d stored tensors change no token and are left out: %s", *kinds(left_out))
    embedding = tables({name for shard in shards for name in shard.tensors}, config)[0]
    with torch.inference_mode():
        source = _Source(shards, dtype, device)
        embed = source.get(embedding)
        layers = tuple(_load_layer(source, config, i) for i in range(config.num_layers))
        lm_head = embed if config.tie_word_embeddings else source.get(LM_HEAD)
        return ModelWeights(embed, layers, source.get("model.norm.weight"), lm_head)


class _Source:
    """Tensors by name out of memory-mapped shards."""

    def __init__(self, shards: tuple[Shard, ...], dtype: torch.dtype, device: torch.device) -> None:
        self.dtype = dtype
        self.device = device
        self._shard_of = {name: shard.path for shard in shards for name in shard.tensors}
        try:
            self._files = {
                shard.path: safe_open(str(shard.path), framework="pt", device="cpu")
                for shard in shards
            }
        except (SafetensorError, OSError) as error:
            raise CheckpointError(f"cannot read the weights: {error}") from None

    def _mapped(self, name: str) -> torch.Tensor:
        path = self._shard_of[name]
        try:
            tensor: torch.Tensor = self._files[path].get_tensor(name)
        except (SafetensorError, OSError) as error:
            raise CheckpointError(f"{path}: {name}: {error}") from None
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


def _load_layer(source: _Source, config: ModelConfig, index: int) -> LayerWeights:
    prefix = f"model.layers.{index}."
    attention, mlp = prefix + "self_attn.", prefix + "mlp."
    qkv = tuple(f"{attention}{p}_proj" for p in "qkv")
    gate_up = (f"{mlp}gate_proj", f"{mlp}up_proj")

    def bias(names: tuple[str, ...], present: bool) -> torch.Tensor | None:
        return source.stack(tuple(f"{name}.bias" for name in names)) if present else None

    return LayerWeights(
        input_norm=source.get(f"{prefix}input_layernorm.weight"),
        qkv=source.stack(tuple(f"{name}.weight" for name in qkv)),
        qkv_bias=bias(qkv, config.qkv_bias),
        qk_norm=_qk_norm(source, config, attention) if config.qk_norm else None,
        o=source.get(f"{attention}o_proj.weight"),
        o_bias=bias((f"{attention}o_proj",), config.o_bias),
        post_norm=source.get(f"{prefix}post_attention_layernorm.weight"),
        gate_up=source.stack(tuple(f"{name}.weight" for name in gate_up)),
        gate_up_bias=bias(gate_up, config.mlp_bias),
        down=source.get(f"{mlp}down_proj.weight"),
        down_bias=bias((f"{mlp}down_proj",), config.mlp_bias),
    )


def _qk_norm(source: _Source, config: ModelConfig, attention: str) -> torch.Tensor:
    q = source.get(f"{attention}q_norm.weight").expand(config.num_heads, -1)
    k = source.get(f"{attention}k_norm.weight").expand(config.num_kv_heads, -1)
    return torch.cat((q, k))
