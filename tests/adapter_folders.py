"""Writes adapter folders in PEFT's format with numpy and json alone, for tests of every room."""

import json
import struct
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from loraplex.adapters.base import LAYER_SITES, BaseSpec, LayerModules, ModuleShape, layer_stem

Dtype = Literal["F32", "F16", "BF16"]
ALL_PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
_ALIGN = 8


def small_base(
    num_layers: int = 2,
    hidden: int = 32,
    inner: int = 48,
    kv: int = 16,
    vocab: int = 64,
    names: tuple[str, ...] = ("org/base",),
) -> BaseSpec:
    """A base model of Llama's shape, small enough for tests."""
    shapes = {
        "q_proj": ModuleShape("self_attn.q_proj", hidden, hidden),
        "k_proj": ModuleShape("self_attn.k_proj", hidden, kv),
        "v_proj": ModuleShape("self_attn.v_proj", hidden, kv),
        "o_proj": ModuleShape("self_attn.o_proj", hidden, hidden),
        "gate_proj": ModuleShape("mlp.gate_proj", hidden, inner),
        "up_proj": ModuleShape("mlp.up_proj", hidden, inner),
        "down_proj": ModuleShape("mlp.down_proj", inner, hidden),
    }
    model = {
        "embed_tokens": ModuleShape("model.embed_tokens", vocab, hidden),
        "lm_head": ModuleShape("lm_head", hidden, vocab),
    }
    layers = (LayerModules(layer_stem(n), shapes, LAYER_SITES) for n in range(num_layers))
    return BaseSpec("0" * 64, names, hidden, vocab, tuple(layers), model)


def write_adapter(
    folder: Path,
    base: BaseSpec,
    *,
    rank: int = 8,
    targets: Sequence[str] = ("q_proj", "v_proj"),
    seed: int = 0,
    dtype: Dtype = "F32",
    layers: Sequence[int] | None = None,
    config: Mapping[str, Any] | None = None,
) -> Path:
    """A random adapter for `base` in `folder`, created if needed; returns the folder.

    layers: those that get tensors; all by default. config: overrides of `adapter_config.json`.
    """
    folder.mkdir(parents=True, exist_ok=True)
    tensors = lora_tensors(base, rank=rank, targets=targets, seed=seed, layers=layers)
    write_config(folder, adapter_config(base, rank, targets) | dict(config or {}))
    (folder / "adapter_model.safetensors").write_bytes(safetensors_bytes(tensors, dtype))
    return folder


def adapter_config(base: BaseSpec, rank: int, targets: Sequence[str]) -> dict[str, Any]:
    """What PEFT writes for a plain LoRA adapter, in its main parts."""
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base.names[0] if base.names else None,
        "inference_mode": True,
        "r": rank,
        "lora_alpha": 2 * rank,
        "lora_dropout": 0.05,
        "target_modules": list(targets),
        "bias": "none",
        "fan_in_fan_out": False,
        "init_lora_weights": True,
        "modules_to_save": None,
        "use_rslora": False,
        "use_dora": False,
        "rank_pattern": {},
        "alpha_pattern": {},
        "layers_to_transform": None,
        "layers_pattern": None,
    }


def write_config(folder: Path, config: Mapping[str, Any]) -> None:
    (folder / "adapter_config.json").write_text(json.dumps(config, indent=2))


def lora_tensors(
    base: BaseSpec,
    *,
    rank: int = 8,
    targets: Sequence[str] = ("q_proj", "v_proj"),
    seed: int = 0,
    layers: Sequence[int] | None = None,
    ranks: Mapping[str, int] | None = None,
) -> dict[str, npt.NDArray[np.float32]]:
    """Random LoRA tensors by PEFT's names. ranks: by short module name, where not `rank`."""
    rng = np.random.default_rng(seed)
    tensors: dict[str, npt.NDArray[np.float32]] = {}

    def add(path: str, shape: ModuleShape, r: int, a: str, b: str) -> None:
        scale = 0.5 / np.sqrt(shape.in_features)
        tensors[f"base_model.model.{path}.{a}"] = _normal(rng, (r, shape.in_features), scale)
        tensors[f"base_model.model.{path}.{b}"] = _normal(rng, (shape.out_features, r), 0.5)

    for layer in range(base.num_layers) if layers is None else layers:
        for target in targets:
            if target in base.modules_of(layer):
                path, shape = base.module(layer, target).path, base.module(layer, target).shape
                add(path, shape, (ranks or {}).get(target, rank), "lora_A.weight", "lora_B.weight")
    for target in targets:
        if target in base.model_modules:
            shape = base.model_modules[target]
            kind = (
                ("lora_embedding_A", "lora_embedding_B")
                if target == "embed_tokens"
                else ("lora_A.weight", "lora_B.weight")
            )
            add(shape.path, shape, (ranks or {}).get(target, rank), *kind)
    return tensors


def safetensors_bytes(
    tensors: Mapping[str, npt.NDArray[np.float32]],
    dtype: Dtype = "F32",
    metadata: Mapping[str, str] | None = None,
) -> bytes:
    """A well-formed safetensors file."""
    header: dict[str, Any] = {"__metadata__": dict(metadata or {"format": "pt"})}
    parts: list[bytes] = []
    position = 0
    for name, array in tensors.items():
        payload = encode(array, dtype)
        header[name] = {
            "dtype": dtype,
            "shape": list(array.shape),
            "data_offsets": [position, position + len(payload)],
        }
        parts.append(payload)
        position += len(payload)
    return raw_safetensors(json.dumps(header).encode(), b"".join(parts))


def raw_safetensors(header: bytes, payload: bytes) -> bytes:
    """Frames any header, right or wrong."""
    header += b" " * (-len(header) % _ALIGN)
    return struct.pack("<Q", len(header)) + header + payload


def encode(array: npt.NDArray[np.float32], dtype: Dtype) -> bytes:
    """Little-endian bytes of `array`; BF16 rounds to nearest, ties to even."""
    if dtype == "F32":
        return array.astype("<f4").tobytes()
    if dtype == "F16":
        return array.astype("<f2").tobytes()
    bits = array.astype("<f4").view(np.uint32).astype(np.uint64)
    rounded = (bits + 0x7FFF + ((bits >> np.uint64(16)) & np.uint64(1))) >> np.uint64(16)
    return rounded.astype("<u2").tobytes()


def _normal(
    rng: np.random.Generator, shape: tuple[int, int], scale: float
) -> npt.NDArray[np.float32]:
    return (rng.standard_normal(shape) * scale).astype(np.float32)
