"""Llama's layers where some have windows, other rotations or none: Qwen 2 and 3, Mistral,
Ministral, CWM, Phi 3 and 4, SmolLM 3, EXAONE 4 and OLMo. Pure.
"""

from collections.abc import Sequence

from msgspec.structs import replace

from loraplex.server.model.families import family
from loraplex.server.model.families.family import Biases, ModelSizes, NormPlaces
from loraplex.server.model.families.fields import Fields
from loraplex.server.model.families.readers import llama
from loraplex.server.model.families.rope import (
    RopeRules,
    or_usual_table,
    original_context,
    read_rope,
    read_table,
    read_tables,
    rope_table,
)
from loraplex.server.model.spec.model_spec import (
    AttentionSpec,
    LayerSpec,
    ModelSpec,
    NormSpec,
    PositionScale,
)

# Of most families here: tokens of a window, where `config.json` says nothing.
_WINDOW = 4096
_BETA = "llama_4_scaling_beta"
_CWM = {
    "rope_type": "llama3",
    "rope_theta": 1e6,
    "factor": 16.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
_CWM_EOS = [128001, 128008, 128009]
# Ministral 3's, where `config.json` says nothing.
_YARN = {
    "rope_type": "yarn",
    "rope_theta": 1e6,
    "factor": 16.0,
    "original_max_position_embeddings": 16384,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    _BETA: 0.1,
}
# Phi 3's first configurations say "su", and transformers takes "yarn" for the same.
_PHI3 = RopeRules(
    partial=1.0,
    kinds={"default": "default", "longrope": "longrope", "su": "longrope", "yarn": "longrope"},
    original_context=4096,
)
_OLMO_EOS = 50279
_OLMO3 = RopeRules(theta=5e5)


def read_qwen2(fields: Fields) -> ModelSpec:
    """Qwen2 and Qwen2.5: q, k and v have a bias."""
    sizes = family.read_sizes(fields)
    windows = _last_windows(fields, sizes)
    return llama.assembled(fields, sizes, Biases(qkv=True), windows=windows, eos=None)


def read_qwen3(fields: Fields) -> ModelSpec:
    """Qwen3: q and k are normed in each head."""
    sizes = family.read_sizes(fields, head_dim=128)
    biases, windows = family.attention_biases(fields), _last_windows(fields, sizes)
    return llama.assembled(fields, sizes, biases, windows=windows, qk_norm=True, eos=None)


def _last_windows(fields: Fields, sizes: ModelSizes) -> tuple[int | None, ...]:
    """Each layer's window: of the last ones alone, and only with `use_sliding_window`."""
    first = fields.count("max_window_layers", 28)
    return family.read_windows(fields, sizes, asked_window(fields), lambda layer: layer >= first)


def asked_window(fields: Fields) -> object:
    """The window that `use_sliding_window` asks for; None = none."""
    asked = fields.config.get("use_sliding_window", False)
    return fields.config.get("sliding_window", _WINDOW) if asked else None


def read_mistral(fields: Fields) -> ModelSpec:
    """Mistral, and Ministral with windows in some layers."""
    sizes = family.read_sizes(fields, kv_heads=8)
    windows = family.read_windows(fields, sizes, fields.config.get("sliding_window", _WINDOW))
    return llama.assembled(fields, sizes, windows=windows)


def read_cwm(fields: Fields) -> ModelSpec:
    """Read CWM: windows in all layers but every fourth, from the first on."""
    fields.only("attention_bias", False)
    fields = or_usual_table(fields, _CWM)
    sizes = family.read_sizes(fields, kv_heads=8, head_dim=128, epsilon=1e-5)
    window = fields.config.get("sliding_window", 8192)
    windows = family.read_windows(fields, sizes, window, lambda layer: layer % 4 != 0)
    if fields.config.get("eos_token_id") is None:
        fields = fields.changed(eos_token_id=_CWM_EOS)
    biases = Biases(mlp=bool(fields.config.get("mlp_bias", False)))
    return llama.assembled(fields, sizes, biases, RopeRules(theta=1e6), windows=windows)


def read_ministral3(fields: Fields) -> ModelSpec:
    """Queries grow with their position."""
    fields.only("layer_types", None)
    if not rope_table(fields):
        fields = fields.changed(rope_parameters=_YARN)
    sizes = family.read_sizes(fields, kv_heads=8, head_dim=128, epsilon=1e-5)
    table = rope_table(fields)
    scale = PositionScale(fields.number(table, _BETA, None), original_context(fields, table, sizes))
    windows = family.read_windows(fields, sizes, fields.config.get("sliding_window"))
    return llama.with_attention(llama.assembled(fields, sizes, windows=windows), q_scale=scale)


def read_phi3(fields: Fields) -> ModelSpec:
    """Phi 3 and 4: q, k and v are one module, as gate and up are."""
    for key in ("attention_bias", "mlp_bias", "lm_head_bias"):
        fields.only(key, False)
    for key in ("full_attn_mod", "interpolate_factor"):
        fields.only(key, 1)
    fields.only("layer_types", None)
    sizes = family.read_sizes(fields, epsilon=1e-5)
    windows = family.read_windows(fields, sizes, fields.config.get("sliding_window"))
    model = llama.assembled(fields, sizes, rules=_PHI3, windows=windows, eos=32000)
    return llama.named(model, llama.PHI3_NAMES)


def read_smollm3(fields: Fields) -> ModelSpec:
    """SmolLM 3: positions turn nothing in every fourth layer."""
    config = fields.config
    sizes = family.read_sizes(fields, kv_heads=4)
    rope, max_context = read_rope(fields, sizes, RopeRules(theta=2e6))
    turns = _turning_layers(fields, sizes)
    window = config.get("sliding_window") if config.get("use_sliding_window") else None
    if window is None and family.WINDOWED in fields.listed("layer_types"):
        fields.refuse(f"layer_types: {family.WINDOWED} needs use_sliding_window and sliding_window")
    # Layers without rotation have a window, where `layer_types` says nothing.
    windows = family.read_windows(fields, sizes, window, lambda layer: not turns[layer])
    biases = llama.read_biases(fields)
    layers = [
        family.layer(
            sizes,
            family.attention(sizes, rope if turn else None, window, biases),
            family.mlp(sizes, biases),
        )
        for turn, window in zip(turns, windows, strict=True)
    ]
    return family.model(fields, sizes, layers, max_context, eos=128001, tied=True)


def _turning_layers(fields: Fields, sizes: ModelSizes) -> list[bool]:
    """Say for each layer whether it has a rotation. The list in `config.json` may be longer."""
    interval = fields.positive("no_rope_layer_interval", 4)
    usual = [(layer + 1) % interval != 0 for layer in range(sizes.layers)]
    said = fields.config.get("no_rope_layers")
    if said is None:
        return usual
    if not isinstance(said, list) or len(said) < len(usual) or not set(said) <= {0, 1}:
        fields.refuse("no_rope_layers must be 1, or 0 for a layer without rotation, for each layer")
        return usual
    return [bool(turn) for turn in said[: len(usual)]]


def read_exaone4(fields: Fields) -> ModelSpec:
    """EXAONE 4: norms behind attention and MLP alone."""
    sizes = family.read_sizes(fields, kv_heads=32, epsilon=1e-5)
    layers, max_context = read_exaone_layers(fields, sizes, family.norms_behind(sizes))
    return family.model(fields, sizes, layers, max_context, eos=2)


def read_exaone_layers(
    fields: Fields, sizes: ModelSizes, norms: NormPlaces
) -> tuple[list[LayerSpec], int]:
    """Read layers with windows but every fourth, or as `sliding_window_pattern` or `layer_types`
    say. Layers that see all tokens have no rotation where others have windows.
    """
    config = fields.config
    rope, max_context = read_rope(fields, sizes)
    window, pattern = config.get("sliding_window", _WINDOW), 1
    if window is not None and config.get("layer_types") is None:
        pattern = fields.positive("sliding_window_pattern", 4)
    windows = family.read_windows(fields, sizes, window, lambda layer: (layer + 1) % pattern != 0)
    layers = [
        family.layer(
            sizes,
            family.attention(sizes, rope if each or window is None else None, each, qk_norm=True),
            norms=norms,
        )
        for each in windows
    ]
    return layers, max_context


def read_olmo(fields: Fields) -> ModelSpec:
    """OLMo 1: LayerNorms without weights; q, k and v may be clipped."""
    said = fields.config.get("clip_qkv")
    clip = 0.0 if said is None else fields.number(fields.config, "clip_qkv", None)
    sizes = family.read_sizes(fields)._replace(epsilon=1e-5)
    norm = NormSpec("", sizes.hidden, sizes.epsilon, kind="layer", has_weight=False)
    model = llama.assembled(fields, sizes, family.attention_biases(fields), eos=_OLMO_EOS)
    model = llama.with_attention(model, clip=clip)
    return replace(family.with_norms(model, NormPlaces(norm, norm)), norm=norm)


def read_olmo2(fields: Fields) -> ModelSpec:
    """OLMo 2: norms behind attention and MLP alone, and of q and k over all heads."""
    sizes = _read_olmo_sizes(fields)
    rope, max_context = read_rope(fields, sizes)
    of = family.attention(sizes, rope, biases=family.attention_biases(fields))
    return _olmo(fields, sizes, [of] * sizes.layers, max_context)


def read_olmo3(fields: Fields) -> ModelSpec:
    """Windows in three of four layers, whose rotation is another than that of the fourth."""
    sizes = _read_olmo_sizes(fields)

    def has_window(layer: int) -> bool:
        return (layer + 1) % 4 > 0

    window = fields.config.get("sliding_window", _WINDOW)
    windows = family.read_windows(fields, sizes, window, has_window)
    full, windowed = read_tables(fields, _OLMO3.theta, _OLMO3.theta)
    if not fields.table(fields.config, "rope_parameters"):
        fields.only("rope_theta", _OLMO3.theta)  # transformers gives it to one kind of layer alone
    (rope, max_context), (windowed_rope, _) = (
        read_table(fields, table, sizes, _OLMO3) for table in (full, windowed)
    )
    biases = family.attention_biases(fields)
    attentions = [
        family.attention(sizes, windowed_rope if has else rope, each, biases)
        for has, each in zip(family.read_windowed(fields, sizes, has_window), windows, strict=True)
    ]
    return _olmo(fields, sizes, attentions, max_context)


def wide_norms(sizes: ModelSizes) -> dict[str, NormSpec]:
    """Norms of q and of k over all heads together, as fields of AttentionSpec."""
    return {
        f"{name}_norm": NormSpec(f"self_attn.{name}_norm", heads * sizes.head_dim, sizes.epsilon)
        for name, heads in (("q", sizes.heads), ("k", sizes.kv_heads))
    }


def _read_olmo_sizes(fields: Fields) -> ModelSizes:
    fields.only("clip_qkv", None)
    return family.read_sizes(fields, epsilon=1e-5)


def olmo_layer(sizes: ModelSizes, of: AttentionSpec) -> LayerSpec:
    """Make a layer whose attention and MLP have norms behind them, and whose q and k are normed
    over all heads together."""
    return family.layer(sizes, replace(of, **wide_norms(sizes)), norms=family.norms_behind(sizes))


def _olmo(
    fields: Fields, sizes: ModelSizes, attentions: Sequence[AttentionSpec], max_context: int
) -> ModelSpec:
    layers = [olmo_layer(sizes, of) for of in attentions]
    return family.model(fields, sizes, layers, max_context, eos=_OLMO_EOS)
