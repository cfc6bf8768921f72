"""Tiny models with experts, as transformers makes them and as adapters see them."""

from collections.abc import Callable
from typing import Any, NamedTuple

from transformers import (
    GptOssConfig,
    GptOssForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from loraplex.adapters.base import BaseSpec, ExpertWeight, ModuleShape, Role

HIDDEN, INNER, EXPERTS, VOCAB = 32, 24, 4, 64
_SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": HIDDEN,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


class ExpertModel(NamedTuple):
    """make: a model of transformers with random weights. base: what adapters for it are judged by.
    stem: path of an expert's modules in transformers 4, `{}` = its number; names: of gate, up,
    down."""

    make: Callable[[], Any]
    base: BaseSpec
    stem: str
    names: tuple[str, str, str]


def expert_base(
    stem: str = "mlp.experts.{}",
    names: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj"),
    *,
    num_layers: int = 2,
    dense: tuple[int, ...] = (),
    inner: int = INNER,
    router: str = "mlp.gate",
    as_gpt_oss: bool = False,
) -> BaseSpec:
    """dense: layers without experts. as_gpt_oss: gate and up take turns in tensors `[experts, in,
    out]`."""
    hidden, experts = HIDDEN, EXPERTS
    sparse = tuple(layer for layer in range(num_layers) if layer not in dense) if dense else None
    gate, up, down = (f"experts.{name}" for name in names)
    shapes = {
        "q_proj": ModuleShape("self_attn.q_proj", hidden, hidden),
        "k_proj": ModuleShape("self_attn.k_proj", hidden, hidden // 2),
        "v_proj": ModuleShape("self_attn.v_proj", hidden, hidden // 2),
        "o_proj": ModuleShape("self_attn.o_proj", hidden, hidden),
    }
    sites: dict[Role, tuple[str, ...]] = {
        "qkv": ("q_proj", "k_proj", "v_proj"),
        "o": ("o_proj",),
    }
    if dense:
        for name, sizes in (("gate", (hidden, 40)), ("up", (hidden, 40)), ("down", (40, hidden))):
            shapes[f"{name}_proj"] = ModuleShape(f"mlp.{name}_proj", *sizes, layers=dense)
        sites |= {"gate_up": ("gate_proj", "up_proj"), "down": ("down_proj",)}
    for name, sizes in ((gate, (hidden, inner)), (up, (hidden, inner)), (down, (inner, hidden))):
        path = f"{stem}.{name.removeprefix('experts.')}"
        shapes[name] = ModuleShape(path, *sizes, experts=experts, layers=sparse)
    sites |= {"experts_gate_up": (gate, up), "experts_down": (down,)}
    return BaseSpec(
        digest="0" * 64,
        names=("base",),
        num_layers=num_layers,
        hidden_size=hidden,
        vocab_size=VOCAB,
        layer_modules=shapes,
        model_modules={
            "embed_tokens": ModuleShape("model.embed_tokens", VOCAB, hidden),
            "lm_head": ModuleShape("lm_head", hidden, VOCAB),
        },
        sites={"embed_tokens": ("embed_tokens",), **sites, "lm_head": ("lm_head",)},
        expert_weights=(
            ExpertWeight("mlp.experts.gate_up_proj", (gate, up), as_gpt_oss, as_gpt_oss),
            ExpertWeight("mlp.experts.down_proj", (down,), transposed=as_gpt_oss),
        ),
        routers=(router,),
    )


def _mixtral() -> Any:
    config = MixtralConfig(
        **_SIZES, intermediate_size=INNER, num_hidden_layers=2, num_local_experts=EXPERTS
    )
    return MixtralForCausalLM(config)


def _qwen3_moe() -> Any:
    config = Qwen3MoeConfig(
        **_SIZES | {"head_dim": 8},
        intermediate_size=40,
        moe_intermediate_size=INNER,
        num_hidden_layers=3,
        num_experts=EXPERTS,
        num_experts_per_tok=2,
        mlp_only_layers=[1],
    )
    return Qwen3MoeForCausalLM(config)


def _gpt_oss() -> Any:
    config = GptOssConfig(
        **_SIZES,
        head_dim=8,
        intermediate_size=INNER,
        num_hidden_layers=2,
        num_local_experts=EXPERTS,
        num_experts_per_tok=2,
        layer_types=["sliding_attention", "full_attention"],
    )
    return GptOssForCausalLM(config)


_W = ("w1", "w3", "w2")
_PROJ = ("gate_proj", "up_proj", "down_proj")
_MIXTRAL = "block_sparse_moe.experts.{}"
_QWEN = "mlp.experts.{}"
MODELS = {
    "mixtral": ExpertModel(_mixtral, expert_base(_MIXTRAL, _W), _MIXTRAL, _W),
    "qwen3_moe": ExpertModel(_qwen3_moe, expert_base(num_layers=3, dense=(1,)), _QWEN, _PROJ),
    "gpt_oss": ExpertModel(
        _gpt_oss,
        expert_base(router="mlp.router", as_gpt_oss=True),
        _QWEN,
        _PROJ,
    ),
}
