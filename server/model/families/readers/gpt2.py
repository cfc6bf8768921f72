"""GPT-2 and its kin: positions are added to the embedding, and nothing turns. Pure."""

from collections.abc import Mapping, Sequence
from typing import Any

from msgspec.structs import replace

from loraplex.adapters.sharding import UNGROUPED, Groups
from loraplex.server.model.families import family
from loraplex.server.model.families.fields import Fields
from loraplex.server.model.families.readers import gpt, renamed
from loraplex.server.model.spec.linear_spec import LinearSpec, Part
from loraplex.server.model.spec.model_spec import (
    AttentionSpec,
    Branch,
    LayerSpec,
    MlpSpec,
    ModelSpec,
    PositionTable,
)

_EOS, _OPT_EOS = 50256, 2
_NEO_WINDOW = 256
# Rows of OPT's table before that of the first position.
_OPT_FIRST = 2
_NEO_KEYS = {"num_hidden_layers": "num_layers", "num_attention_heads": "num_heads"}
_ALL = family.Biases(qkv=True, o=True, mlp=True)
_GPT2_NAMES = family.LayerNames(("attn.c_attn",), "attn.c_proj", "mlp.c_fc", "mlp.c_proj")
_NEO_NAMES = family.LayerNames(
    tuple(f"attn.attention.{name}_proj" for name in "qkv"),
    "attn.attention.out_proj",
    "mlp.c_fc",
    "mlp.c_proj",
)
_OPT_NAMES = family.LayerNames(
    tuple(f"self_attn.{name}_proj" for name in "qkv"), "self_attn.out_proj", "fc1", "fc2"
)
_TENSORS = (
    (r"^(?:transformer\.)?wpe\.", "model.embed_positions."),
    *renamed.OF_GPT2,
)
_OPT_TENSORS = (
    (r"^(?:model\.)?decoder\.", "model."),
    (r"^model\.final_layer_norm\.", "model.norm."),
)


def read_gpt2(fields: Fields, generation: Mapping[str, Any]) -> ModelSpec:
    """GPT-2, whose checkpoints hold each matrix of a layer transposed."""
    fields, sizes = _read_gpt2_sizes(fields, None, "gelu_new")
    scales = [_scale(fields, sizes)] * sizes.layers
    if fields.config.get("scale_attn_by_inverse_layer_idx"):
        scales = [scale / number for number, scale in enumerate(scales, 1)]
    layers = [
        _layer(sizes, family.attention(sizes, None, biases=_ALL, scale=scale), UNGROUPED)
        for scale in scales
    ]
    return _learned(fields, generation, sizes, [layer.mapped(_transposed) for layer in layers])


def read_gpt_bigcode(fields: Fields, generation: Mapping[str, Any]) -> ModelSpec:
    """StarCoder 1 and SantaCoder: one head of keys and values for all of q."""
    shares = bool(fields.config.get("multi_query", True))
    fields, sizes = _read_gpt2_sizes(fields, 1 if shares else None, "gelu_pytorch_tanh")
    of = family.attention(sizes, None, biases=_ALL, scale=_scale(fields, sizes))
    layer = _layer(sizes, of, UNGROUPED if shares else Groups(sizes.heads))
    return _learned(fields, generation, sizes, [layer] * sizes.layers)


def read_gpt_neo(fields: Fields, generation: Mapping[str, Any]) -> ModelSpec:
    """GPT-Neo: scores are not scaled, and every other layer has a window."""
    fields = gpt.with_usual_keys(fields, _NEO_KEYS, "intermediate_size")
    sizes = gpt.read_sizes(fields, None, "layer_norm_epsilon")
    window = fields.positive("window_size", _NEO_WINDOW)
    biases = family.Biases(o=True, mlp=True)
    layers = []
    for kind in _read_kinds(fields, sizes):
        own = window if kind == "local" else None
        of = family.attention(sizes, None, own, biases, scale=1.0)
        layers.append(_of_two(sizes, family.branches_of(sizes, of, _NEO_NAMES, biases)))
    return _learned(fields, generation, sizes, layers)


def read_opt(fields: Fields, generation: Mapping[str, Any]) -> ModelSpec:
    """OPT. Of 350M norms are of residual sums, and rows of the embedding are narrower."""
    fields.only("layer_norm_elementwise_affine", True)
    before = bool(fields.config.get("do_layer_norm_before", True))
    if before:
        fields.only("_remove_final_layer_norm", False)
    fields = gpt.with_usual_keys(fields, {}, "ffn_dim", "relu")
    sizes = gpt.read_sizes(fields, None, "")._replace(epsilon=1e-5)
    bias = bool(fields.config.get("enable_bias", True))
    biases = family.Biases(bias, bias, bias)
    of = family.attention(sizes, None, biases=biases)
    norms = ("self_attn_layer_norm", "final_layer_norm")
    layer = _of_two(sizes, family.branches_of(sizes, of, _OPT_NAMES, biases), norms)
    if not before:
        steps = (replace(step, pre=None, after=step.pre) for step in layer.steps)
        layer = LayerSpec(tuple(steps))
    layers = [layer] * sizes.layers
    model = _learned(fields, generation, sizes, layers, _OPT_EOS, _OPT_FIRST)
    size = fields.positive("word_embed_proj_dim", sizes.hidden)
    if size != sizes.hidden:
        model = _projected(model, size)
    return replace(family.ended(model, layers), stored_names=_OPT_TENSORS)


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
    fields = gpt.with_usual_keys(fields, gpt.GPT2_KEYS, "n_inner", activation)
    return fields, gpt.read_sizes(fields, kv_heads, "layer_norm_epsilon")


def _scale(fields: Fields, sizes: family.ModelSizes) -> float:
    scales = bool(fields.config.get("scale_attn_weights", True))
    return float(sizes.head_dim**-0.5) if scales else 1.0


def _read_kinds(fields: Fields, sizes: family.ModelSizes) -> list[str]:
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


def _layer(sizes: family.ModelSizes, of: AttentionSpec, groups: Groups) -> LayerSpec:
    return _of_two(sizes, family.branches_of(sizes, of, _GPT2_NAMES, _ALL, groups))


def _of_two(
    sizes: family.ModelSizes,
    branches: tuple[AttentionSpec, MlpSpec],
    norms: tuple[str, str] = ("ln_1", "ln_2"),
) -> LayerSpec:
    return family.layer(sizes, *branches, family.layer_norms(sizes, norms))


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
    generation: Mapping[str, Any],
    sizes: family.ModelSizes,
    layers: Sequence[LayerSpec],
    eos: int = _EOS,
    first: int = 0,
) -> ModelSpec:
    """Make a model with a table of positions. first: as of PositionTable."""
    fields = family.tied_where_unsaid(fields)
    model = family.layer_normed(fields, generation, sizes, layers, sizes.positions, eos)
    table = PositionTable("model.embed_positions", sizes.positions + first, first)
    embedding = replace(model.embedding, positions=table)
    return replace(model, embedding=embedding, stored_names=_TENSORS)
