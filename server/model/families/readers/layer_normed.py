"""Known attention between LayerNorms: Phi 1 and 2, StarCoder 2, StableLM and Cohere. Pure."""

from collections.abc import Sequence

from msgspec.structs import replace

from loraplex.server.model.families import family
from loraplex.server.model.families.fields import Fields
from loraplex.server.model.families.rope import RopeRules, read_rope
from loraplex.server.model.spec.model_spec import LayerSpec, ModelSpec, StepSpec

_PHI_EOS, _STARCODER_EOS, _STABLELM_EOS, _COHERE_EOS = 2, 50256, 0, 255001
_ALL = family.Biases(qkv=True, o=True, mlp=True)
_PHI_NAMES = family.LayerNames(
    tuple(f"self_attn.{name}_proj" for name in "qkv"), "self_attn.dense", ("mlp.fc1",), "mlp.fc2"
)
_STARCODER_NAMES = _PHI_NAMES._replace(o="self_attn.o_proj", up=("mlp.c_fc",), down="mlp.c_proj")
_COHERE_WINDOW, _COHERE_PATTERN = 4096, 4
_COHERE2 = RopeRules(interleaved=True)


def read_phi(fields: Fields) -> ModelSpec:
    """Phi 1 to 2: attention and an MLP without gate read one LayerNorm; the head has a bias."""
    sizes = family.read_sizes(
        fields, epsilon=1e-5, epsilon_key="layer_norm_eps", activation="gelu_new"
    )
    rope, max_context = read_rope(fields, sizes, RopeRules(partial=0.5))
    of = family.attention(sizes, rope, biases=_ALL)
    if fields.config.get("qk_layernorm", False):
        of = family.with_layer_norms(of, sizes)
    branches = family.renamed(of, family.plain_mlp(sizes, _ALL), _PHI_NAMES)
    layer = LayerSpec((StepSpec(branches, family.layer_norm("input_layernorm", sizes)),))
    last = "model.final_layernorm"
    model = family.model(fields, sizes, layer, max_context, eos=_PHI_EOS, last=last)
    return replace(model, head=replace(model.head, linear=replace(model.head.linear, bias=True)))


def read_starcoder2(fields: Fields) -> ModelSpec:
    """StarCoder 2: an MLP without gate; every matrix has a bias, or none."""
    config = fields.config
    fields.only("layer_types", None)
    sizes = family.read_sizes(
        fields,
        kv_heads=2,
        epsilon=1e-5,
        epsilon_key="norm_epsilon",
        activation="gelu_pytorch_tanh",
    )
    rope, max_context = read_rope(fields, sizes)
    bias = bool(config.get("use_bias", True))
    biases = family.Biases(qkv=bias, o=bias, mlp=bias)
    mlp = family.plain_mlp(sizes, biases)
    layers = []
    for window in family.read_windows(fields, sizes, config.get("sliding_window")):
        of = family.attention(sizes, rope, window, biases)
        branches = family.renamed(of, mlp, _STARCODER_NAMES)
        layers.append(family.layer(sizes, *branches, family.layer_norms(sizes)))
    fields = family.tied_where_unsaid(fields)
    return family.model(fields, sizes, layers, max_context, eos=_STARCODER_EOS)


def read_stablelm(fields: Fields) -> ModelSpec:
    """StableLM 2 and 3B: a quarter of each head turns; some have attention and MLP in one step."""
    config = fields.config
    sizes = family.read_sizes(fields, kv_heads=32, epsilon=1e-5, epsilon_key="layer_norm_eps")
    family.refuse_other_head_dim(fields, sizes)
    rope, max_context = read_rope(fields, sizes, RopeRules(partial=0.25))
    biases = family.Biases(qkv=bool(config.get("use_qkv_bias", False)))
    of = family.attention(sizes, rope, biases=biases)
    if config.get("qk_layernorm", False):
        of = family.with_layer_norms(of, sizes, own=True, is_listed=True)
    layer = family.layer(sizes, of, norms=family.layer_norms(sizes))
    if config.get("use_parallel_residual", False):
        layer = LayerSpec((StepSpec((of, family.mlp(sizes)), layer.steps[0].pre),))
    return family.model(fields, sizes, layer, max_context, eos=_STABLELM_EOS)


def read_cohere(fields: Fields) -> ModelSpec:
    """Command R: attention and MLP in one step; neighbouring features turn together."""
    sizes = _read_cohere_sizes(fields)
    windows = (None,) * sizes.layers
    norms_heads = bool(fields.config.get("use_qk_norm", False))
    rules = RopeRules(theta=5e5, interleaved=True)
    return _cohere(fields, sizes, windows, rules, norms_heads=norms_heads)


def read_cohere2(fields: Fields) -> ModelSpec:
    """Command R7B and A: as Command R. Layers without a window have no rotation."""
    config = fields.config
    sizes = _read_cohere_sizes(fields)
    family.refuse_other_head_dim(fields, sizes)
    pattern = fields.positive("sliding_window_pattern", _COHERE_PATTERN)
    window = config.get("sliding_window", _COHERE_WINDOW)
    windows = family.read_windows(fields, sizes, window, lambda n: (n + 1) % pattern != 0)
    return _cohere(fields, sizes, windows, _COHERE2, turns_windowed=True)


def _read_cohere_sizes(fields: Fields) -> family.ModelSizes:
    return family.read_sizes(fields, epsilon=1e-5, epsilon_key="layer_norm_eps")


def _cohere(
    fields: Fields,
    sizes: family.ModelSizes,
    windows: Sequence[int | None],
    rules: RopeRules,
    *,
    turns_windowed: bool = False,
    norms_heads: bool = False,
) -> ModelSpec:
    """Make a model of parallel layers. turns_windowed: layers with a window alone turn.
    norms_heads: q and k have LayerNorms."""
    rope, max_context = read_rope(fields, sizes, rules)
    biases = family.attention_biases(fields)
    norm = family.layer_norm("input_layernorm", sizes, bias=False)
    layers = []
    for window in windows:
        own = None if turns_windowed and window is None else rope
        of = family.attention(sizes, own, window, biases)
        if norms_heads:
            of = family.with_layer_norms(of, sizes, "norm", own=True)
        layers.append(LayerSpec((StepSpec((of, family.mlp(sizes)), norm),)))
    fields = family.tied_where_unsaid(fields)
    scale = fields.number(fields.config, "logit_scale", 0.0625)
    model = family.model(fields, sizes, layers, max_context, eos=_COHERE_EOS)
    return replace(model, head=replace(model.head, scale=scale))
