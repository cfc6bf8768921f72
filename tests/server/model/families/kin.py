"""Rows of parity's table for families that are made of other families' parts."""

from collections.abc import Mapping
from typing import Any

from peft import LoraConfig
from transformers import (
    ApertusConfig,
    ApertusForCausalLM,
    ArceeConfig,
    ArceeForCausalLM,
    BloomConfig,
    BloomForCausalLM,
    CodeGenConfig,
    CodeGenForCausalLM,
    Cohere2Config,
    Cohere2ForCausalLM,
    CohereConfig,
    CohereForCausalLM,
    CwmConfig,
    CwmForCausalLM,
    ExaoneConfig,
    FalconConfig,
    FalconForCausalLM,
    Glm4vForConditionalGeneration,
    Glm46VForConditionalGeneration,
    GPT2Config,
    GPT2LMHeadModel,
    GPTBigCodeConfig,
    GPTBigCodeForCausalLM,
    GPTJConfig,
    GPTJForCausalLM,
    GPTNeoConfig,
    GPTNeoForCausalLM,
    GPTNeoXConfig,
    GPTNeoXForCausalLM,
    HunYuanDenseV1Config,
    HunYuanDenseV1ForCausalLM,
    InternLM3Config,
    InternVLForConditionalGeneration,
    LlamaConfig,
    LlamaForCausalLM,
    LlavaForConditionalGeneration,
    LlavaNextForConditionalGeneration,
    LlavaNextVideoForConditionalGeneration,
    LlavaOnevisionForConditionalGeneration,
    MinistralConfig,
    MinistralForCausalLM,
    MptConfig,
    MptForCausalLM,
    NemotronConfig,
    NemotronForCausalLM,
    OlmoConfig,
    OlmoForCausalLM,
    OPTConfig,
    OPTForCausalLM,
    PersimmonConfig,
    PersimmonForCausalLM,
    Phi4MultimodalForCausalLM,
    PhiConfig,
    PhiForCausalLM,
    Qwen2VLForConditionalGeneration,
    Qwen3VLMoeForConditionalGeneration,
    StableLmConfig,
    StableLmForCausalLM,
    Starcoder2Config,
    Starcoder2ForCausalLM,
    VaultGemmaConfig,
    VaultGemmaForCausalLM,
    VipLlavaForConditionalGeneration,
)

from tests.server.model.families import text_parts
from tests.server.model.families.text_parts import OF_IMAGES
from tests.server.model.families.variant import (
    EXPERTS,
    LLAMA3_ROPE,
    SEVEN,
    YARN_ROPE,
    Variant,
    of,
    on_experts,
)

_UNGATED = ("q_proj", "k_proj", "v_proj", "o_proj", "up_proj", "down_proj")
_PHI3 = ("qkv_proj", "o_proj", "gate_up_proj", "down_proj")
_GLM = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_up_proj", "down_proj")
_ODD: dict[str, Any] = {"hidden_size": 60, "num_attention_heads": 6, "num_key_value_heads": 2}
_APERTUS = Variant(ApertusConfig, ApertusForCausalLM, _ODD, _UNGATED)
_ARCEE = Variant(ArceeConfig, ArceeForCausalLM, {**_ODD, "head_dim": 14}, _UNGATED)
_NEMOTRON = Variant(NemotronConfig, NemotronForCausalLM, {"head_dim": 24}, _UNGATED)
_EXAONE = Variant(ExaoneConfig, LlamaForCausalLM, {**_ODD, "pad_token_id": 0})
_INTERNLM3 = Variant(InternLM3Config, LlamaForCausalLM, {"head_dim": 24, "num_key_value_heads": 1})
_HUNYUAN = Variant(HunYuanDenseV1Config, HunYuanDenseV1ForCausalLM, {"head_dim": 24})
_STABLELM = Variant(StableLmConfig, StableLmForCausalLM, {"num_key_value_heads": 4})
_STARCODER2 = Variant(
    Starcoder2Config,
    Starcoder2ForCausalLM,
    _ODD,
    ("q_proj", "k_proj", "v_proj", "o_proj", "c_fc", "c_proj"),
)
_COHERE = Variant(CohereConfig, CohereForCausalLM, {**_ODD, "logit_scale": 0.5})
_GPTJ = Variant(
    GPTJConfig,
    GPTJForCausalLM,
    {"hidden_size": 72, "rotary_dim": 10, "n_inner": 88},
    ("attn.q_proj", "attn.k_proj", "attn.v_proj", "attn.out_proj", "fc_in", "fc_out"),
    embedding="wte",
)
_CODEGEN = _GPTJ._replace(
    config=CodeGenConfig, model=CodeGenForCausalLM, targets=("attn.qkv_proj", *_GPTJ.targets[3:])
)
_GPT2 = Variant(
    GPT2Config,
    GPT2LMHeadModel,
    {"hidden_size": 72, "n_inner": 88},
    ("attn.c_attn", "attn.c_proj", "c_fc", "c_proj"),
    embedding="wte",
)
_BIGCODE = _GPT2._replace(config=GPTBigCodeConfig, model=GPTBigCodeForCausalLM)
_NEO = Variant(
    GPTNeoConfig,
    GPTNeoForCausalLM,
    {
        "hidden_size": 72,
        "num_layers": 3,
        "attention_types": [[["global", "local"], 1], [["local"], 1]],
    },
    ("q_proj", "k_proj", "v_proj", "out_proj", "c_fc", "c_proj"),
    embedding="wte",
)
_OPT = Variant(
    OPTConfig,
    OPTForCausalLM,
    {"hidden_size": 72, "ffn_dim": 88, "word_embed_proj_dim": 72, "init_std": 0.15},
    ("q_proj", "k_proj", "v_proj", "out_proj", "fc1", "fc2"),
)


def _on_projections() -> Mapping[str, LoraConfig]:
    targets = ["fc1", "project_in", "project_out"]
    return {
        "projections": LoraConfig(r=5, lora_alpha=9, target_modules=targets),
        "all_linear": LoraConfig(r=3, lora_alpha=4, target_modules="all-linear"),
    }


# As OPT-350M is.
_OPT_NARROW = of(_OPT, do_layer_norm_before=False, word_embed_proj_dim=40)._replace(
    others=_on_projections
)
_FUSED = ("query_key_value", "dense", "dense_h_to_4h", "dense_4h_to_h")
_NEOX = Variant(
    GPTNeoXConfig, GPTNeoXForCausalLM, {"hidden_size": 72}, _FUSED, embedding="embed_in"
)
_PERSIMMON = Variant(
    PersimmonConfig,
    PersimmonForCausalLM,
    {"hidden_size": 72, "partial_rotary_factor": 0.34},
    _FUSED,
)
_FALCON = Variant(
    FalconConfig,
    FalconForCausalLM,
    {"hidden_size": 60, "num_attention_heads": 6, "ffn_hidden_size": 88},
    _FUSED,
    embedding="word_embeddings",
)
_BLOOM = Variant(
    BloomConfig,
    BloomForCausalLM,
    {"hidden_size": 60, "num_attention_heads": 6},
    _FUSED,
    embedding="word_embeddings",
)
_MPT = Variant(
    MptConfig,
    MptForCausalLM,
    {"hidden_size": 60, "num_attention_heads": 6, "max_seq_len": 256},
    ("attn.Wqkv", "attn.out_proj", "up_proj", "down_proj"),
    embedding="wte",
)
_MROPE = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3]}
_LLAVA = Variant(text_parts.llava, LlavaForConditionalGeneration, excluded=OF_IMAGES)
_GLM4V = Variant(
    text_parts.glm4v,
    Glm4vForConditionalGeneration,
    {"rope_parameters": {**_MROPE, "mrope_section": [1, 1, 2], "partial_rotary_factor": 0.5}},
    _GLM,
    OF_IMAGES,
)

_ROWS: dict[str, Variant] = {
    "apertus": of(_APERTUS, num_key_value_heads=2),
    "apertus-gelu": of(
        _APERTUS,
        hidden_act="gelu",
        attention_bias=True,
        rope_parameters=YARN_ROPE,
        tie_word_embeddings=True,
        is_adapted=False,
    ),
    "arcee": of(_ARCEE, attention_bias=True, mlp_bias=True, rope_parameters=LLAMA3_ROPE),
    "arcee-plain": of(_ARCEE, hidden_act="relu", tie_word_embeddings=True, is_adapted=False),
    "bloom": _BLOOM,
    "bloom-untied": of(
        _BLOOM,
        hidden_size=72,
        num_attention_heads=4,
        tie_word_embeddings=False,
        is_adapted=False,
    ),
    "codegen": _CODEGEN,
    "cohere": of(_COHERE, attention_bias=True),
    "cohere-norms": of(_COHERE, use_qk_norm=True),
    "cohere2": of(
        _COHERE,
        sliding_window=7,
        layer_types=["sliding_attention", "full_attention", "sliding_attention"],
    )._replace(config=Cohere2Config, model=Cohere2ForCausalLM),
    "cwm": Variant(CwmConfig, CwmForCausalLM, {"head_dim": 24, "sliding_window": 7}),
    "cwm-biases": Variant(
        CwmConfig,
        CwmForCausalLM,
        {
            "head_dim": 16,
            "sliding_window": 5,
            "mlp_bias": True,
            "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
        },
        is_adapted=False,
    ),
    "exaone3": of(_EXAONE, num_key_value_heads=2, rope_parameters=LLAMA3_ROPE),
    "exaone3-biases": of(
        _EXAONE, attention_bias=True, mlp_bias=True, tie_word_embeddings=True, is_adapted=False
    ),
    "falcon": of(_FALCON, bias=True),
    "falcon-heads": of(
        _FALCON,
        multi_query=False,
        parallel_attn=False,
        tie_word_embeddings=False,
        activation="gelu_new",
        is_adapted=False,
    ),
    "falcon-new": of(_FALCON, new_decoder_architecture=True, num_kv_heads=2),
    "falcon-new-one-norm": of(
        _FALCON,
        new_decoder_architecture=True,
        num_ln_in_parallel_attn=1,
        rope_parameters={"rope_type": "linear", "rope_theta": 99.0, "factor": 3.0},
        is_adapted=False,
    ),
    "falcon-alibi": of(
        _FALCON,
        hidden_size=72,
        num_attention_heads=4,
        alibi=True,
        bias=True,
        multi_query=False,
        parallel_attn=False,
    ),
    "gpt2": _GPT2,
    "gpt2-scales": of(
        _GPT2,
        scale_attn_by_inverse_layer_idx=True,
        tie_word_embeddings=False,
        n_inner=None,
        is_adapted=False,
    ),
    "gpt2-unscaled": of(_GPT2, scale_attn_weights=False, is_adapted=False),
    "gpt-bigcode": _BIGCODE,
    "gpt-bigcode-heads": of(_BIGCODE, multi_query=False),
    "gpt-neo": of(_NEO, window_size=7),
    "gpt-neox": of(_NEOX, rotary_pct=0.34, rotary_emb_base=999),
    "gpt-neox-steps": of(
        _NEOX,
        use_parallel_residual=False,
        attention_bias=False,
        hidden_act="relu",
        rope_parameters={"rope_type": "default", "rope_theta": 99.0, "partial_rotary_factor": 1.0},
        tie_word_embeddings=True,
        is_adapted=False,
    ),
    "gptj": _GPTJ,
    "gptj-whole": of(_GPTJ, rotary_dim=18, n_inner=None, is_adapted=False),
    "hunyuan": of(
        _HUNYUAN,
        rope_parameters={"rope_type": "dynamic", "rope_theta": 1e4, "factor": 1.0, "alpha": 50.0},
    ),
    "hunyuan-biases": of(
        _HUNYUAN, attention_bias=True, tie_word_embeddings=True, head_dim=16, is_adapted=False
    ),
    "internlm3": of(_INTERNLM3, attention_bias=True, mlp_bias=True),
    "internlm3-dynamic": of(
        _INTERNLM3,
        rope_parameters={"rope_type": "dynamic", "rope_theta": 5e4, "factor": 6.0},
        is_adapted=False,
    ),
    "llama-gelu": Variant(
        LlamaConfig, LlamaForCausalLM, {**_ODD, "hidden_act": "gelu", "mlp_bias": True}
    ),
    "ministral": Variant(
        MinistralConfig,
        MinistralForCausalLM,
        {
            "head_dim": 24,
            "sliding_window": 7,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        },
    ),
    "mpt": of(_MPT, attn_config={"clip_qkv": 0.7, "softmax_scale": 0.3}),
    "mpt-plain": of(_MPT, hidden_size=64, num_attention_heads=8, is_adapted=False),
    "nemotron": of(_NEMOTRON, attention_bias=True, mlp_bias=True),
    "nemotron-whole": of(
        _NEMOTRON,
        hidden_act="silu",
        rope_parameters={"rope_type": "default", "rope_theta": 99.0, "partial_rotary_factor": 1.0},
        tie_word_embeddings=True,
        is_adapted=False,
    ),
    "olmo": Variant(OlmoConfig, OlmoForCausalLM, _ODD),
    "olmo-biases": Variant(
        OlmoConfig,
        OlmoForCausalLM,
        {
            "attention_bias": True,
            "tie_word_embeddings": True,
            "rope_parameters": LLAMA3_ROPE,
            "clip_qkv": 0.7,
        },
        is_adapted=False,
    ),
    "opt": _OPT,
    "opt-narrow": _OPT_NARROW,
    "opt-sums-normed": of(
        _OPT,
        do_layer_norm_before=False,
        hidden_size=64,
        word_embed_proj_dim=88,
        layer_norm_elementwise_affine=False,
    )._replace(is_adapted=False),
    "opt-plain": of(_OPT, enable_bias=False, tie_word_embeddings=False, is_adapted=False),
    "persimmon": _PERSIMMON,
    "persimmon-plain": of(
        _PERSIMMON,
        hidden_size=60,
        num_attention_heads=6,
        qk_layernorm=False,
        hidden_act="gelu",
        rope_parameters={"rope_type": "default", "rope_theta": 99.0, "partial_rotary_factor": 1.0},
        tie_word_embeddings=True,
        is_adapted=False,
    ),
    "phi-norms": Variant(
        PhiConfig,
        PhiForCausalLM,
        {"partial_rotary_factor": 0.5, "qk_layernorm": True},
        is_adapted=False,
        targets=("q_proj", "k_proj", "v_proj", "dense", "fc1", "fc2"),
    ),
    "stablelm": of(_STABLELM, use_qkv_bias=True),
    "stablelm-parallel": of(
        _STABLELM,
        use_parallel_residual=True,
        num_key_value_heads=2,
        qk_layernorm=True,
        rope_parameters={"rope_type": "default", "rope_theta": 99.0, "partial_rotary_factor": 0.5},
        tie_word_embeddings=True,
        is_adapted=False,
    ),
    "starcoder2": of(_STARCODER2, sliding_window=7),
    "starcoder2-plain": of(
        _STARCODER2, use_bias=False, tie_word_embeddings=False, is_adapted=False
    ),
    "vaultgemma": Variant(
        VaultGemmaConfig,
        VaultGemmaForCausalLM,
        {
            "head_dim": 24,
            "query_pre_attn_scalar": 40,
            "sliding_window": 7,
            "attn_logit_softcapping": 2.0,
            "final_logit_softcapping": 3.0,
            "attn_implementation": "eager",
        },
    ),
    "glm4v": _GLM4V,
    "glm46v": _GLM4V._replace(
        config=text_parts.glm46v, model=Glm46VForConditionalGeneration, is_adapted=False
    ),
    "internvl": Variant(
        text_parts.internvl, InternVLForConditionalGeneration, _ODD, excluded=OF_IMAGES
    ),
    "internvl-qwen3": Variant(
        text_parts.internvl,
        InternVLForConditionalGeneration,
        {"model_type": "qwen3", "head_dim": 24, "tie_word_embeddings": True},
        excluded=OF_IMAGES,
        is_adapted=False,
    ),
    "llava": of(_LLAVA, model_type="mistral", head_dim=24, sliding_window=None),
    "llava-llama": of(_LLAVA, model_type="llama", is_adapted=False),
    "llava-next": Variant(
        text_parts.llava_next,
        LlavaNextForConditionalGeneration,
        {"model_type": "mistral", "sliding_window": 7},
        excluded=OF_IMAGES,
    ),
    "llava-next-video": Variant(
        text_parts.llava_next_video,
        LlavaNextVideoForConditionalGeneration,
        {"model_type": "llama"},
        excluded=OF_IMAGES,
        is_adapted=False,
    ),
    "llava-onevision": Variant(
        text_parts.llava_onevision,
        LlavaOnevisionForConditionalGeneration,
        {**_ODD, "model_type": "qwen2", "tie_word_embeddings": True},
        excluded=OF_IMAGES,
    ),
    "vipllava": Variant(
        text_parts.vipllava,
        VipLlavaForConditionalGeneration,
        {"model_type": "llama"},
        excluded=OF_IMAGES,
        is_adapted=False,
    ),
    "phi4-multimodal": Variant(
        text_parts.phi4_multimodal,
        Phi4MultimodalForCausalLM,
        {
            "original_max_position_embeddings": 64,
            "rope_parameters": {
                "rope_type": "longrope",
                "rope_theta": 10000.0,
                "short_factor": [1.0, 1.1, 1.3, 1.4, 1.6, 2.0],
                "long_factor": [1.0, 1.5, 2.5, 4.0, 7.0, 9.0],
                "partial_rotary_factor": 0.75,
            },
        },
        _PHI3,
        OF_IMAGES,
    ),
    "qwen2-vl": Variant(
        text_parts.qwen2_vl,
        Qwen2VLForConditionalGeneration,
        {"rope_parameters": _MROPE, "tie_word_embeddings": True},
        excluded=OF_IMAGES,
    ),
    "qwen3-vl-moe": Variant(
        text_parts.qwen3_vl_moe,
        Qwen3VLMoeForConditionalGeneration,
        {
            **EXPERTS,
            "num_experts": 7,
            "moe_intermediate_size": 40,
            "head_dim": 24,
            "rope_parameters": {**_MROPE, "mrope_section": [4, 4, 4], "mrope_interleaved": True},
        },
        SEVEN[:4],
        OF_IMAGES,
        on_experts,
    ),
}
KIN = {name: row._replace(is_brief=True) for name, row in _ROWS.items()}
