"""The kinds of models that are served, and why others are not: type, head, stored form. Pure."""

from collections.abc import Collection, Mapping
from typing import Any, NamedTuple

from loraplex.adapters.violations import shown
from loraplex.server.model.families.head_forms import head_form

_LISTED = "`loraplex info` lists what is"


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


_LISTS = (
    *("layer_types", "layers_block_type", "block_types", "attn_layers", "attention_layers"),
    "mixer_types",
)
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
_TOWERS = ("vision_config", "audio_config")


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
