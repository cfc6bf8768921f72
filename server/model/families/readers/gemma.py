"""Gemma 1 to 4, VaultGemma and EmbeddingGemma: a scaled embedding, and a GELU in the MLP. Up to
Gemma 3 norms are stored less one. Gemma 4 has windowed layers, wide ones whose keys may be values,
experts beside MLPs, embeddings of each layer, and last layers that read the keys and values of
earlier ones. Pure.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from msgspec.structs import replace

from loraplex.adapters.base import Role
from loraplex.server.model.families import experts, family
from loraplex.server.model.families.fields import Fields
from loraplex.server.model.families.rope import (
    WITH_PROPORTIONAL,
    RopeRules,
    read_rope,
    read_table,
    read_tables,
)
from loraplex.server.model.spec.linear_spec import LinearSpec, Part
from loraplex.server.model.spec.model_spec import (
    AttentionSpec,
    BranchNorms,
    LayerInputs,
    LayerSpec,
    MlpSpec,
    ModelSpec,
    NormSpec,
    RopeSpec,
    StepSpec,
    layer_path,
)
from loraplex.server.model.spec.moe_spec import MoeSpec

_ACTIVATION = "gelu_pytorch_tanh"
_HEAD_DIM = 256
_EOS = 1
_WINDOW = 4096
_QUERY_SCALAR = 256
_FULL_THETA, _WINDOWED_THETA = 1e6, 1e4

_GEMMA4_PATTERN = 6
_LAYER_SCALAR = "layer_scalar"
_WIDE_HEAD = 512
_GEMMA4_ROPES: dict[str, dict[str, Any]] = {
    family.WINDOWED: {"rope_type": "default", "rope_theta": 1e4},
    family.FULL: {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1e6},
}
_GEMMA4_EXPERTS = experts.ExpertNames(
    router="router.proj",
    of="experts.{}",
    gate="gate_proj",
    up="up_proj",
    down="down_proj",
    stacked="experts",
)
_VOCABULARY = 262144


def read_gemma(fields: Fields) -> ModelSpec:
    """Norms in Llama's places."""
    sizes = _read_sizes(fields, kv_heads=16)
    rope, max_context = read_rope(fields, sizes)
    if fields.config.get("hidden_activation") not in (None, _ACTIVATION):
        named = fields.config["hidden_activation"]
        fields.refuse(f"hidden_activation must be {_ACTIVATION}, got {named!r}")
    norms = family.NormPlaces(
        pre_attention=_norm("input_layernorm", sizes.hidden, sizes),
        pre_mlp=_norm("post_attention_layernorm", sizes.hidden, sizes),
    )
    named = fields.config.get("hidden_act", _ACTIVATION)
    # The first configurations say "gelu" and mean what the models were trained with.
    activation = family.read_activation(
        fields, "hidden_act", _ACTIVATION if named == "gelu" else named
    )
    of = family.attention(sizes, rope, biases=family.attention_biases(fields))
    layer = family.layer(sizes, of, family.mlp(sizes, activation=activation), norms)
    return _model_of(fields, sizes, (layer,) * sizes.layers, max_context)


def read_vaultgemma(fields: Fields) -> ModelSpec:
    """VaultGemma: Gemma 2 without norms behind attention and MLP."""
    model = read_gemma2(fields)
    layers = (
        LayerSpec(tuple(replace(step, post=None) for step in layer.steps)) for layer in model.layers
    )
    return replace(model, layers=tuple(layers))


def read_gemma2(fields: Fields) -> ModelSpec:
    """Soft caps on scores and logits; a window in every other layer, from the first on."""
    config = fields.config
    sizes = _read_sizes(fields, kv_heads=4)
    rope, max_context = read_rope(fields, sizes)
    scale = fields.number(config, "query_pre_attn_scalar", _QUERY_SCALAR) ** -0.5
    softcap = _read_softcap(fields, "attn_logit_softcapping", 50.0)
    window, biases = config.get("sliding_window", _WINDOW), family.attention_biases(fields)
    windows = family.read_windows(fields, sizes, window, lambda layer: layer % 2 == 0)
    layers = layers_of(
        fields,
        sizes,
        [
            family.attention(sizes, rope, each, biases, scale=scale, softcap=softcap)
            for each in windows
        ],
    )
    cap = _read_softcap(fields, "final_logit_softcapping", 30.0)
    return _model_of(fields, sizes, layers, max_context, cap)


def read_gemma3(fields: Fields) -> ModelSpec:
    """Windows in five of six layers, whose rotation is another than that of the sixth; norms of q
    and k. Positions are not multiplied by a factor of the rotation: they are counted with it."""
    if fields.config.get("use_bidirectional_attention") is True:
        fields = _seeing_both_ways(fields)
    config = fields.config
    sizes = _read_sizes(fields, kv_heads=4)
    if config.get("attn_logit_softcapping") is not None:
        fields.refuse("attn_logit_softcapping must be null, since Gemma 3 computes none")
    pattern = fields.positive("sliding_window_pattern", 6)

    def has_window(layer: int) -> bool:
        return (layer + 1) % pattern > 0

    windows = family.read_windows(fields, sizes, config.get("sliding_window", _WINDOW), has_window)
    local_theta = config.get("rope_local_base_freq", _WINDOWED_THETA)
    tables = read_tables(fields, config.get("rope_theta", _FULL_THETA), local_theta)
    full, windowed = (read_table(fields, table, sizes)[0] for table in tables)
    ropes = [windowed if has else full for has in family.read_windowed(fields, sizes, has_window)]
    scale = fields.number(config, "query_pre_attn_scalar", _QUERY_SCALAR) ** -0.5
    biases = family.attention_biases(fields)
    attentions = [
        replace(
            family.attention(sizes, rope, window, biases, scale=scale),
            q_norm=_norm("self_attn.q_norm", sizes.head_dim, sizes),
            k_norm=_norm("self_attn.k_norm", sizes.head_dim, sizes),
        )
        for rope, window in zip(ropes, windows, strict=True)
    ]
    layers = layers_of(fields, sizes, attentions)
    cap = _read_softcap(fields, "final_logit_softcapping", None)
    return _model_of(fields, sizes, layers, sizes.positions, cap)


def _seeing_both_ways(fields: Fields) -> Fields:
    """EmbeddingGemma, whose windows reach half as far to either side."""
    half = fields.positive("sliding_window", _WINDOW) // 2
    if not half:
        fields.refuse("sliding_window must be at least 2 where tokens see later ones")
    return fields.changed(use_bidirectional_attention=None, is_causal=False, sliding_window=half)


def _read_sizes(fields: Fields, kv_heads: int) -> family.ModelSizes:
    return family.read_sizes(fields, kv_heads=kv_heads, head_dim=_HEAD_DIM, activation=None)


def _read_softcap(fields: Fields, key: str, usual: float | None) -> float | None:
    """Read a soft cap. usual: where `config.json` has no such key; null = no cap."""
    if fields.config.get(key, usual) is None:
        return None
    return fields.number(fields.config, key, usual)


def _norm(path: str, size: int, sizes: family.ModelSizes, offset: float = 1.0) -> NormSpec:
    return NormSpec(path, size, sizes.epsilon, offset=offset)


def layers_of(
    fields: Fields,
    sizes: family.ModelSizes,
    attentions: Sequence[AttentionSpec],
    offset: float = 1.0,
) -> list[LayerSpec]:
    """Make the layers, with norms before and behind attention and MLP. offset: of norms."""
    norms = family.NormPlaces(
        pre_attention=_norm("input_layernorm", sizes.hidden, sizes, offset),
        post_attention=_norm("post_attention_layernorm", sizes.hidden, sizes, offset),
        pre_mlp=_norm("pre_feedforward_layernorm", sizes.hidden, sizes, offset),
        post_mlp=_norm("post_feedforward_layernorm", sizes.hidden, sizes, offset),
    )
    named = fields.config.get("hidden_activation", _ACTIVATION)
    activation = family.read_activation(fields, "hidden_activation", named)
    mlp = family.mlp(sizes, activation=activation)
    return [family.layer(sizes, of, mlp, norms) for of in attentions]


def _model_of(
    fields: Fields,
    sizes: family.ModelSizes,
    layers: Sequence[LayerSpec],
    max_context: int,
    softcap: float | None = None,
) -> ModelSpec:
    """Make the model, with scaled embeddings. softcap: of logits."""
    plain = family.model(fields, sizes, layers, max_context, eos=_EOS, tied=True)
    return replace(
        plain,
        embedding=replace(plain.embedding, scale=sizes.hidden**0.5),
        head=replace(plain.head, softcap=softcap),
    )


def read_gemma4(fields: Fields) -> ModelSpec:
    """Gemma 4, whose class has embeddings of each layer where `config.json` says nothing."""
    per_layer = fields.config.get("hidden_size_per_layer_input", 256)
    return _read_gemma4(fields.changed(hidden_size_per_layer_input=per_layer), window=512)


def read_gemma4_unified(fields: Fields) -> ModelSpec:
    """Gemma 4 of one tower for text and images, such as its 12B."""
    return _read_gemma4(fields, window=1024)


def _read_gemma4(fields: Fields, window: int) -> ModelSpec:
    """window: where `config.json` says nothing."""
    config = fields.config
    if config.get("use_bidirectional_attention") == "vision":  # only pictures see both ways
        fields = fields.changed(use_bidirectional_attention=None)
    sizes = family.read_sizes(fields, kv_heads=4, head_dim=256, activation=None)
    kinds = family.read_windowed(fields, sizes, lambda layer: (layer + 1) % _GEMMA4_PATTERN > 0)
    windows = family.read_windows(
        fields, sizes, config.get("sliding_window", window), lambda layer: kinds[layer]
    )
    # transformers lets the last layer see all tokens, whatever its kind.
    windowed = [*kinds[:-1], False]
    full = _wide_sizes(fields, sizes, windowed)
    narrow_rope, wide_rope = _gemma4_ropes(fields, sizes, full)
    narrow = [_gemma4_attention(fields, sizes, narrow_rope, each) for each in windows]
    wide = _wide(_gemma4_attention(fields, full, wide_rope, None), fields, full != sizes)
    attentions = [of if has else wide for of, has in zip(narrow, windowed, strict=True)]
    sources = _read_sources(fields, windowed)
    attentions = [
        of if source is None else _reading(of, source)
        for of, source in zip(attentions, sources, strict=True)
    ]
    layers = layers_of(fields, sizes, attentions, offset=0.0)
    if config.get("use_double_wide_mlp", False):
        layers = [
            layer if source is None else _widened(layer, sizes)
            for layer, source in zip(layers, sources, strict=True)
        ]
    if config.get("enable_moe_block", False):
        layers = _with_experts(fields, sizes, layers)
    inputs = _read_inputs(fields, sizes)
    layers = [_with_scalar(_with_inputs(layer, sizes, inputs)) for layer in layers]
    cap = _read_softcap(fields, "final_logit_softcapping", None)
    model = _model_of(fields, sizes, layers, sizes.positions, cap)
    unread = [number for number, source in enumerate(sources) if source is not None]
    return replace(
        model,
        embedding=replace(model.embedding, inputs=inputs),
        unread=rf"model\.layers\.({'|'.join(map(str, unread))})\.self_attn\.[kv]_(proj|norm)\..+",
        unread_modules=tuple(
            layer_path(number, f"self_attn.{name}_proj") for number in unread for name in "kv"
        ),
    )


def _wide_sizes(
    fields: Fields, sizes: family.ModelSizes, windowed: list[bool]
) -> family.ModelSizes:
    """Read the heads of layers without a window, by either spelling: `per_layer_config` has a table
    for each of them, or single keys name those of all."""
    config, wide = fields.config, {str(n) for n, has in enumerate(windowed) if not has}
    if "per_layer_config" in config:
        tables = fields.table(config, "per_layer_config")
    else:
        own = {"head_dim": config.get("global_head_dim", _WIDE_HEAD)}
        kv_heads = config.get("num_global_key_value_heads")
        if kv_heads is not None and config.get("attention_k_eq_v", False):
            own["num_key_value_heads"] = kv_heads
        tables = dict.fromkeys(wide, own)
    if not tables:
        return sizes
    first = next(iter(tables.values()))
    known = isinstance(first, Mapping) and set(first) <= {"head_dim", "num_key_value_heads"}
    if not known or set(tables) != wide or any(table != first for table in tables.values()):
        fields.refuse("per_layer_config must give the same heads to all layers without a window")
        return sizes
    own_fields, kv_heads = fields.changed(**first), sizes.kv_heads
    return family.read_sizes(
        own_fields, kv_heads=kv_heads, head_dim=sizes.head_dim, activation=None
    )


def _gemma4_ropes(
    fields: Fields, sizes: family.ModelSizes, full: family.ModelSizes
) -> tuple[RopeSpec, RopeSpec]:
    """Rotations of layers with a window, and of those without."""
    if fields.config.get("rope_parameters") is None:
        fields = fields.changed(rope_parameters=_GEMMA4_ROPES)
    wide, narrow = read_tables(fields, 1e6, 1e4)
    rules = RopeRules(kinds=WITH_PROPORTIONAL)
    return read_table(fields, narrow, sizes, rules)[0], read_table(fields, wide, full, rules)[0]


def _gemma4_attention(
    fields: Fields, sizes: family.ModelSizes, rope: RopeSpec, window: int | None
) -> AttentionSpec:
    biases = family.attention_biases(fields)
    of = family.attention(sizes, rope, window, biases, scale=1.0, qk_norm=True)
    return replace(of, norms_values=True)


def _wide(of: AttentionSpec, fields: Fields, is_other: bool) -> AttentionSpec:
    """The attention of a layer without a window. is_other: its heads are not those of the rest."""
    if fields.config.get("attention_k_eq_v", False):
        of = replace(of, qkv=replace(of.qkv, parts=of.qkv.parts[:2]), keys_are_values=True)
        is_other = True
    return replace(of, qkv=_as_wide(of.qkv), o=_as_wide(of.o)) if is_other else of


def _as_wide(linear: LinearSpec) -> LinearSpec:
    return replace(linear, role="wide_qkv" if linear.role == "qkv" else "wide_o")


def _read_sources(fields: Fields, windowed: list[bool]) -> list[int | None]:
    """For each layer that of its kind whose keys and values it reads; None = its own."""
    shared = fields.config.get("num_kv_shared_layers") or 0
    first = len(windowed) - shared if type(shared) is int else -1
    if not 0 <= first <= len(windowed) or {*windowed[:first]} != {*windowed}:
        fields.refuse(
            "num_kv_shared_layers must leave a layer of each kind with keys and values of its own,"
            f" got {shared!r}"
        )
        first = len(windowed)
    if first < len(windowed) and not family.is_causal(fields):
        fields.refuse("num_kv_shared_layers must be 0 where tokens see later ones")
    last = {has: number for number, has in enumerate(windowed[:first])}
    return [None if number < first else last[has] for number, has in enumerate(windowed)]


def _reading(of: AttentionSpec, source: int) -> AttentionSpec:
    """The attention of a layer that reads another layer's keys and values."""
    role: Role = "q" if of.qkv.role == "qkv" else "wide_q"
    q = replace(of.qkv, role=role, parts=of.qkv.parts[:1])
    return replace(of, qkv=q, k_norm=None, norms_values=False, keys_of=source)


def _widened(layer: LayerSpec, sizes: family.ModelSizes) -> LayerSpec:
    """The layer, whose MLP is twice as wide."""
    *others, feed = layer.steps
    (mlp,) = feed.branches
    assert isinstance(mlp, MlpSpec)
    wide = family.mlp(sizes._replace(inner=2 * sizes.inner), activation=mlp.activation)
    gate_up, down = replace(wide.gate_up, role="wide_gate_up"), replace(wide.down, role="wide_down")
    wide = replace(wide, gate_up=gate_up, down=down)
    return LayerSpec((*others, replace(feed, branches=(wide,))))


def _read_inputs(fields: Fields, sizes: family.ModelSizes) -> LayerInputs | None:
    """Read what layers read of the embedding."""
    config = fields.config
    if config.get("hidden_size_per_layer_input") in (None, 0):
        return None
    size = fields.positive("hidden_size_per_layer_input")
    rows = fields.positive("vocab_size_per_layer_input", _VOCABULARY)
    if rows < sizes.vocab:
        fields.refuse(f"vocab_size_per_layer_input must be at least {sizes.vocab}, got {rows}")
    part = Part("model.per_layer_model_projection", sizes.layers * size)
    linear = LinearSpec("per_layer_model_projection", sizes.hidden, (part,), "none")
    # Of the product, which is divided by a root first; half of the sum's square is the table's.
    epsilon, half = sizes.epsilon * sizes.hidden, 0.5**0.5
    norm = NormSpec("model.per_layer_projection_norm", size, epsilon, factor=half)
    table = "model.embed_tokens_per_layer"
    return LayerInputs(table, rows, sizes.layers, size, linear, norm, half * size**0.5)


def _with_inputs(
    layer: LayerSpec, sizes: family.ModelSizes, inputs: LayerInputs | None
) -> LayerSpec:
    """The layer, with a step that takes its inputs behind the MLP."""
    if inputs is None:
        return layer
    (mlp, *_) = layer.feed_forwards
    assert isinstance(mlp, MlpSpec)
    gate = Part("per_layer_input_gate", inputs.size)
    out = Part("per_layer_projection", sizes.hidden)
    gated = MlpSpec(
        LinearSpec("layer_gate", sizes.hidden, (gate,), "column"),
        LinearSpec("layer_out", inputs.size, (out,), "row"),
        mlp.activation,
        is_gated=False,
        takes_inputs=True,
    )
    norm = NormSpec("post_per_layer_input_norm", sizes.hidden, sizes.epsilon)
    return LayerSpec((*layer.steps, StepSpec((gated,), None, norm)))


def _with_experts(
    fields: Fields, sizes: family.ModelSizes, layers: list[LayerSpec]
) -> list[LayerSpec]:
    """Return layers with experts beside each MLP. Both read the stream through a norm of their own,
    the router through a third one, and a norm lies behind each of both."""
    moe, hidden = _read_experts(fields, sizes), sizes.hidden
    behind_mlp, before, behind = (
        NormSpec(f"{name}_feedforward_layernorm_{number}", hidden, sizes.epsilon)
        for name, number in (("post", 1), ("pre", 2), ("post", 2))
    )
    own = BranchNorms(post=behind_mlp), BranchNorms(before, behind)
    found = []
    for layer in layers:
        *others, feed = layer.steps
        (mlp,) = feed.branches
        activation = mlp.activation if isinstance(mlp, MlpSpec) else "relu"
        if activation not in ("silu", "gelu_tanh"):
            fields.refuse("hidden_activation must be silu or gelu_tanh with experts")
            return layers
        beside = replace(moe, activation=activation)
        found.append(LayerSpec((*others, replace(feed, branches=(mlp, beside), own=own))))
    return found


def _read_experts(fields: Fields, sizes: family.ModelSizes) -> MoeSpec:
    count, top_k, size = (
        fields.positive(key) for key in ("num_experts", "top_k_experts", "moe_intermediate_size")
    )
    if top_k > count:
        fields.refuse(f"top_k_experts is {top_k}, but there are {count} experts")
    moe = experts.moe(sizes.hidden, size, (count, top_k), _GEMMA4_EXPERTS, "softmax_top_k_normed")
    root = sizes.hidden**-0.5
    norm = NormSpec("router", sizes.hidden, sizes.epsilon, factor=root, name="scale")
    return replace(
        moe,
        wide_weights=True,
        router_norm=norm,
        scales="router.per_expert_scale",
    )


def _with_scalar(layer: LayerSpec) -> LayerSpec:
    """The layer, whose last sum is multiplied with a number of its own."""
    *others, last = layer.steps
    return LayerSpec((*others, replace(last, scalar=_LAYER_SCALAR)))
