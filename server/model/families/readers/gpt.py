"""GPT-J, CodeGen, GPT-NeoX, Persimmon, Falcon, GPT-2, StarCoder 1, GPT-Neo, OPT, BLOOM, MPT and
DBRX: LayerNorm, names of their own, and but for DBRX's experts an MLP without gate. Positions turn
features, or are added to the embedding. Scores of BLOOM and MPT fall with distance (ALiBi).
Pure."""

from collections.abc import Mapping, Sequence
from typing import Any

from msgspec.structs import replace

from loraplex.adapters.base import UNGROUPED, Groups
from loraplex.server.model.families import experts, family
from loraplex.server.model.families.fields import Fields
from loraplex.server.model.families.readers import llama
from loraplex.server.model.families.rope import RopeRules, read_rope, rope_table
from loraplex.server.model.spec.linear_spec import ExpertStorage, LinearSpec, Part
from loraplex.server.model.spec.model_spec import (
    AttentionSpec,
    Branch,
    BranchNorms,
    LayerSpec,
    MlpSpec,
    ModelSpec,
    NormSpec,
    PositionTable,
    RopeSpec,
    StepSpec,
)
from loraplex.server.model.spec.moe_spec import MoeSpec, RouterRule

_GPTJ_EOS, _NEOX_EOS, _FALCON_EOS, _PERSIMMON_EOS = 50256, 2, 11, 2
_NEOX_ROPE = RopeRules(partial=0.25)
_GPTJ_THETA, _GPTJ_TURNED = 10_000.0, 64
_GPT2_KEYS = {
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
_FALCON_TENSORS = (
    (r"^(?:transformer\.)?word_embeddings\.", "model.embed_tokens."),
    *llama.OF_GPT2,
)
MPT_TENSORS = (
    (r"^(?:transformer\.)?wte\.", "model.embed_tokens."),
    (r"^(?:transformer\.)?blocks\.", "model.layers."),
    (r"^(?:transformer\.)?norm_f\.", "model.norm."),
)

_GPTJ_NAMES = family.LayerNames(
    ("attn.q_proj", "attn.k_proj", "attn.v_proj"), "attn.out_proj", ("mlp.fc_in",), "mlp.fc_out"
)
_CODEGEN_NAMES = _GPTJ_NAMES._replace(qkv=("attn.qkv_proj",))
_NEOX_NAMES = family.LayerNames(
    ("attention.query_key_value",), "attention.dense", ("mlp.dense_h_to_4h",), "mlp.dense_4h_to_h"
)
_FALCON_NAMES = _NEOX_NAMES._replace(
    qkv=("self_attention.query_key_value",), o="self_attention.dense"
)
_PERSIMMON_NAMES = _NEOX_NAMES._replace(qkv=("self_attn.query_key_value",), o="self_attn.dense")

_GPT2_EOS, _OPT_EOS = 50256, 2
_NEO_WINDOW = 256
# Rows of OPT's table before that of the first position.
_OPT_FIRST = 2
_NEO_KEYS = {"num_hidden_layers": "num_layers", "num_attention_heads": "num_heads"}
_ALL = family.Biases(qkv=True, o=True, mlp=True)
_GPT2_NAMES = family.LayerNames(
    ("attn.c_attn",), "attn.c_proj", ("mlp.c_fc",), "mlp.c_proj", ("ln_1", "ln_2")
)
_NEO_NAMES = family.LayerNames(
    tuple(f"attn.attention.{name}_proj" for name in "qkv"),
    "attn.attention.out_proj",
    ("mlp.c_fc",),
    "mlp.c_proj",
    ("ln_1", "ln_2"),
)
_OPT_NAMES = family.LayerNames(
    tuple(f"self_attn.{name}_proj" for name in "qkv"),
    "self_attn.out_proj",
    ("fc1",),
    "fc2",
    ("self_attn_layer_norm", "final_layer_norm"),
)
_GPT2_TENSORS = (
    (r"^(?:transformer\.)?wpe\.", "model.embed_positions."),
    *llama.OF_GPT2,
)
_OPT_TENSORS = (
    (r"^(?:model\.)?decoder\.", "model."),
    (r"^model\.final_layer_norm\.", "model.norm."),
)

_BLOOM_EOS = 2
_BLOOM_NORM = "word_embeddings_layernorm"
_BLOOM_TENSORS = (
    (rf"^(?:transformer\.)?{_BLOOM_NORM}\.", f"model.{_BLOOM_NORM}."),
    *_FALCON_TENSORS,
)
_BLOOM_KEYS = {"num_hidden_layers": "n_layer", "num_attention_heads": "n_head"}
_MPT_KEYS = {
    "hidden_size": "d_model",
    "num_hidden_layers": "n_layers",
    "num_attention_heads": "n_heads",
}
_MPT_NAMES = family.LayerNames(
    ("attn.Wqkv",), "attn.out_proj", ("ffn.up_proj",), "ffn.down_proj", ("norm_1", "norm_2")
)
# What MPT may say, where another value would change it, and what its attention.
_MPT_USUAL: dict[str, object] = {
    "no_bias": True,
    "expansion_ratio": 4,
    "logit_scale": None,
    "norm_type": "low_precision_layernorm",
}
_MPT_ATTENTION: dict[str, object] = {
    "attn_type": "multihead_attention",
    "alibi": True,
    "alibi_bias_max": 8,
    "prefix_lm": False,
    "qk_ln": False,
    "rope": False,
}

_DBRX_KEYS = {
    "hidden_size": "d_model",
    "num_hidden_layers": "n_layers",
    "num_attention_heads": "n_heads",
    "max_position_embeddings": "max_seq_len",
}
_DBRX_ATTENTION, _DBRX_EXPERTS = "norm_attn_norm.attn", "ffn.experts.mlp"
_DBRX_NAMES = experts.ExpertNames("ffn.router.layer", _DBRX_EXPERTS, gate="w1", up="v1", down="w2")
_DBRX_NORMS = "norm_attn_norm.norm_1", "norm_attn_norm.norm_2"
_DBRX_ROWS = ExpertStorage(_DBRX_EXPERTS, "rows")
_DBRX_TRANSPOSED = ExpertStorage(_DBRX_EXPERTS, "rows", transposed=True)


def read_gptj(fields: Fields) -> ModelSpec:
    """GPT-J: attention and MLP read one norm; the first features of heads turn, by neighbours."""
    return _gptj(fields, _GPTJ_NAMES, UNGROUPED)


def read_codegen(fields: Fields) -> ModelSpec:
    """CodeGen: GPT-J with one matrix for q, k and v."""
    if fields.positive("n_embd", 1) % _CODEGEN_GROUPS.count:
        fields.refuse(f"n_embd must be a multiple of {_CODEGEN_GROUPS.count}")
    return _gptj(fields, _CODEGEN_NAMES, _CODEGEN_GROUPS)


def _gptj(fields: Fields, names: family.LayerNames, groups: Groups) -> ModelSpec:
    fields.only("tie_word_embeddings", False)
    fields = _with_usual_keys(fields, _GPT2_KEYS, "n_inner")
    sizes = read_sizes(fields, None, "layer_norm_epsilon")
    turned = fields.positive("rotary_dim", _GPTJ_TURNED)
    if sizes.is_sound and (turned > sizes.head_dim or turned % 2):
        fields.refuse(f"rotary_dim must be even and at most {sizes.head_dim}, got {turned}")
    part = None if turned == sizes.head_dim else turned
    rope = RopeSpec("default", _GPTJ_THETA, rotary_dim=part, interleaved=True)
    of = family.attention(sizes, rope)
    branches = family.renamed(of, family.plain_mlp(sizes, family.Biases(mlp=True)), names, groups)
    layer = LayerSpec((StepSpec(branches, family.layer_norm("ln_1", sizes)),))
    model = family.model(fields, sizes, layer, sizes.positions, eos=_GPTJ_EOS)
    head = replace(model.head, linear=replace(model.head.linear, bias=True))
    return replace(model, head=head, stored_names=llama.OF_GPT2)


def read_gpt_neox(fields: Fields) -> ModelSpec:
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
    of, mlp = family.renamed(of, family.plain_mlp(sizes, biases), _NEOX_NAMES, Groups(sizes.heads))
    parallel = bool(config.get("use_parallel_residual", True))
    layer = _layer(sizes, (of, mlp), family.layer_norms(sizes), parallel=parallel)
    model = family.model(fields, sizes, layer, max_context, eos=_NEOX_EOS)
    return replace(model, stored_names=_NEOX_TENSORS)


def read_persimmon(fields: Fields) -> ModelSpec:
    """Persimmon: q and k have LayerNorms, and half of each head turns."""
    fields = fields.changed(hidden_act=fields.config.get("hidden_act", "relu2"))
    sizes = read_sizes(fields, None, "layer_norm_eps")
    rope, max_context = read_rope(fields, sizes, RopeRules(partial=0.5))
    biases = family.Biases(qkv=True, o=True, mlp=True)
    of = family.attention(sizes, rope, biases=biases)
    if fields.config.get("qk_layernorm", True):
        of = family.with_layer_norms(of, sizes)
    layer = _named(sizes, of, biases, _PERSIMMON_NAMES, Groups(sizes.heads))
    last = "model.final_layernorm"
    return family.model(fields, sizes, layer, max_context, eos=_PERSIMMON_EOS, last=last)


def read_falcon(fields: Fields) -> ModelSpec:
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
    mlp = family.plain_mlp(sizes, biases)
    branches = family.renamed(of, mlp, _FALCON_NAMES, Groups(sizes.kv_heads))
    layer = _falcon_layer(fields, sizes, branches, is_new=is_new)
    fields = family.tied_where_unsaid(fields)
    model = family.model(fields, sizes, layer, max_context, eos=_FALCON_EOS)
    return replace(model, stored_names=_FALCON_TENSORS)


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


def _with_usual_keys(
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


def read_gpt2(fields: Fields) -> ModelSpec:
    """GPT-2, whose checkpoints hold each matrix of a layer transposed."""
    fields, sizes = _read_gpt2_sizes(fields, None, "gelu_new")
    scales = [_read_gpt2_scale(fields, sizes)] * sizes.layers
    if fields.config.get("scale_attn_by_inverse_layer_idx"):
        scales = [scale / number for number, scale in enumerate(scales, 1)]
    layers = [
        _named(sizes, family.attention(sizes, None, biases=_ALL, scale=scale), _ALL, _GPT2_NAMES)
        for scale in scales
    ]
    return _learned(fields, sizes, [layer.mapped(_transposed) for layer in layers])


def read_gpt_bigcode(fields: Fields) -> ModelSpec:
    """StarCoder 1 and SantaCoder: one head of keys and values for all of q."""
    shares = bool(fields.config.get("multi_query", True))
    fields, sizes = _read_gpt2_sizes(fields, 1 if shares else None, "gelu_pytorch_tanh")
    of = family.attention(sizes, None, biases=_ALL, scale=_read_gpt2_scale(fields, sizes))
    layer = _named(sizes, of, _ALL, _GPT2_NAMES, UNGROUPED if shares else Groups(sizes.heads))
    return _learned(fields, sizes, [layer] * sizes.layers)


def read_gpt_neo(fields: Fields) -> ModelSpec:
    """GPT-Neo: scores are not scaled, and every other layer has a window."""
    fields = _with_usual_keys(fields, _NEO_KEYS, "intermediate_size")
    sizes = read_sizes(fields, None, "layer_norm_epsilon")
    window = fields.positive("window_size", _NEO_WINDOW)
    biases = family.Biases(o=True, mlp=True)
    layers = []
    for kind in _read_neo_kinds(fields, sizes):
        own = window if kind == "local" else None
        of = family.attention(sizes, None, own, biases, scale=1.0)
        layers.append(_named(sizes, of, biases, _NEO_NAMES))
    return _learned(fields, sizes, layers)


def read_opt(fields: Fields) -> ModelSpec:
    """OPT. Of 350M norms are of residual sums, and rows of the embedding are narrower."""
    before = bool(fields.config.get("do_layer_norm_before", True))
    if before:
        fields.only("_remove_final_layer_norm", False)
    fields = _with_usual_keys(fields, {}, "ffn_dim", "relu")
    sizes = read_sizes(fields, None, "")._replace(epsilon=1e-5)
    bias = bool(fields.config.get("enable_bias", True))
    biases = family.Biases(bias, bias, bias)
    of = family.attention(sizes, None, biases=biases)
    layer = _named(sizes, of, biases, _OPT_NAMES)
    if not before:
        steps = (replace(step, pre=None, after=step.pre) for step in layer.steps)
        layer = LayerSpec(tuple(steps))
    layers = [layer] * sizes.layers
    model = _learned(fields, sizes, layers, _OPT_EOS, _OPT_FIRST)
    size = fields.positive("word_embed_proj_dim", sizes.hidden)
    if size != sizes.hidden:
        model = _projected(model, size)
    model = replace(family.ended(model, layers), stored_names=_OPT_TENSORS)
    if fields.config.get("layer_norm_elementwise_affine", True):
        return model
    return _without_weights(model)


def _without_weights(model: ModelSpec) -> ModelSpec:
    """Return the model, whose LayerNorms have neither weights nor biases, as Galactica's."""

    def bare(norm: NormSpec | None) -> NormSpec | None:
        return None if norm is None else replace(norm, has_weight=False, bias=False)

    layers = [
        LayerSpec(
            tuple(replace(step, pre=bare(step.pre), after=bare(step.after)) for step in each.steps)
        )
        for each in model.layers
    ]
    last = replace(model.norm, has_weight=False, bias=False)
    return replace(model, layers=tuple(layers), norm=last)


def _projected(model: ModelSpec, size: int) -> ModelSpec:
    """Return the model with an embedding and a head of this size, and products from and to it."""
    hidden = model.hidden_size
    into = LinearSpec("project_in", size, (Part("model.project_in", hidden),), "none")
    out = LinearSpec("project_out", hidden, (Part("model.project_out", size),), "none")
    embedding = replace(model.embedding, size=size, projection=into, projects_first=True)
    head = replace(model.head, linear=replace(model.head.linear, in_features=size))
    return replace(model, embedding=embedding, head=head, output=out)


def _read_gpt2_sizes(
    fields: Fields, kv_heads: int | None, activation: str
) -> tuple[Fields, family.ModelSizes]:
    fields.only("add_cross_attention", False)
    fields = _with_usual_keys(fields, _GPT2_KEYS, "n_inner", activation)
    return fields, read_sizes(fields, kv_heads, "layer_norm_epsilon")


def _read_gpt2_scale(fields: Fields, sizes: family.ModelSizes) -> float:
    scales = bool(fields.config.get("scale_attn_weights", True))
    return float(sizes.head_dim**-0.5) if scales else 1.0


def _read_neo_kinds(fields: Fields, sizes: family.ModelSizes) -> list[str]:
    """Read the kind of each layer of GPT-Neo, "global" or "local"."""
    each = fields.config.get("attention_layers")
    said = fields.config.get("attention_types") or [[["global", "local"], sizes.layers // 2]]
    try:
        groups = [(each, 1)] if each is not None else said
        kinds = [str(kind) for group, count in groups for _ in range(count) for kind in group]
    except (TypeError, ValueError):
        kinds = []
    if sizes.is_sound and (len(kinds) != sizes.layers or not {*kinds} <= {"global", "local"}):
        key = "attention_types" if each is None else "attention_layers"
        fields.refuse(f"{key} must say global or local for each layer")
    return kinds if len(kinds) == sizes.layers else ["global"] * sizes.layers


def _named(
    sizes: family.ModelSizes,
    of: AttentionSpec,
    biases: family.Biases,
    names: family.LayerNames,
    groups: Groups = UNGROUPED,
) -> LayerSpec:
    """Make a layer of two steps, with these names. groups: of the rows of q, k and v."""
    branches = family.renamed(of, family.plain_mlp(sizes, biases), names, groups)
    return family.layer(sizes, *branches, family.layer_norms(sizes, names.norms))


def _transposed(branch: Branch) -> Branch:
    if isinstance(branch, AttentionSpec):
        qkv, o = (replace(linear, transposed=True) for linear in branch.linears)
        return replace(branch, qkv=qkv, o=o)
    if isinstance(branch, MlpSpec):
        up, down = (replace(linear, transposed=True) for linear in branch.linears)
        return replace(branch, gate_up=up, down=down)
    return branch


def _learned(
    fields: Fields,
    sizes: family.ModelSizes,
    layers: Sequence[LayerSpec],
    eos: int = _GPT2_EOS,
    first: int = 0,
) -> ModelSpec:
    """Make a model with a table of positions. first: as of PositionTable."""
    fields = family.tied_where_unsaid(fields)
    model = family.model(fields, sizes, layers, sizes.positions, eos=eos)
    table = PositionTable("model.embed_positions", sizes.positions + first, first)
    embedding = replace(model.embedding, positions=table)
    return replace(model, embedding=embedding, stored_names=_GPT2_TENSORS)


def read_bloom(fields: Fields) -> ModelSpec:
    """BLOOM: a norm of the embedding; q, k and v are one module, head by head."""
    fields.only("apply_residual_connection_post_layernorm", False)
    if fields.config.get("pretraining_tp", 1) != 1:
        fields.only("slow_but_exact", False)  # transformers then leaves biases and adapters out
    fields = of_own_names(fields, _BLOOM_KEYS)
    hidden = fields.config.get("n_embed") or fields.config.get("hidden_size")
    fields = _four_times(fields, hidden, "n_inner", "gelu_pytorch_tanh", "seq_length")
    sizes = read_sizes(fields, None, "layer_norm_epsilon")
    biases = family.Biases(qkv=True, o=True, mlp=True)
    of = family.attention(sizes, None, biases=biases)
    of = replace(of, slopes=family.alibi_slopes(sizes.heads))
    layer = _named(sizes, of, biases, _FALCON_NAMES, Groups(sizes.heads))
    fields = family.tied_where_unsaid(fields)
    model = family.model(fields, sizes, layer, sizes.positions, eos=_BLOOM_EOS)
    norm = family.layer_norm(f"model.{_BLOOM_NORM}", sizes)
    embedding = replace(model.embedding, norm=norm)
    return replace(model, embedding=embedding, stored_names=_BLOOM_TENSORS)


def read_mpt(fields: Fields) -> ModelSpec:
    """MPT: neither matrices nor norms have a bias; q, k and v may be clipped."""
    for key, usual in _MPT_USUAL.items():
        fields.only(key, usual)
    said = fields.table(fields.config, "attn_config")
    inner = fields.changed(**said)
    for key, usual in _MPT_ATTENTION.items():
        inner.only(key, usual)
    fields = of_own_names(fields, _MPT_KEYS)
    hidden = fields.config.get("hidden_size")
    fields = _four_times(fields, hidden, "ffn_hidden_size", "gelu", "max_seq_len")
    sizes = read_sizes(fields, None, "layer_norm_epsilon")
    scale = None
    if said.get("softmax_scale") is not None:
        scale = fields.number(said, "softmax_scale", None)
    of = family.attention(sizes, None, scale=scale)
    clip = fields.number(said, "clip_qkv", None) if said.get("clip_qkv") else 0.0
    of = replace(of, clip=clip, slopes=family.alibi_slopes(sizes.heads))
    of, mlp = family.renamed(of, family.plain_mlp(sizes, family.NO_BIASES), _MPT_NAMES)
    layer = family.layer(sizes, of, mlp, family.layer_norms(sizes, _MPT_NAMES.norms, bias=False))
    fields = family.tied_where_unsaid(fields)
    return family.model(fields, sizes, layer, sizes.positions, stored_names=MPT_TENSORS)


def _four_times(
    fields: Fields, hidden: object, inner: str, activation: str, positions: str
) -> Fields:
    """Return fields of an MLP that is four times as wide as the model. inner: a key that may say
    so. positions: the key of a context's tokens."""
    width = 4 * hidden if isinstance(hidden, int) else hidden
    fields.only(inner, width)
    return fields.changed(
        hidden_size=hidden,
        intermediate_size=width,
        hidden_act=activation,
        max_position_embeddings=fields.config.get(positions),
    )


def read_dbrx(fields: Fields) -> ModelSpec:
    """DBRX: experts in every layer, whose matrices are a tensor for each product of all."""
    fields.only("tie_word_embeddings", False)
    said = fields.table(fields.config, "attn_config")
    feed = fields.table(fields.config, "ffn_config")
    fields = of_own_names(fields, _DBRX_KEYS)
    fields = fields.changed(
        intermediate_size=feed.get("ffn_hidden_size", 3584),
        num_experts=feed.get("moe_num_experts", 4),
        num_local_experts=None,
        num_experts_per_tok=feed.get("moe_top_k", 1),
        hidden_act=fields.table(feed, "ffn_act_fn").get("name", "silu"),
        rope_theta=_theta(fields, said),
    )
    experts.refuse_other_activation(fields)
    sizes = read_sizes(fields, said.get("kv_n_heads", 1), "")._replace(epsilon=1e-5)
    rope, max_context = read_rope(fields, sizes)
    of = family.attention(sizes, rope)
    clip = 0.0 if said.get("clip_qkv") is None else fields.number(said, "clip_qkv", None)
    qkv = family.fused(of.qkv, f"{_DBRX_ATTENTION}.Wqkv")
    of = replace(of, qkv=qkv, o=family.with_paths(of.o, f"{_DBRX_ATTENTION}.out_proj"), clip=clip)
    norms = family.layer_norms(sizes, _DBRX_NORMS, bias=False)
    layer = family.layer(sizes, of, _read_experts(fields, feed, sizes), norms)
    return family.model(fields, sizes, layer, max_context, stored_names=MPT_TENSORS)


def _theta(fields: Fields, said: Mapping[str, Any]) -> object:
    """Read the base of the rotation, which `attn_config` may say: transformers 5 does not read
    that, so it must not contradict the table beside it."""
    theta, table = said.get("rope_theta"), rope_table(fields)
    other = table.get("rope_theta", fields.config.get("rope_theta"))
    if None not in (theta, other) and theta != other:
        fields.refuse(f"attn_config: rope_theta is {theta!r}, and {other!r} beside it")
    return other if theta is None else theta


def _read_experts(fields: Fields, feed: Mapping[str, Any], sizes: family.ModelSizes) -> MoeSpec:
    power = feed.get("moe_normalize_expert_weights", 1.0)
    if power not in (None, 1.0):
        fields.refuse(f"ffn_config: moe_normalize_expert_weights must be 1, got {power!r}")
    rule: RouterRule = "softmax_top_k" if power is None else "softmax_top_k_normed"
    counts = experts.read_counts(fields, default=4, default_of_token=1)
    moe = experts.moe(sizes.hidden, sizes.inner, counts, _DBRX_NAMES, rule)
    gate, up = (Part(f"{_DBRX_EXPERTS}.{name}", sizes.inner) for name in ("w1", "v1"))
    down = Part(f"{_DBRX_EXPERTS}.w2", sizes.hidden)
    return replace(
        moe,
        gate_up=replace(moe.gate_up, parts=(gate, up), stored=_DBRX_ROWS),
        down=replace(moe.down, parts=(down,), stored=_DBRX_TRANSPOSED),
    )
