"""GPT-J, GPT-NeoX, Persimmon and kin: LayerNorm, an MLP without gate, names of their own. Pure."""

from collections.abc import Mapping
from typing import Any

from msgspec.structs import replace

from loraplex.adapters.sharding import UNGROUPED, Groups
from loraplex.server.model.families import family
from loraplex.server.model.families.fields import Fields
from loraplex.server.model.families.readers import renamed
from loraplex.server.model.families.rope import RopeRules, read_rope
from loraplex.server.model.spec.model_spec import (
    AttentionSpec,
    BranchNorms,
    LayerSpec,
    MlpSpec,
    ModelSpec,
    RopeSpec,
    StepSpec,
)

_GPTJ_EOS, _NEOX_EOS, _FALCON_EOS, _PERSIMMON_EOS = 50256, 2, 11, 2
_NEOX_ROPE = RopeRules(partial=0.25)
_GPTJ_THETA, _GPTJ_TURNED = 10_000.0, 64
GPT2_KEYS = {
    "hidden_size": "n_embd",
    "num_hidden_layers": "n_layer",
    "num_attention_heads": "n_head",
    "max_position_embeddings": "n_positions",
}
# The number of devices that CodeGen was trained on. The rows of each are a group: q, v, k.
_CODEGEN_GROUPS = Groups(4, (0, 2, 1))
_NEOX_TENSORS = (
    (r"^(?:gpt_neox\.)?embed_in\.", "model.embed_tokens."),
    (r"^gpt_neox\.layers\.", "model.layers."),
    (r"^(?:gpt_neox\.)?final_layer_norm\.", "model.norm."),
    (r"^embed_out\.", "lm_head."),
)
FALCON_TENSORS = (
    (r"^(?:transformer\.)?word_embeddings\.", "model.embed_tokens."),
    *renamed.OF_GPT2,
)
MPT_TENSORS = (
    (r"^(?:transformer\.)?wte\.", "model.embed_tokens."),
    (r"^(?:transformer\.)?blocks\.", "model.layers."),
    (r"^(?:transformer\.)?norm_f\.", "model.norm."),
)

_GPTJ_NAMES = family.LayerNames(
    ("attn.q_proj", "attn.k_proj", "attn.v_proj"), "attn.out_proj", "mlp.fc_in", "mlp.fc_out"
)
_CODEGEN_NAMES = _GPTJ_NAMES._replace(qkv=("attn.qkv_proj",))
_NEOX_NAMES = family.LayerNames(
    ("attention.query_key_value",), "attention.dense", "mlp.dense_h_to_4h", "mlp.dense_4h_to_h"
)
FALCON_NAMES = _NEOX_NAMES._replace(
    qkv=("self_attention.query_key_value",), o="self_attention.dense"
)
_PERSIMMON_NAMES = _NEOX_NAMES._replace(qkv=("self_attn.query_key_value",), o="self_attn.dense")


def read_gptj(fields: Fields, generation: Mapping[str, Any]) -> ModelSpec:
    """GPT-J: attention and MLP read one norm; the first features of heads turn, by neighbours."""
    return _gptj(fields, generation, _GPTJ_NAMES, UNGROUPED)


def read_codegen(fields: Fields, generation: Mapping[str, Any]) -> ModelSpec:
    """CodeGen: GPT-J with one matrix for q, k and v."""
    if fields.positive("n_embd", 1) % _CODEGEN_GROUPS.count:
        fields.refuse(f"n_embd must be a multiple of {_CODEGEN_GROUPS.count}")
    return _gptj(fields, generation, _CODEGEN_NAMES, _CODEGEN_GROUPS)


def _gptj(
    fields: Fields, generation: Mapping[str, Any], names: family.LayerNames, groups: Groups
) -> ModelSpec:
    fields.only("tie_word_embeddings", False)
    fields = with_usual_keys(fields, GPT2_KEYS, "n_inner")
    sizes = read_sizes(fields, None, "layer_norm_epsilon")
    turned = fields.positive("rotary_dim", _GPTJ_TURNED)
    if sizes.is_sound and (turned > sizes.head_dim or turned % 2):
        fields.refuse(f"rotary_dim must be even and at most {sizes.head_dim}, got {turned}")
    part = None if turned == sizes.head_dim else turned
    rope = RopeSpec("default", _GPTJ_THETA, rotary_dim=part, interleaved=True)
    of = family.attention(sizes, rope)
    branches = family.branches_of(sizes, of, names, family.Biases(mlp=True), groups)
    layer = LayerSpec((StepSpec(branches, family.layer_norm("ln_1", sizes)),))
    model = family.layer_normed(
        fields, generation, sizes, [layer] * sizes.layers, sizes.positions, _GPTJ_EOS
    )
    head = replace(model.head, linear=replace(model.head.linear, bias=True))
    return replace(model, head=head, stored_names=renamed.OF_GPT2)


def read_gpt_neox(fields: Fields, generation: Mapping[str, Any]) -> ModelSpec:
    """GPT-NeoX and Pythia: attention and MLP beside each other, each behind a norm of its own."""
    config = fields.config
    fields = fields.changed(
        rope_theta=config.get("rotary_emb_base"), partial_rotary_factor=config.get("rotary_pct")
    )
    sizes = read_sizes(fields, None, "layer_norm_eps")
    rope, max_context = read_rope(fields, sizes, _NEOX_ROPE)
    bias = bool(config.get("attention_bias", True))
    biases = family.Biases(qkv=bias, o=bias, mlp=True)
    of = family.attention(sizes, rope, biases=biases)
    of, mlp = family.branches_of(sizes, of, _NEOX_NAMES, biases, Groups(sizes.heads))
    parallel = bool(config.get("use_parallel_residual", True))
    layer = _layer(sizes, (of, mlp), family.layer_norms(sizes), parallel=parallel)
    model = family.layer_normed(
        fields, generation, sizes, [layer] * sizes.layers, max_context, _NEOX_EOS
    )
    return replace(model, stored_names=_NEOX_TENSORS)


def read_persimmon(fields: Fields, generation: Mapping[str, Any]) -> ModelSpec:
    """Persimmon: q and k have LayerNorms, and half of each head turns."""
    fields = fields.changed(hidden_act=fields.config.get("hidden_act", "relu2"))
    sizes = read_sizes(fields, None, "layer_norm_eps")
    rope, max_context = read_rope(fields, sizes, RopeRules(partial=0.5))
    biases = family.Biases(qkv=True, o=True, mlp=True)
    of = family.attention(sizes, rope, biases=biases)
    if fields.config.get("qk_layernorm", True):
        of = family.with_layer_norms(of, sizes)
    of, mlp = family.branches_of(sizes, of, _PERSIMMON_NAMES, biases, Groups(sizes.heads))
    layer = family.layer(sizes, of, mlp, family.layer_norms(sizes))
    model = family.layer_normed(
        fields, generation, sizes, [layer] * sizes.layers, max_context, _PERSIMMON_EOS
    )
    return replace(model, norm=replace(model.norm, path="model.final_layernorm"))


def read_falcon(fields: Fields, generation: Mapping[str, Any]) -> ModelSpec:
    """Falcon, with rotation or slopes: one head of keys and values for all of q, or a group."""
    config = fields.config
    slopes = bool(config.get("alibi"))
    fields.only("n_embed", config.get("hidden_size"))
    heads, is_new = config.get("num_attention_heads"), bool(config.get("new_decoder_architecture"))
    shares = config.get("multi_query", True) and not is_new
    if not (is_new or shares):
        fields.only("num_kv_heads", heads)
    fields = fields.changed(
        intermediate_size=_inner(config.get("ffn_hidden_size"), config.get("hidden_size")),
        hidden_act=config.get("activation", "gelu"),
    )
    sizes = read_sizes(fields, 1 if shares else config.get("num_kv_heads"), "layer_norm_epsilon")
    rope, max_context = read_rope(fields, sizes)
    biased = bool(config.get("bias"))
    biases = family.Biases(biased, biased, biased)
    of = family.attention(sizes, None if slopes else rope, biases=biases)
    if slopes:  # scaled as products are; transformers rounds these biases to bfloat16
        each = tuple(slope * of.scale for slope in family.alibi_slopes(sizes.heads))
        of, max_context = replace(of, slopes=each), sizes.positions
    branches = family.branches_of(sizes, of, FALCON_NAMES, biases, Groups(sizes.kv_heads))
    layer = _falcon_layer(fields, sizes, branches, is_new=is_new)
    fields = family.tied_where_unsaid(fields)
    model = family.layer_normed(
        fields, generation, sizes, [layer] * sizes.layers, max_context, _FALCON_EOS
    )
    return replace(model, stored_names=FALCON_TENSORS)


def _falcon_layer(
    fields: Fields,
    sizes: family.ModelSizes,
    branches: tuple[AttentionSpec, MlpSpec],
    *,
    is_new: bool,
) -> LayerSpec:
    parallel = bool(fields.config.get("parallel_attn", True))
    norms = fields.config.get("num_ln_in_parallel_attn")
    if is_new:
        fields.only("parallel_attn", True)
    if is_new and norms not in (None, 1, 2) or not is_new and parallel and norms == 2:
        fields.refuse(f"num_ln_in_parallel_attn: {norms!r} is not served with such layers")
    if is_new and norms != 1:
        two = family.layer_norms(sizes, ("ln_attn", "ln_mlp"))
        return _layer(sizes, branches, two, parallel=True)
    both = family.layer_norms(sizes)
    one = both._replace(pre_mlp=None)
    return _layer(sizes, branches, one if parallel else both, parallel=parallel)


def with_usual_keys(
    fields: Fields, keys: Mapping[str, str], inner: str, activation: str = "gelu_new"
) -> Fields:
    """Return fields with the usual names of keys. keys: the type's own, by the usual ones. inner:
    that of the size within an MLP. activation: where `config.json` says nothing."""
    config = fields.config
    found = fields.changed(**{usual: config.get(own) for usual, own in keys.items()})
    return found.changed(
        intermediate_size=_inner(config.get(inner), found.config.get("hidden_size")),
        hidden_act=config.get("activation_function", activation),
    )


def of_own_names(fields: Fields, keys: Mapping[str, str]) -> Fields:
    """Return fields with the usual names of keys, which may have either name. keys: the type's own,
    by the usual ones."""
    config = fields.config
    for usual, own in keys.items():
        if None not in (config.get(own), config.get(usual)):
            fields.only(own, config[usual])
    found = {usual: config.get(own, config.get(usual)) for usual, own in keys.items()}
    return fields.changed(**found)


def _inner(said: object, hidden: object) -> object:
    """The size within an MLP: four times that of the model, where `config.json` says nothing."""
    return 4 * hidden if said is None and isinstance(hidden, int) else said


def read_sizes(fields: Fields, kv_heads: object, epsilon_key: str) -> family.ModelSizes:
    """Read the sizes of a model as wide as its heads together. kv_heads: None = one for each."""
    family.refuse_other_attention(fields)
    fields.only("is_causal", True)
    fields = fields.changed(num_key_value_heads=kv_heads)
    sizes = family.read_sizes(fields, epsilon=1e-5, epsilon_key=epsilon_key, activation="gelu")
    family.refuse_other_head_dim(fields, sizes)
    return sizes


def _layer(
    sizes: family.ModelSizes,
    branches: tuple[AttentionSpec, MlpSpec],
    norms: family.NormPlaces,
    *,
    parallel: bool,
) -> LayerSpec:
    """Make a layer of one step, or of two. norms: of one step the MLP has its own, or none."""
    if not parallel:
        return family.layer(sizes, *branches, norms)
    own = BranchNorms(), BranchNorms(norms.pre_mlp)
    return LayerSpec((StepSpec(branches, norms.pre_attention, own=own),))
