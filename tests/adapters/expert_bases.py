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

from loraplex.adapters.base import (
    LAYER_SITES,
    BaseSpec,
    ExpertWeight,
    LayerModules,
    ModuleShape,
    layer_stem,
)

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
    gate, up, down = (f"experts.{name}" for name in names)
    attention = {
        "q_proj": ModuleShape("self_attn.q_proj", hidden, hidden),
        "k_proj": ModuleShape("self_attn.k_proj", hidden, hidden // 2),
        "v_proj": ModuleShape("self_attn.v_proj", hidden, hidden // 2),
        "o_proj": ModuleShape("self_attn.o_proj", hidden, hidden),
    }
    of_dense, of_sparse = dict(attention), dict(attention)
    for name, sizes in (("gate", (hidden, 40)), ("up", (hidden, 40)), ("down", (40, hidden))):
        of_dense[f"{name}_proj"] = ModuleShape(f"mlp.{name}_proj", *sizes)
    for name, sizes in ((gate, (hidden, inner)), (up, (hidden, inner)), (down, (inner, hidden))):
        path = f"{stem}.{name.removeprefix('experts.')}"
        of_sparse[name] = ModuleShape(path, *sizes, experts=experts)
    of_router = router.rpartition(".")[2]
    of_sparse[of_router] = ModuleShape(router, hidden, experts)

    def layer(index: int) -> LayerModules:
        path = layer_stem(index)
        if index in dense:
            return LayerModules(path, of_dense, LAYER_SITES)
        return LayerModules(
            path,
            of_sparse,
            {
                "qkv": LAYER_SITES["qkv"],
                "o": LAYER_SITES["o"],
                "router": (of_router,),
                "experts_gate_up": (gate, up),
                "experts_down": (down,),
            },
            expert_weights=(
                ExpertWeight("mlp.experts.gate_up_proj", (gate, up), as_gpt_oss, as_gpt_oss),
                ExpertWeight("mlp.experts.down_proj", (down,), transposed=as_gpt_oss),
            ),
        )

    return BaseSpec(
        digest="0" * 64,
        names=("base",),
        hidden_size=hidden,
        vocab_size=VOCAB,
        layers=tuple(map(layer, range(num_layers))),
        model_modules={
            "embed_tokens": ModuleShape("model.embed_tokens", VOCAB, hidden),
            "lm_head": ModuleShape("lm_head", hidden, VOCAB),
        },
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
