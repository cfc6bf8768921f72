"""Every family of models that is served, in the variants that matter: the rows of parity's table.

A row is a tiny random model of transformers' own class. `test_parity.py` compares it with PEFT.
"""

from collections.abc import Iterable
from functools import partial
from typing import Any

import pytest
from transformers import (
    Ernie4_5Config,
    Ernie4_5ForCausalLM,
    Exaone4Config,
    Exaone4ForCausalLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    Gemma3ForCausalLM,
    Gemma3ForConditionalGeneration,
    Gemma3TextConfig,
    GemmaConfig,
    GemmaForCausalLM,
    Glm4Config,
    Glm4ForCausalLM,
    GlmConfig,
    GlmForCausalLM,
    GptOssConfig,
    GptOssForCausalLM,
    GraniteConfig,
    GraniteForCausalLM,
    GraniteMoeHybridConfig,
    GraniteMoeHybridForCausalLM,
    HeliumConfig,
    HeliumForCausalLM,
    Idefics3ForConditionalGeneration,
    LlamaConfig,
    LlamaForCausalLM,
    Ministral3Config,
    Ministral3ForCausalLM,
    Mistral3ForConditionalGeneration,
    MistralConfig,
    MistralForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    Olmo2Config,
    Olmo2ForCausalLM,
    Olmo3Config,
    Olmo3ForCausalLM,
    Phi3Config,
    Phi3ForCausalLM,
    PhiConfig,
    PhiForCausalLM,
    Qwen2_5_VLForConditionalGeneration,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
    Qwen3VLForConditionalGeneration,
    SeedOssConfig,
    SeedOssForCausalLM,
    SmolLM3Config,
    SmolLM3ForCausalLM,
    SmolVLMForConditionalGeneration,
)

from tests.server.model.families import text_parts
from tests.server.model.families.delta import DELTA
from tests.server.model.families.gemma4 import GEMMA4
from tests.server.model.families.kin import KIN
from tests.server.model.families.latents import LATENTS
from tests.server.model.families.routed import ROUTED
from tests.server.model.families.states import WITH_STATES
from tests.server.model.families.text_parts import OF_IMAGES
from tests.server.model.families.variant import EXPERTS, YARN_ROPE, of, on_experts
from tests.server.model.families.variant import LLAMA3_ROPE as LLAMA3_ROPE
from tests.server.model.families.variant import SEVEN as SEVEN
from tests.server.model.families.variant import Variant as Variant

_LLAMA = Variant(LlamaConfig, LlamaForCausalLM)
_MISTRAL = Variant(MistralConfig, MistralForCausalLM)
_FUSED_GLM = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_up_proj", "down_proj")
_GLM_SETTINGS = {"head_dim": 16, "pad_token_id": 0}
_GLM = Variant(GlmConfig, GlmForCausalLM, _GLM_SETTINGS, _FUSED_GLM)
_GLM4 = Variant(Glm4Config, Glm4ForCausalLM, _GLM_SETTINGS, _FUSED_GLM)
_MINISTRAL3 = Variant(Ministral3Config, Ministral3ForCausalLM, {"head_dim": 16})
_OLMO2 = Variant(Olmo2Config, Olmo2ForCausalLM)
_OLMO3 = Variant(Olmo3Config, Olmo3ForCausalLM)
_PHI3 = Variant(
    Phi3Config,
    Phi3ForCausalLM,
    {"pad_token_id": 0},
    ("qkv_proj", "o_proj", "gate_up_proj", "down_proj"),
)
_PHI = Variant(
    PhiConfig,
    PhiForCausalLM,
    {"partial_rotary_factor": 0.5},
    ("q_proj", "k_proj", "v_proj", "dense", "fc1", "fc2"),
)
_SMOLLM3 = Variant(SmolLM3Config, SmolLM3ForCausalLM, {"pad_token_id": 0})
_ERNIE = Variant(Ernie4_5Config, Ernie4_5ForCausalLM, {"head_dim": 16})
_EXAONE = Variant(Exaone4Config, Exaone4ForCausalLM)
_HELIUM = Variant(HeliumConfig, HeliumForCausalLM, {"head_dim": 16})
_SEED_OSS = Variant(SeedOssConfig, SeedOssForCausalLM, {"head_dim": 24})
_QWEN2 = Variant(Qwen2Config, Qwen2ForCausalLM)
_QWEN3 = Variant(Qwen3Config, Qwen3ForCausalLM)
_GEMMA = Variant(GemmaConfig, GemmaForCausalLM)
_GEMMA3 = Variant(Gemma3TextConfig, Gemma3ForCausalLM)
_GRANITE = Variant(GraniteConfig, GraniteForCausalLM)
_GEMMA2 = Variant(Gemma2Config, Gemma2ForCausalLM)


_GRANITE_HYBRID = Variant(
    GraniteMoeHybridConfig,
    GraniteMoeHybridForCausalLM,
    {
        **EXPERTS,
        "layer_types": ["attention"] * 3,
        "num_local_experts": 6,
        "intermediate_size": 40,
        "shared_intermediate_size": 48,
        "position_embedding_type": "rope",
        "embedding_multiplier": 12.0,
        "attention_multiplier": 0.2,
        "residual_multiplier": 0.22,
        "logits_scaling": 0.5,
        "mamba_n_heads": 4,
    },
    ("q_proj", "k_proj", "v_proj", "o_proj", "input_linear", "output_linear"),
    others=partial(on_experts, "block_sparse_moe", "router"),
)
_MIXTRAL = Variant(
    MixtralConfig,
    MixtralForCausalLM,
    {**EXPERTS, "num_local_experts": 5},
    SEVEN[:4],
    others=on_experts,
)
# Windows in the first and the last layer; the rotation reaches beyond its first context.
_GPT_OSS = Variant(
    GptOssConfig,
    GptOssForCausalLM,
    {
        **EXPERTS,
        "num_local_experts": 5,
        "head_dim": 24,
        "sliding_window": 7,
        "rope_parameters": {**YARN_ROPE, "truncate": False},
        "attn_implementation": "eager",
    },
    targets=SEVEN[:4],
)
_QWEN3_MOE = Variant(
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
    {**EXPERTS, "num_experts": 7, "moe_intermediate_size": 40, "head_dim": 24},
)


_MINISTRAL3_ROPE: dict[str, Any] = {
    **YARN_ROPE,
    "original_max_position_embeddings": 8,
    "factor": 32.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "llama_4_scaling_beta": 0.1,
}

# Other attention than "eager" leaves soft caps out.
_CAPPED: dict[str, Any] = {
    "head_dim": 24,
    "query_pre_attn_scalar": 40,
    "sliding_window": 7,
    "attn_logit_softcapping": 2.0,
    "final_logit_softcapping": 3.0,
    "attn_implementation": "eager",
}

# Layers of both kinds among three, and rotations of both kinds that are no other's.
_GEMMA3_SETTINGS: dict[str, Any] = {
    "head_dim": 24,
    "query_pre_attn_scalar": 40,
    "sliding_window": 7,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    "rope_parameters": {
        "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
        "full_attention": {"rope_type": "linear", "rope_theta": 30000.0, "factor": 8.0},
    },
}

# `test_long_rope.py` has sequences beyond the original context.
_LONG_ROPE: dict[str, Any] = {
    "original_max_position_embeddings": 64,
    "rope_parameters": {
        "rope_type": "longrope",
        "rope_theta": 10000.0,
        "short_factor": [1.0, 1.1, 1.3, 1.4, 1.6, 2.0],
        "long_factor": [1.0, 1.5, 2.5, 4.0, 7.0, 9.0],
        "partial_rotary_factor": 0.75,
    },
}

VARIANTS: dict[str, Variant] = {
    **DELTA,
    **GEMMA4,
    **WITH_STATES,
    **KIN,
    **LATENTS,
    **ROUTED,
    "ernie": of(_ERNIE),
    "ernie-biases": of(_ERNIE, use_bias=True, tie_word_embeddings=False, is_adapted=False),
    "exaone": of(
        _EXAONE,
        sliding_window=7,
        layer_types=["sliding_attention", "full_attention", "sliding_attention"],
    ),
    "exaone-full": of(
        _EXAONE, sliding_window=None, layer_types=["full_attention"] * 3, is_adapted=False
    ),
    "helium": of(_HELIUM, attention_bias=True),
    "seed-oss": of(_SEED_OSS, attention_out_bias=True, mlp_bias=True),
    "seed-oss-plain": of(_SEED_OSS, attention_bias=False, is_adapted=False),
    "gemma": of(_GEMMA, head_dim=24, num_key_value_heads=1),
    "gemma-biases": of(
        _GEMMA,
        head_dim=16,
        attention_bias=True,
        tie_word_embeddings=False,
        hidden_act="gelu",
        is_adapted=False,
    ),
    "gemma3": of(_GEMMA3, **_GEMMA3_SETTINGS),
    "gemma3-capped": of(
        _GEMMA3,
        **_GEMMA3_SETTINGS | {"final_logit_softcapping": 3.0, "attention_bias": True},
        is_adapted=False,
    ),
    "gemma2": of(_GEMMA2, **_CAPPED),
    "gemma2-uncapped": of(
        _GEMMA2,
        head_dim=16,
        query_pre_attn_scalar=16,
        layer_types=["full_attention"] * 3,
        attn_logit_softcapping=None,
        final_logit_softcapping=None,
        attention_bias=True,
        is_adapted=False,
    ),
    "granite": of(
        _GRANITE,
        embedding_multiplier=12.0,
        attention_multiplier=0.2,
        residual_multiplier=0.22,
        logits_scaling=0.5,
        attention_bias=True,
    ),
    "granite-hybrid": _GRANITE_HYBRID,
    "granite-hybrid-dense": of(
        _GRANITE_HYBRID,
        num_local_experts=0,
        position_embedding_type=None,
        is_adapted=False,
    ),
    "llama2": of(_LLAMA, num_key_value_heads=4, is_adapted=False),
    "llama3": of(_LLAMA, rope_parameters=LLAMA3_ROPE),
    "llama-biases-tied": of(_LLAMA, attention_bias=True, mlp_bias=True, tie_word_embeddings=True),
    "llama-linear": of(
        _LLAMA,
        rope_parameters={"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.0},
        is_adapted=False,
    ),
    "llama-dynamic": of(
        _LLAMA,
        rope_parameters={"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0},
        is_adapted=False,
    ),
    "mistral": of(_MISTRAL, sliding_window=None, is_adapted=False),
    "mistral-window": of(_MISTRAL, sliding_window=7),
    "mistral-head-dim": of(_MISTRAL, head_dim=32, sliding_window=None, is_adapted=False),
    "gpt-oss": _GPT_OSS,
    # Wide enough that activations are clamped.
    "gpt-oss-clamped": of(_GPT_OSS, attention_bias=False, initializer_range=0.6, is_adapted=False),
    "mixtral": of(_MIXTRAL, sliding_window=None),
    "mixtral-window": of(_MIXTRAL, sliding_window=7, is_adapted=False),
    "qwen3-moe": _QWEN3_MOE._replace(targets=SEVEN[:4], others=on_experts),
    # Experts in the first and the last layer alone. PEFT would target them under the names of the
    # dense layer's modules.
    "qwen3-moe-dense-layer": of(
        _QWEN3_MOE, mlp_only_layers=[1], norm_topk_prob=True, attention_bias=True, is_adapted=False
    ),
    "qwen3-moe-step": of(
        _QWEN3_MOE,
        decoder_sparse_step=2,
        use_sliding_window=True,
        sliding_window=9,
        is_adapted=False,
    ),
    "glm": of(_GLM, attention_bias=True, tie_word_embeddings=True),
    "glm4": _GLM4,
    "glm4-plain-yarn": of(
        _GLM4,
        attention_bias=False,
        rope_parameters={**YARN_ROPE, "partial_rotary_factor": 0.25},
        is_adapted=False,
    ),
    "ministral3": of(_MINISTRAL3, rope_parameters=_MINISTRAL3_ROPE),
    "olmo2": of(_OLMO2, num_key_value_heads=2),
    "olmo2-biases": of(_OLMO2, num_key_value_heads=4, attention_bias=True, is_adapted=False),
    "olmo3": of(
        _OLMO3,
        layer_types=["sliding_attention", "sliding_attention", "full_attention"],
        sliding_window=7,
        rope_parameters={
            "full_attention": YARN_ROPE,
            "sliding_attention": {"rope_type": "default", "rope_theta": 3000.0},
        },
    ),
    "phi": _PHI,
    "phi3": of(_PHI3, sliding_window=9, is_adapted=False),
    "phi3-long": of(_PHI3, **_LONG_ROPE, tie_word_embeddings=True),
    "smollm3": of(_SMOLLM3, no_rope_layer_interval=3),
    "smollm3-windows": of(
        _SMOLLM3,
        no_rope_layers=[0, 1, 1, 1],
        use_sliding_window=True,
        sliding_window=7,
        attention_bias=True,
        mlp_bias=True,
        tie_word_embeddings=False,
        is_adapted=False,
    ),
    "qwen2": _QWEN2,
    "qwen2-tied-yarn": of(
        _QWEN2, tie_word_embeddings=True, rope_parameters=YARN_ROPE, is_adapted=False
    ),
    "qwen2-window": of(
        _QWEN2,
        use_sliding_window=True,
        sliding_window=9,
        max_window_layers=1,
        is_adapted=False,
    ),
    "qwen3": of(_QWEN3, head_dim=24, tie_word_embeddings=True),
    "qwen3-biases": of(_QWEN3, head_dim=16, attention_bias=True, is_adapted=False),
    "gemma3-images": Variant(
        text_parts.gemma3, Gemma3ForConditionalGeneration, _GEMMA3_SETTINGS, excluded=OF_IMAGES
    ),
    "qwen2.5-vl": Variant(
        text_parts.qwen25_vl,
        Qwen2_5_VLForConditionalGeneration,
        {"rope_parameters": {"rope_type": "default", "mrope_section": [2, 3, 3]}},
        excluded=OF_IMAGES,
    ),
    "qwen3-vl": Variant(
        text_parts.qwen3_vl,
        Qwen3VLForConditionalGeneration,
        {
            "head_dim": 24,
            "tie_word_embeddings": True,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 1e4,
                "mrope_section": [4, 4, 4],
                "mrope_interleaved": True,
            },
        },
        excluded=OF_IMAGES,
    ),
    "smolvlm": Variant(text_parts.smolvlm, SmolVLMForConditionalGeneration, excluded=OF_IMAGES),
    "idefics3": Variant(
        text_parts.idefics3,
        Idefics3ForConditionalGeneration,
        excluded=OF_IMAGES,
        is_adapted=False,
    ),
    "mistral3": Variant(
        text_parts.mistral3,
        Mistral3ForConditionalGeneration,
        {"sliding_window": 7},
        excluded=OF_IMAGES,
    ),
    "mistral3-ministral3": Variant(
        text_parts.mistral3,
        Mistral3ForConditionalGeneration,
        {"model_type": "ministral3", "head_dim": 16, "rope_parameters": _MINISTRAL3_ROPE},
        excluded=OF_IMAGES,
        is_adapted=False,
    ),
}


def rows(names: Iterable[str]) -> list[Any]:
    """Names of rows as parameters of a test, those that are brief for the long run alone."""
    return [
        pytest.param(name, marks=pytest.mark.exhaustive) if VARIANTS[name].is_brief else name
        for name in names
    ]
