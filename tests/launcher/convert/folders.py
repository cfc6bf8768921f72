"""Adapters in mlx-lm's format, and the model that mlx-lm's own formulas make of them."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

SCALE = 20.0
VOCAB, HIDDEN, LAYERS = 64, 32, 3
BASE_NAME = "mlx-community/Tiny-Llama-4bit"
Tensors = dict[str, torch.Tensor]
SHAPES = {
    "self_attn.q_proj": (HIDDEN, HIDDEN),
    "self_attn.k_proj": (HIDDEN, HIDDEN // 2),
    "self_attn.v_proj": (HIDDEN, HIDDEN // 2),
    "self_attn.o_proj": (HIDDEN, HIDDEN),
    "mlp.gate_proj": (HIDDEN, 48),
    "mlp.up_proj": (HIDDEN, 48),
    "mlp.down_proj": (48, HIDDEN),
}


def model(tied: bool = False) -> LlamaForCausalLM:
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=HIDDEN,
        intermediate_size=48,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=tied,
    )
    torch.manual_seed(0)
    made = LlamaForCausalLM(config)
    made.train(False)
    return made


def pair(path: str, inputs: int, outputs: int, rank: int, seed: int) -> Tensors:
    """`lora_a` [in, r] and `lora_b` [r, out], as mlx-lm's LoRALinear has them."""
    random = torch.Generator().manual_seed(seed)
    return {
        f"{path}.lora_a": torch.randn(inputs, rank, generator=random) / inputs**0.5,
        f"{path}.lora_b": torch.randn(rank, outputs, generator=random) / 10,
    }


def layer_pairs(
    *layers: int, rank: int = 4, keys: Mapping[str, tuple[int, int]] = SHAPES
) -> Tensors:
    tensors: Tensors = {}
    for layer in layers:
        for number, (key, (inputs, outputs)) in enumerate(keys.items()):
            path = f"model.layers.{layer}.{key}"
            tensors |= pair(path, inputs, outputs, rank, seed=100 * layer + number)
    return tensors


def mlx_config(**changes: Any) -> dict[str, Any]:
    """As `mlx_lm.lora` saves its arguments."""
    return {
        "model": BASE_NAME,
        "fine_tune_type": "lora",
        "num_layers": LAYERS,
        "lora_parameters": {"rank": 4, "scale": SCALE, "dropout": 0.0},
        "batch_size": 4,
        "lr_schedule": None,
        "learning_rate": 1e-05,
    } | changes


def write_mlx(folder: Path, tensors: Tensors, **changes: Any) -> Path:
    folder.mkdir(parents=True)
    (folder / "adapter_config.json").write_text(json.dumps(mlx_config(**changes)))
    contiguous = {name: tensor.contiguous() for name, tensor in tensors.items()}
    save_file(contiguous, folder / "adapters.safetensors", {"format": "mlx"})
    return folder


class MlxLinear(nn.Module):
    """y = x W^T + scale * (x @ lora_a) @ lora_b."""

    def __init__(self, linear: nn.Linear, a: torch.Tensor, b: torch.Tensor, scale: float) -> None:
        super().__init__()
        self.linear, self.a, self.b, self.scale = linear, a, b, scale

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.linear(x) + self.scale * ((x @ self.a) @ self.b)
        return y


class MlxEmbedding(nn.Module):
    """y = W[x] + scale * lora_a[x] @ lora_b."""

    def __init__(self, table: nn.Embedding, a: torch.Tensor, b: torch.Tensor, scale: float) -> None:
        super().__init__()
        self.table, self.a, self.b, self.scale = table, a, b, scale

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.table(x) + self.scale * (self.a[x] @ self.b)
        return y


def as_mlx_runs_it(tensors: Tensors, scale: float = SCALE, tied: bool = False) -> nn.Module:
    """The small model with mlx-lm's layers."""
    return with_mlx_layers(model(tied), tensors, scale)


def with_mlx_layers(made: Any, tensors: Tensors, scale: float) -> nn.Module:
    """`made` with mlx-lm's layers. A tied head runs through the embedding's adapter, too."""
    tied = made.config.tie_word_embeddings
    for path in {name.rpartition(".")[0] for name in tensors}:
        a, b = tensors[f"{path}.lora_a"], tensors[f"{path}.lora_b"]
        layer: Callable[..., nn.Module] = MlxLinear
        if path.endswith("embed_tokens"):
            layer = MlxEmbedding
            if tied:
                made.lm_head = MlxLinear(made.lm_head, b.T, a.T, scale)
        made.set_submodule(path, layer(made.get_submodule(path), a, b, scale))
    assert isinstance(made, nn.Module)
    return made


def logits(of: nn.Module) -> torch.Tensor:
    ids = torch.tensor([[1, 5, 9, 33, 2, 60]])
    with torch.no_grad():
        found: torch.Tensor = of(ids).logits
    return found
