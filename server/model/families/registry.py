"""The kinds of models that are served, why others are not, and the way from `config.json` to a
ModelSpec. Pure.

A key that would change the maths and is not implemented is refused by name; nothing is guessed.
"""

from collections.abc import Collection, Mapping
from typing import Any, NamedTuple

from msgspec.structs import replace

from loraplex.adapters.errors import shown
from loraplex.server.model.families.family import Family, refuse_other_attention
from loraplex.server.model.families.fields import Fields
from loraplex.server.model.families.head_forms import architecture_of, head_form, with_head
from loraplex.server.model.families.readers import (
    bert,
    deepseek,
    gemma,
    gpt,
    granite,
    hybrid,
    layer_normed,
    llama,
    mamba,
    routed,
    windowed,
)
from loraplex.server.model.families.readers.composite import COMPOSITES, TEXT_BODIES, Text, text_of
from loraplex.server.model.families.towers.read_pictures import with_pictures
from loraplex.server.model.quantisation.quantisation import Quantisation
from loraplex.server.model.quantisation.read import read_quantisation
from loraplex.server.model.spec.model_spec import ModelSpec

_LISTED = "`loraplex info` lists what is"

_LISTS = (
    *("layer_types", "layers_block_type", "block_types", "attn_layers", "attention_layers"),
    "mixer_types",
)

_TOWERS = ("vision_config", "audio_config")

# The class that transformers makes of some types.
_LLAMA = ("LlamaForCausalLM",)
# By `model_type`. A new family is a reader and a line here.
FAMILIES: dict[str, Family] = {
    "afmoe": Family("AfmoeForCausalLM", routed.read_afmoe),
    "apertus": Family("ApertusForCausalLM", llama.read_apertus),
    "arcee": Family("ArceeForCausalLM", llama.read_arcee),
    "Yi": Family("YiForCausalLM", llama.read_yi),
    "bert": Family("BertModel", bert.read_bert),
    "bloom": Family("BloomForCausalLM", gpt.read_bloom),
    "bamba": Family("BambaForCausalLM", mamba.read_bamba),
    "mamba2": Family("Mamba2ForCausalLM", mamba.read_mamba2),
    "baichuan": Family("BaichuanForCausalLM", llama.read_baichuan),
    "chatglm": Family(
        "ChatGLMForConditionalGeneration", llama.read_chatglm, others=("ChatGLMModel",)
    ),
    "codegen": Family("CodeGenForCausalLM", gpt.read_codegen),
    "cohere": Family("CohereForCausalLM", layer_normed.read_cohere),
    "cohere2": Family("Cohere2ForCausalLM", layer_normed.read_cohere2),
    "cwm": Family("CwmForCausalLM", windowed.read_cwm),
    "dbrx": Family("DbrxForCausalLM", gpt.read_dbrx),
    "deberta-v2": Family("DebertaV2Model", bert.read_deberta),
    "deepseek": Family("DeepseekForCausalLM", routed.read_deepseek),
    "deepseek_v2": Family("DeepseekV2ForCausalLM", deepseek.read_v2),
    "deepseek_v3": Family("DeepseekV3ForCausalLM", deepseek.read_v3),
    "distilbert": Family("DistilBertModel", bert.read_distilbert),
    "electra": Family("ElectraModel", bert.read_electra),
    "dots1": Family("Dots1ForCausalLM", routed.read_dots1),
    "ernie4_5_moe": Family("Ernie4_5_MoeForCausalLM", routed.read_ernie_moe),
    "exaone_moe": Family("ExaoneMoeForCausalLM", routed.read_exaone_moe),
    "falcon": Family("FalconForCausalLM", gpt.read_falcon),
    "falcon_h1": Family("FalconH1ForCausalLM", mamba.read_falcon_h1),
    "flex_olmo": Family("FlexOlmoForCausalLM", routed.read_flex_olmo),
    "glm4_moe": Family("Glm4MoeForCausalLM", routed.read_glm4_moe),
    "glm4_moe_lite": Family("Glm4MoeLiteForCausalLM", deepseek.read_glm_lite),
    "granitemoe": Family("GraniteMoeForCausalLM", granite.read_moe),
    "granitemoeshared": Family("GraniteMoeSharedForCausalLM", granite.read_moe),
    "hunyuan_v1_moe": Family("HunYuanMoEV1ForCausalLM", routed.read_hunyuan_moe),
    "minimax_m2": Family("MiniMaxM2ForCausalLM", routed.read_minimax_m2),
    "olmoe": Family("OlmoeForCausalLM", routed.read_olmoe),
    "qwen2_moe": Family("Qwen2MoeForCausalLM", routed.read_qwen2_moe),
    "ernie4_5": Family("Ernie4_5ForCausalLM", llama.read_ernie),
    "exaone": Family("ExaoneForCausalLM", llama.read_exaone, others=_LLAMA),
    "exaone4": Family("Exaone4ForCausalLM", windowed.read_exaone4),
    "gemma": Family("GemmaForCausalLM", gemma.read_gemma),
    "gemma2": Family("Gemma2ForCausalLM", gemma.read_gemma2),
    "gemma3_text": Family("Gemma3ForCausalLM", gemma.read_gemma3),
    "gemma4_text": Family("Gemma4ForCausalLM", gemma.read_gemma4),
    "gemma4_unified_text": Family("Gemma4UnifiedForCausalLM", gemma.read_gemma4_unified),
    "gpt2": Family("GPT2LMHeadModel", gpt.read_gpt2),
    "gpt_bigcode": Family("GPTBigCodeForCausalLM", gpt.read_gpt_bigcode),
    "gpt_neo": Family("GPTNeoForCausalLM", gpt.read_gpt_neo),
    "gpt_neox": Family("GPTNeoXForCausalLM", gpt.read_gpt_neox),
    "gptj": Family("GPTJForCausalLM", gpt.read_gptj),
    "gpt_oss": Family("GptOssForCausalLM", routed.read_gpt_oss, quantised="mxfp4"),
    "granite": Family("GraniteForCausalLM", granite.read),
    "granitemoehybrid": Family("GraniteMoeHybridForCausalLM", granite.read_hybrid),
    "glm": Family("GlmForCausalLM", llama.read_glm),
    "glm4": Family("Glm4ForCausalLM", llama.read_glm4),
    "helium": Family("HeliumForCausalLM", llama.read_helium),
    "hunyuan_v1_dense": Family("HunYuanDenseV1ForCausalLM", llama.read_hunyuan),
    "internlm2": Family("InternLM2ForCausalLM", llama.read_internlm2),
    "internlm3": Family("InternLM3ForCausalLM", llama.read_internlm3, others=_LLAMA),
    "kimi_k2": Family("DeepseekV3ForCausalLM", deepseek.read_v3),
    "lfm2": Family("Lfm2ForCausalLM", hybrid.read_lfm2),
    "lfm2_moe": Family("Lfm2MoeForCausalLM", hybrid.read_lfm2_moe),
    "llama": Family("LlamaForCausalLM", llama.read),
    "mimo": Family("MiMoForCausalLM", windowed.read_qwen2),
    "minicpm3": Family("MiniCPM3ForCausalLM", deepseek.read_minicpm),
    "ministral": Family("MinistralForCausalLM", windowed.read_mistral),
    "ministral3": Family("Ministral3ForCausalLM", windowed.read_ministral3),
    "mistral": Family("MistralForCausalLM", windowed.read_mistral),
    "mistral4": Family("Mistral4ForCausalLM", deepseek.read_mistral4),
    "mixtral": Family("MixtralForCausalLM", routed.read_mixtral),
    "modernbert": Family("ModernBertModel", bert.read_modernbert),
    "mpnet": Family("MPNetModel", bert.read_mpnet),
    "mpt": Family("MptForCausalLM", gpt.read_mpt, others=("MPTForCausalLM",)),
    "nemotron_h": Family("NemotronHForCausalLM", mamba.read_nemotron_h),
    "nemotron": Family("NemotronForCausalLM", llama.read_nemotron),
    "olmo": Family("OlmoForCausalLM", windowed.read_olmo),
    "olmo2": Family("Olmo2ForCausalLM", windowed.read_olmo2),
    "olmo3": Family("Olmo3ForCausalLM", windowed.read_olmo3),
    "olmo_hybrid": Family("OlmoHybridForCausalLM", hybrid.read_olmo_hybrid),
    "opt": Family("OPTForCausalLM", gpt.read_opt),
    "persimmon": Family("PersimmonForCausalLM", gpt.read_persimmon),
    "phi": Family("PhiForCausalLM", layer_normed.read_phi),
    "phimoe": Family("PhimoeForCausalLM", routed.read_phimoe, others=("PhiMoEForCausalLM",)),
    "phi3": Family("Phi3ForCausalLM", windowed.read_phi3),
    "qwen": Family("QWenLMHeadModel", llama.read_qwen),
    "qwen2": Family("Qwen2ForCausalLM", windowed.read_qwen2),
    "qwen3": Family("Qwen3ForCausalLM", windowed.read_qwen3),
    "qwen3_moe": Family("Qwen3MoeForCausalLM", routed.read_qwen3_moe),
    "qwen3_next": Family("Qwen3NextForCausalLM", hybrid.read_qwen3_next),
    "qwen3_5_text": Family("Qwen3_5ForCausalLM", hybrid.read_qwen35),
    "qwen3_5_moe_text": Family("Qwen3_5MoeForCausalLM", hybrid.read_qwen35_moe),
    "roberta": Family("RobertaModel", bert.read_roberta),
    "seed_oss": Family("SeedOssForCausalLM", llama.read_seed_oss),
    "smollm3": Family("SmolLM3ForCausalLM", windowed.read_smollm3),
    "stablelm": Family("StableLmForCausalLM", layer_normed.read_stablelm),
    "starcoder2": Family("Starcoder2ForCausalLM", layer_normed.read_starcoder2),
    "vaultgemma": Family("VaultGemmaForCausalLM", gemma.read_vaultgemma),
    "xlm-roberta": Family("XLMRobertaModel", bert.read_roberta),
    "xverse": Family("XverseForCausalLM", llama.read_xverse),
    "youtu": Family("YoutuForCausalLM", deepseek.read_youtu),
}
# Families that stand in a larger model alone.
_WITHIN: dict[str, Family] = {
    "glm4v_text": Family("Glm4vTextModel", llama.read_glm4v),
    "qwen3_vl_moe_text": Family("Qwen3VLMoeTextModel", routed.read_qwen3_vl_moe),
}


class _Part(NamedTuple):
    """A part that is not served, and the fields that only models with it have.

    keys: of `config.json`, where they say more than null, false, 0 or nothing. named: keys that
    count whatever they say. kinds: in its lists of layers. without: keys of models that have
    another part in its place.
    """

    words: str
    keys: tuple[str, ...] = ()
    named: tuple[str, ...] = ()
    kinds: tuple[str, ...] = ()
    without: tuple[str, ...] = ()


# What is most of the work comes first.
_PARTS: tuple[_Part, ...] = (
    _Part(
        "an encoder whose output the decoder attends to",
        (
            *("is_encoder_decoder", "add_cross_attention", "cross_attention_layers"),
            *("decoder_layers", "num_decoder_layers", "cross_layer_interval", "aligner_ffn_mult"),
            *("audio_encoder", "text_encoder"),
        ),
    ),
    _Part("blocks of attention that several layers share", ("num_mem_blocks",)),
    _Part(
        "state-space layers (Mamba's)",
        (
            *("ssm_cfg", "hybrid_override_pattern", "mamba_d_state", "mamba_d_conv", "state_size"),
            *("mamba_num_heads", "ssm_state_size", "n_mamba_heads", "mamba_n_heads"),
        ),
        kinds=("mamba", "mamba2"),
    ),
    _Part(
        "recurrent layers",
        (
            *("lru_width", "rescale_every", "qk_dim_factor", "H_cycles", "n_recurrent_loops"),
            "loop_num_passes",
        ),
        kinds=("recurrent",),
    ),
    _Part(
        "linear attention with recurrent state",
        (
            *("linear_num_key_heads", "linear_num_heads", "linear_attn_config"),
            *("linear_conv_kernel_dim", "linear_attn_alpha_factor"),
        ),
        kinds=("linear_attention",),
    ),
    _Part("layers of convolutions", ("conv_L_cache",), kinds=("conv",)),
    _Part("attention over convolved keys and values", ("cca_time0",)),
    _Part(
        "attention to tokens that an index chooses, or to compressed ones",
        ("index_topk", "index_topk_blocks", "o_lora_rank", "compress_ratios"),
        kinds=("indexed_attention", "heavily_compressed_attention", "compressed_sparse_attention"),
    ),
    _Part(
        "several streams of a token (AltUp), and low-rank branches beside attention (LAuReL)",
        ("altup_num_inputs", "laurel_rank"),
    ),
    _Part(
        "attention in chunks, and experts whose input is scaled",
        ("attention_chunk_size", "interleave_moe_layer_step"),
        kinds=("chunked_attention",),
    ),
    _Part("convolutions and distances that attention adds to its scores", ("rel_extent", "d_rel")),
    _Part("attention to references and the newest tokens", kinds=("reference_sliding_attention",)),
    _Part("a gate of what attention gives", ("gating", "use_attention_gate")),
    _Part("layers of different widths, or without attention", ("block_configs",)),
    _Part("experts within attention", named=("kv_channels",)),
    _Part("experts that give back what they read", ("zero_expert_num",)),
    _Part("differential attention", ("lambda_std_dev",)),
    _Part("attention masks that depend on the values", ("keep_window_size",)),
    _Part("a model of bytes and patches, where others have tokens", ("patching_mode",)),
    _Part("tokens of several codebooks", ("num_codebooks", "audio_vocab_size", "vq_config")),
    _Part("attention of hashed tokens", ("num_hashes",), kinds=("lsh",)),
    _Part("two streams of attention", named=("bi_data",)),
    _Part("actions beside text", named=("max_action_dim",)),
    _Part("scores of tokens with distances in another form", ("pos_att_type", "share_att_key")),
    _Part("a reader of this form of encoder", ("type_vocab_size", "is_encoder")),
    _Part(
        "attention to later tokens in a model that writes",
        (
            *("use_lang_emb", "prefix_lm", "num_image_tokens"),
            *("use_bidirectional_attention", "prompt_types"),
        ),
    ),
    _Part(
        "positions that are added in another form, or norms of sums",
        (
            *("n_positions", "do_layer_norm_before", "learned_pos_emb", "attention_types"),
            *("scale_embedding", "afn"),
        ),
        without=("rotary_dim",),
    ),
)


def missing_part(config: Mapping[str, Any]) -> str | None:
    """The part that the model needs and that is not served, as a phrase; None = none shows. It is
    found by the fields of `config.json`, not by the name of the type.
    """
    text = config.get("text_config")
    text = text if isinstance(text, Mapping) else {}
    attention = config.get("attn_config")
    attention = attention if isinstance(attention, Mapping) else {}
    fields = {**config, **text, **attention}
    found = next((part.words for part in _PARTS if _has(fields, part)), None)
    if found is None and any(config.get(key) for key in _TOWERS):
        named = text.get("model_type")
        of_type = f", of type {shown(named)}" if named else ""
        return f"a reader of the text part{of_type}, beside its encoder of images or sound"
    return found


def _has(fields: Mapping[str, Any], part: _Part) -> bool:
    if any(fields.get(key) for key in part.without):
        return False
    kinds = {kind for key in _LISTS for kind in _listed(fields.get(key))}
    return (
        any(fields.get(key) for key in part.keys)
        or any(key in fields for key in part.named)
        or not kinds.isdisjoint(part.kinds)
    )


def _listed(value: object) -> list[str]:
    return [kind for kind in value if isinstance(kind, str)] if isinstance(value, list) else []


def other_family(config: Mapping[str, Any], families: Collection[str]) -> str | None:
    """The one reason that counts for a model of another type: its other settings mean nothing.
    families: the values of `model_type` that are served."""
    model_type = config.get("model_type")
    if isinstance(model_type, str) and model_type in families:
        return None
    if model_type is None:
        return f"config.json names no model_type; {_LISTED}"
    part = missing_part(config)
    because = f": it needs {part}" if part else f"; {_LISTED}"
    return f"model type {shown(model_type)} is not served{because}"


def other_forms(
    config: Mapping[str, Any],
    architecture: str,
    names: Collection[str],
    *,
    for_vectors: bool = False,
) -> list[str]:
    """Reasons of a model of a served type: another head, MLX's weights, code of its own.
    architecture: the class that is served. names: others of the type, too. for_vectors: as of
    `read_model`."""
    has_no_head = for_vectors or head_form(config, architecture) == "none"
    reasons = (
        _head(config, architecture),
        _of_mlx(config),
        _own_code(config, architecture, names),
        _own_body(config) if has_no_head else None,
    )
    return [reason for reason in reasons if reason is not None]


def _head(config: Mapping[str, Any], served: str) -> str | None:
    named = config.get("architectures") or []
    if not isinstance(named, list):
        return f"architectures must be a list of names, got {shown(named)}"
    if head_form(config, served) is not None:
        return None
    found = ", ".join(map(str, named))[:160]
    if any("bidirectional" in str(name).lower() for name in named):
        return f"architectures: {shown(found)} attends to later tokens, too; served is {served}"
    return f"architectures: {shown(found)} is no form that is served; served is {served}"


def _of_mlx(config: Mapping[str, Any]) -> str | None:
    if not config.get("quantization"):
        return None
    return "quantization: quantised weights (MLX) are not served; serve the original"


def _own_code(config: Mapping[str, Any], served: str, names: Collection[str]) -> str | None:
    """Code beside the weights under the name of a class that transformers has is left out, as
    transformers leaves it out: what is computed is the library's."""
    codes = config.get("auto_map") or {}
    if not isinstance(codes, Mapping):
        return f"auto_map must be a table, got {shown(codes)}"
    code = codes.get("AutoModelForCausalLM")
    if code is None and head_form(config, served) == "classes":
        code = codes.get("AutoModelForSequenceClassification")
        names = (str((config.get("architectures") or [""])[0]),)
    if code is None or str(code).rpartition(".")[2].lower() in map(str.lower, names):
        return None
    return f"auto_map: the model needs code of its own ({shown(code)}), which is never run"


def _own_body(config: Mapping[str, Any]) -> str | None:
    """The code that a model for vectors brings, if any; such a body may attend both ways.

    GTE-Qwen2's does so under the library's own name.
    """
    codes = config.get("auto_map")
    code = codes.get("AutoModel") if isinstance(codes, Mapping) else None
    if code is None:
        return None
    return (
        f"auto_map: its vectors need code of its own ({shown(code)}), which is never run and may "
        "attend to later tokens"
    )


def architectures() -> dict[str, str]:
    """The class that `config.json` names, by `model_type`: of all that is served, larger models
    whose text part is served included."""
    return {
        **{name: family.architecture for name, family in FAMILIES.items()},
        **{name: composite.architecture for name, composite in COMPOSITES.items()},
    }


def read_model(
    config: Mapping[str, Any],
    generation: Mapping[str, Any] | None = None,
    *,
    for_vectors: bool = False,
) -> ModelSpec:
    """Read `config.json` (and `generation_config.json`, whose end-of-sequence ids win).

    for_vectors: its checkpoint says how texts become vectors, whatever head it has.
    Raises ValueError: of a model of another type with that alone, else with every unsupported or
    malformed key at once, what matters most first.
    """
    reason = other_family(config, architectures())
    if reason is not None:
        raise ValueError(reason)
    model_type = config["model_type"]
    composite = COMPOSITES.get(model_type)
    text = Text(model_type, dict(config)) if composite is None else text_of(config)
    family = FAMILIES.get(text.family) or _WITHIN[text.family]
    fields = Fields(text.config)
    ends = (generation or {}).get("eos_token_id")
    if ends is not None:
        fields = fields.changed(eos_token_id=ends)
    served = family.names if composite is None else composite.names
    architecture = architecture_of(config, served)
    whole = {**text.config, "architectures": None, **config}
    for reason in other_forms(whole, architecture, served, for_vectors=for_vectors):
        fields.refuse(reason)
    quantisation = _quantisation(fields, whole, family.quantised)
    if composite is not None and quantisation is not None:
        quantisation = replace(quantisation, bodies=TEXT_BODIES)
    model = family.read(fields)
    if composite is not None:
        _refuse_beside(config, fields)
        if for_vectors:
            fields.refuse("vectors of a model for text and images are not served")
    form = head_form(whole, architecture) or "text"
    model = with_head(model, "none" if for_vectors and form == "text" else form, fields)
    if model.writes and not model.is_causal:
        fields.refuse("is_causal is false: such a model gives vectors, and has no head for text")
    model = replace(model, is_text_part=composite is not None, quantisation=quantisation)
    if composite is not None and not fields.problems:
        model = with_pictures(config, model, fields)
    if fields.problems:
        raise ValueError("this model is not supported: " + "; ".join(fields.problems))
    return model.within(model.max_context)


def _refuse_beside(config: Mapping[str, Any], fields: Fields) -> None:
    """Refuse by values next to `text_config`, which count for the text part, too."""
    beside = Fields(config)
    refuse_other_attention(beside)
    for of in (beside, fields):
        of.only("is_causal", True)
    for problem in beside.problems:
        fields.refuse(problem)


def _quantisation(
    fields: Fields, config: Mapping[str, Any], own: str | None
) -> Quantisation | None:
    """Read how the weights are quantised; None = they are not. own: the method of weights that the
    family itself reads.
    """
    for key in ("quantization_config", "compression_config"):
        table = config.get(key)
        if not table:
            continue
        if not isinstance(table, Mapping):
            fields.refuse(f"{key} must be a table, got {table!r}")
            continue
        if own is not None and table.get("quant_method") == own:
            return Quantisation(f"{own.upper()} (experts)", ())
        try:
            return read_quantisation(table)
        except ValueError as error:
            fields.refuse(f"{key}: {error}")
    return None
