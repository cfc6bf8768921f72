"""A family of models, and the parts that most readers are made of. Pure.

The parts follow Llama: q, k, v, o, gate, up and down under the names that PEFT knows, RMS norms,
rotary embedding. A family says what differs.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import msgspec

from loraplex.adapters.base import UNGROUPED, Groups, Span
from loraplex.server.model.families.fields import Fields
from loraplex.server.model.spec.linear_spec import LinearSpec, Part
from loraplex.server.model.spec.model_spec import (
    Activation,
    AttentionSpec,
    EmbeddingSpec,
    FeedForward,
    HeadSpec,
    LayerSpec,
    Mixer,
    MlpSpec,
    ModelSpec,
    NormSpec,
    RopeSpec,
    StepSpec,
    layer_path,
)

# By transformers' names of it.
_ACTIVATIONS: dict[str, Activation] = {
    "silu": "silu",
    "swish": "silu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu_accurate": "gelu_tanh",
    "gelu_python_tanh": "gelu_tanh",
    "gelu": "gelu",
    "gelu_python": "gelu",
    "quick_gelu": "quick_gelu",
    "relu": "relu",
    "relu2": "relu2",
    "tanh": "tanh",
}
# Of a layer, before attention and before the MLP.
LLAMA_NORMS = ("input_layernorm", "post_attention_layernorm")
# Kinds of layers in `layer_types`: those that attend to all tokens, and those with a window.
FULL, WINDOWED = "full_attention", "sliding_attention"
# Tokens of a context where `config.json` says nothing, as transformers has it for each type.
_POSITIONS: dict[int, tuple[str, ...]] = {
    1024: ("gpt2", "gpt_bigcode"),
    2048: (
        "deepseek_v2",
        *("dots1", "exaone4", "exaone_moe", "granite", "granitemoe", "granitemoehybrid"),
        *("granitemoeshared", "hunyuan_v1_dense", "hunyuan_v1_moe", "llama", "olmo", "olmo2"),
        *("olmo3", "phi", "codegen", "falcon", "gpt_neox", "gptj"),
        *("bloom", "dbrx", "gpt_neo", "mpt", "opt"),
    ),
    128000: ("lfm2", "lfm2_moe"),
    4096: (
        *("deepseek_v3", "kimi_k2"),
        *("arcee", "exaone", "flex_olmo", "helium", "nemotron", "olmoe", "phi3"),
        *("nemotron_h", "stablelm", "starcoder2"),
    ),
    8192: ("cohere", "cohere2", "falcon_h1", "gemma", "gemma2", "vaultgemma"),
    32768: (
        *("internlm3", "minicpm3", "qwen2", "qwen2_moe", "qwen3", "qwen3_5_moe_text"),
        *("qwen3_5_text", "qwen3_moe", "qwen3_next", "smollm3"),
    ),
    16384: ("afmoe", "persimmon"),
    65536: ("apertus", "olmo_hybrid"),
    131072: (
        *("cwm", "ernie4_5", "ernie4_5_moe", "gemma3_text", "glm", "glm4", "glm4_moe", "gpt_oss"),
        *("gemma4_text", "ministral", "mistral", "mixtral", "phimoe", "youtu"),
    ),
    196608: ("minimax_m2",),
    202752: ("glm4_moe_lite",),
    262144: ("mamba2", "bamba", "gemma4_unified_text", "ministral3"),
    524288: ("seed_oss",),
    1048576: ("mistral4",),
}
_MOST_LAYERS = 4096
_EXTRA_LAYERS = "num_nextn_predict_layers"

Reader = Callable[[Fields], ModelSpec]


class Family(NamedTuple):
    """Family of models, and how its configuration is read. architecture: the class that
    `config.json` names. read: makes a ModelSpec of `config.json`; what is malformed or unsupported
    it refuses (`Fields.refuse`). quantised: the `quant_method` of weights that are read. others:
    further classes that `config.json` may name.
    """

    architecture: str
    read: Reader
    quantised: str | None = None
    others: tuple[str, ...] = ()

    @property
    def names(self) -> tuple[str, ...]:
        """Classes that `config.json` may name, the usual one first."""
        return self.architecture, *self.others


class Biases(NamedTuple):
    """Matrices that have a bias."""

    qkv: bool = False
    o: bool = False
    mlp: bool = False


NO_BIASES = Biases()


class NormPlaces(NamedTuple):
    """Norms of a layer of two steps. pre_*: of what attention and MLP read. post_*: of what they
    give, before the residual sum. None = read, or summed, as it is."""

    pre_attention: NormSpec | None
    pre_mlp: NormSpec | None
    post_attention: NormSpec | None = None
    post_mlp: NormSpec | None = None


class LayerNames(NamedTuple):
    """Names of a layer's modules. qkv: one, or three. up: of the MLP's first matrix, gate and up or
    both as one. norms: before attention and before the MLP.
    """

    qkv: tuple[str, ...]
    o: str
    up: tuple[str, ...]
    down: str
    norms: tuple[str, str] = LLAMA_NORMS


class ModelSizes(NamedTuple):
    """Sizes that most configurations have. positions: tokens of a context before any scaling.
    activation: of MLPs.

    is_sound: False where something is malformed; then the rest means nothing.
    """

    vocab: int
    hidden: int
    inner: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    positions: int
    epsilon: float
    is_sound: bool
    activation: Activation = "silu"


def read_sizes(
    fields: Fields,
    *,
    kv_heads: int | None = None,
    head_dim: int | None = None,
    epsilon: float = 1e-6,
    epsilon_key: str = "rms_norm_eps",
    activation: str | None = "silu",
) -> ModelSizes:
    """Read the sizes of a model. kv_heads, head_dim, epsilon, activation: where `config.json` says
    nothing; None = as many as heads, `hidden / heads`, and an activation that the family reads.
    Attention that is neither to earlier tokens nor to all is refused.
    """
    refuse_other_attention(fields)
    own = Fields(fields.config)
    vocab, hidden, inner, layers, heads = (
        own.positive(key)
        for key in (
            "vocab_size",
            "hidden_size",
            "intermediate_size",
            "num_hidden_layers",
            "num_attention_heads",
        )
    )
    usual = next((n for n, of in _POSITIONS.items() if fields.config.get("model_type") in of), None)
    positions = own.positive("max_position_embeddings", usual)
    kv_heads = own.positive("num_key_value_heads", kv_heads or heads)
    head_dim = own.positive("head_dim", head_dim or max(hidden // heads, 1))
    is_sound = not own.problems
    for problem in own.problems:
        fields.refuse(problem)
    if layers > _MOST_LAYERS:
        fields.refuse(f"num_hidden_layers must be at most {_MOST_LAYERS}, got {layers}")
        layers = 1
    if is_sound and heads % kv_heads:
        fields.refuse(f"{heads} attention heads do not divide among {kv_heads} key-value heads")
    if is_sound and head_dim % 2:
        fields.refuse(f"head_dim must be even, got {head_dim}")
    epsilon = fields.number(fields.config, epsilon_key, epsilon)
    numbers = (vocab, hidden, inner, layers, heads, kv_heads, head_dim, positions, epsilon)
    if activation is None:
        return ModelSizes(*numbers, is_sound)
    named = fields.config.get("hidden_act", activation)
    return ModelSizes(*numbers, is_sound, read_activation(fields, "hidden_act", named))


def refuse_other_attention(fields: Fields) -> None:
    """Refuse attention that is neither to earlier tokens nor to all."""
    config = fields.config
    if type(config.get("is_causal", True)) is not bool:
        fields.refuse(f"is_causal must be true or false, got {config['is_causal']!r}")
    if config.get("use_bidirectional_attention"):
        both = config["use_bidirectional_attention"]
        fields.refuse(f"use_bidirectional_attention must be false, got {both!r}")


def is_causal(fields: Fields) -> bool:
    return fields.config.get("is_causal") is not False


def read_activation(fields: Fields, key: str, value: object) -> Activation:
    """Reads the activation that `value` names. An unknown one is refused (`Fields.refuse`), and
    `silu` stands in.

    value: the key's, or the default where the key is absent.
    """
    activation = _ACTIVATIONS.get(str(value))
    if activation is None:
        fields.refuse(f"{key} must be one of {', '.join(_ACTIVATIONS)}, got {value!r}")
        return "silu"
    return activation


def read_eos(fields: Fields, sizes: ModelSizes, default: int | None) -> tuple[int, ...]:
    """Ids that end an answer. default: where `config.json` has no such key."""
    if not sizes.is_sound:
        return ()
    value = fields.config.get("eos_token_id", default)
    ids = value if isinstance(value, list) else [] if value is None else [value]
    if not all(type(i) is int and 0 <= i < sizes.vocab for i in ids):
        fields.refuse(f"eos_token_id must be ids below {sizes.vocab}, got {value!r}")
        return ()
    return tuple(dict.fromkeys(ids))


def read_windows(
    fields: Fields,
    sizes: ModelSizes,
    window: object,
    has_window: Callable[[int], bool] = lambda _: True,
) -> tuple[int | None, ...]:
    """The attention window of each layer, in tokens. window: of those that have one; None or 0 =
    none has. has_window: whether a layer has one, where `layer_types` says nothing."""
    full: tuple[int | None, ...] = (None,) * sizes.layers
    if not sizes.is_sound or window is None or (type(window) is int and window == 0):
        return full
    if not isinstance(window, int) or window <= 0:
        fields.refuse(f"sliding_window must be a positive integer, got {window!r}")
        return full
    windowed = read_windowed(fields, sizes, has_window)
    if not is_causal(fields):
        window += 1  # transformers means the largest distance
    return tuple(window if has else None for has in windowed)


def read_windowed(
    fields: Fields, sizes: ModelSizes, has_window: Callable[[int], bool]
) -> tuple[bool, ...]:
    """Whether each layer is of the kind with a window. has_window: as of `read_windows`."""
    kinds = fields.config.get("layer_types")
    usual = tuple(map(has_window, range(sizes.layers)))
    if kinds is None:
        return usual
    known = isinstance(kinds, list) and all(kind in (FULL, WINDOWED) for kind in kinds)
    if not known or len(kinds) != sizes.layers:
        fields.refuse(f"layer_types must say {FULL} or {WINDOWED} for each layer")
        return usual
    return tuple(kind == WINDOWED for kind in kinds)


def read_mixed_kinds(
    fields: Fields, sizes: ModelSizes, kinds: object, other: str, key: str = "layer_types"
) -> list[str]:
    """The kind of each layer, FULL or `other`, as `key` lists them. A model whose layers all are of
    the other kind is refused: it would have no keys and values."""
    known = isinstance(kinds, list) and all(kind in (other, FULL) for kind in kinds)
    if not isinstance(kinds, list) or not known or len(kinds) != sizes.layers:
        fields.refuse(f"{key} must say {other} or {FULL} for each layer")
        return [FULL]
    if FULL not in kinds:
        fields.refuse(f"{key}: a model without layers of {FULL} is not served")
    return list(kinds)


def attention_biases(fields: Fields) -> Biases:
    """Read one key for all matrices of attention."""
    bias = bool(fields.config.get("attention_bias", False))
    return Biases(qkv=bias, o=bias)


def attention(
    sizes: ModelSizes,
    rope: RopeSpec | None,
    window: int | None = None,
    biases: Biases = NO_BIASES,
    *,
    scale: float | None = None,
    softcap: float | None = None,
    qk_norm: bool = False,
) -> AttentionSpec:
    """Make the attention of a layer, with the usual names. scale: None = `head_dim ** -0.5`."""
    q_norm, k_norm = (
        NormSpec(f"self_attn.{name}_norm", sizes.head_dim, sizes.epsilon) if qk_norm else None
        for name in "qk"
    )
    hidden, head = sizes.hidden, sizes.head_dim
    q_size, kv_size = sizes.heads * head, sizes.kv_heads * head
    parts = tuple(
        Part(f"self_attn.{name}_proj", size, (Span(size, head),))
        for name, size in zip("qkv", (q_size, kv_size, kv_size), strict=True)
    )
    return AttentionSpec(
        qkv=LinearSpec("qkv", hidden, parts, "column", biases.qkv),
        o=LinearSpec("o", q_size, (Part("self_attn.o_proj", hidden),), "row", biases.o),
        num_heads=sizes.heads,
        num_kv_heads=sizes.kv_heads,
        head_dim=head,
        scale=head**-0.5 if scale is None else scale,
        rope=rope,
        window=window,
        softcap=softcap,
        q_norm=q_norm,
        k_norm=k_norm,
    )


def with_layer_norms(
    of: AttentionSpec,
    sizes: ModelSizes,
    name: str = "layernorm",
    *,
    own: bool = False,
    is_listed: bool = False,
) -> AttentionSpec:
    """Return the attention with LayerNorms of q and k, whose modules end so. own: each head has a
    weight of its own, and no bias, in place of both for all heads. is_listed: as of NormSpec.
    """
    q_norm, k_norm = (
        NormSpec(
            f"self_attn.{part}_{name}",
            sizes.head_dim,
            sizes.epsilon,
            kind="layer",
            bias=not own,
            heads=heads if own else 0,
            is_listed=is_listed,
        )
        for part, heads in (("q", sizes.heads), ("k", sizes.kv_heads))
    )
    return msgspec.structs.replace(of, q_norm=q_norm, k_norm=k_norm)


def alibi_slopes(heads: int) -> tuple[float, ...]:
    """ALiBi's slope of each head (arXiv 2108.12409): a geometric series down to 2^-8. Other numbers
    of heads than powers of two take of the next power's first every second one.
    """
    whole = 1 << (heads - 1).bit_length()
    each = [2.0 ** (-8.0 * n / whole) for n in range(1, whole + 1)]
    return tuple(each) if whole == heads else tuple([*each[1::2], *each[::2]][:heads])


def mlp(
    sizes: ModelSizes, biases: Biases = NO_BIASES, activation: Activation | None = None
) -> MlpSpec:
    """Make the MLP of a layer, with the usual names. activation: None = that of `sizes`."""
    hidden, inner = sizes.hidden, sizes.inner
    parts = tuple(Part(f"mlp.{name}_proj", inner) for name in ("gate", "up"))
    return MlpSpec(
        LinearSpec("gate_up", hidden, parts, "column", biases.mlp),
        LinearSpec("down", inner, (Part("mlp.down_proj", hidden),), "row", biases.mlp),
        activation or sizes.activation,
    )


def plain_mlp(sizes: ModelSizes, biases: Biases = NO_BIASES) -> MlpSpec:
    """Make an MLP without gate, with the usual names."""
    gated = mlp(sizes, biases)
    up = LinearSpec("up", sizes.hidden, gated.gate_up.parts[1:], "column", biases.mlp)
    return msgspec.structs.replace(gated, gate_up=up, is_gated=False)


def layer(
    sizes: ModelSizes,
    of: Mixer,
    feed_forward: FeedForward | None = None,
    norms: NormPlaces | None = None,
    factor: float = 1.0,
) -> LayerSpec:
    """Make a layer of two steps: attention or another mixer, then the MLP. feed_forward: None = an
    MLP without biases. norms: None = those of Llama, before each step. factor: of what each step
    adds."""
    norms = norms or llama_norms(sizes)
    feed_forward = feed_forward or mlp(sizes)
    return LayerSpec(
        (
            StepSpec((of,), norms.pre_attention, norms.post_attention, factor),
            StepSpec((feed_forward,), norms.pre_mlp, norms.post_mlp, factor),
        )
    )


def fused(linear: LinearSpec, path: str, groups: Groups = UNGROUPED) -> LinearSpec:
    """Return the matrix as one module, which the checkpoint and PEFT know whole. groups: how files
    hold its rows."""
    spans = tuple(span for part in linear.parts for span in linear.spans_of(part))
    return msgspec.structs.replace(linear, parts=(Part(path, linear.out_features, spans, groups),))


def with_paths(linear: LinearSpec, *paths: str, groups: Groups = UNGROUPED) -> LinearSpec:
    """Return the matrix with these names of its modules; one name fuses several. groups: how files
    hold the rows of such a module.
    """
    if len(paths) == 1 < len(linear.parts):
        return fused(linear, paths[0], groups)
    named = zip(linear.parts, paths, strict=True)
    parts = tuple(msgspec.structs.replace(part, path=path) for part, path in named)
    return msgspec.structs.replace(linear, parts=parts)


def renamed(
    of: AttentionSpec, mlp: MlpSpec, names: LayerNames, groups: Groups = UNGROUPED
) -> tuple[AttentionSpec, MlpSpec]:
    """Return attention and the MLP with these names of modules. groups: of the rows of q, k and v,
    where these are one module."""
    qkv = with_paths(of.qkv, *names.qkv, groups=groups)
    gate_up, down = with_paths(mlp.gate_up, *names.up), with_paths(mlp.down, names.down)
    of = msgspec.structs.replace(of, qkv=qkv, o=with_paths(of.o, names.o))
    return of, msgspec.structs.replace(mlp, gate_up=gate_up, down=down)


def with_norms(of: ModelSpec, norms: NormPlaces) -> ModelSpec:
    """Return the model, whose layers are of two steps, with these norms. That behind all layers
    becomes of the kind of the first.
    """
    layers, last = [], of.norm
    if norms.pre_attention is not None:
        last = msgspec.structs.replace(norms.pre_attention, path=of.norm.path)
    for each in of.layers:
        attend, feed = each.steps
        attend = msgspec.structs.replace(attend, pre=norms.pre_attention, post=norms.post_attention)
        feed = msgspec.structs.replace(feed, pre=norms.pre_mlp, post=norms.post_mlp)
        layers.append(LayerSpec((attend, feed)))
    return msgspec.structs.replace(of, layers=tuple(layers), norm=last)


def norm(path: str, sizes: ModelSizes) -> NormSpec:
    """Make a norm of the residual stream."""
    return NormSpec(path, sizes.hidden, sizes.epsilon)


def norms_behind(sizes: ModelSizes) -> NormPlaces:
    """Make norms behind attention and behind the MLP alone, as OLMo 2 has them."""
    names = "post_attention_layernorm", "post_feedforward_layernorm"
    return NormPlaces(None, None, *(norm(name, sizes) for name in names))


def llama_norms(sizes: ModelSizes) -> NormPlaces:
    return NormPlaces(*(norm(name, sizes) for name in LLAMA_NORMS))


def refuse_other_head_dim(fields: Fields, sizes: ModelSizes) -> None:
    """Refuses heads that together are not as wide as the residual stream."""
    if sizes.is_sound and sizes.heads * sizes.head_dim != sizes.hidden:
        fields.refuse("head_dim times num_attention_heads must be hidden_size")


def tied_where_unsaid(fields: Fields) -> Fields:
    """Fields whose head is the embedding's table, if no key, or null, leaves that open."""
    if fields.config.get("tie_word_embeddings") is not None:
        return fields
    return fields.changed(tie_word_embeddings=True)


def layer_norm(path: str, sizes: ModelSizes, *, bias: bool = True) -> NormSpec:
    """Make a LayerNorm of the residual stream."""
    return NormSpec(path, sizes.hidden, sizes.epsilon, kind="layer", bias=bias)


def layer_norms(
    sizes: ModelSizes, names: tuple[str, str] = LLAMA_NORMS, *, bias: bool = True
) -> NormPlaces:
    """Make LayerNorms before attention and before the MLP."""
    return NormPlaces(*(layer_norm(name, sizes, bias=bias) for name in names))


def ended(model: ModelSpec, layers: Sequence[LayerSpec]) -> ModelSpec:
    """Return the model with these layers. A norm of the last sum becomes that behind all layers."""
    *steps, last = layers[-1].steps
    if last.after is None:
        return msgspec.structs.replace(model, layers=tuple(layers))
    path = layer_path(len(layers) - 1, last.after.path)
    norm = msgspec.structs.replace(last.after, path=path)
    end = LayerSpec((*steps, msgspec.structs.replace(last, after=None)))
    return msgspec.structs.replace(model, layers=(*layers[:-1], end), norm=norm)


def model(
    fields: Fields,
    sizes: ModelSizes,
    layers: LayerSpec | Sequence[LayerSpec],
    max_context: int,
    *,
    eos: int | None = None,
    tied: bool = False,
    last: str = "model.norm",
    stored_names: tuple[tuple[str, str], ...] = (),
) -> ModelSpec:
    """Make the model from its layers, or from the one that all are. eos, tied: where `config.json`
    says nothing. last: path of the norm behind all layers, which is of the kind of the first.
    stored_names: as of ModelSpec.
    """
    config = fields.config
    ids = read_eos(fields, sizes, eos)
    made = (layers,) * sizes.layers if isinstance(layers, LayerSpec) else tuple(layers)
    first = made[0].steps[0].pre or norm("", sizes)
    head = LinearSpec("lm_head", sizes.hidden, (Part("lm_head", sizes.vocab),), "column")
    return ModelSpec(
        family=config["model_type"],
        embedding=EmbeddingSpec("model.embed_tokens", sizes.vocab, sizes.hidden),
        layers=made,
        norm=msgspec.structs.replace(first, path=last),
        head=HeadSpec(head, tied=bool(config.get("tie_word_embeddings", tied))),
        max_context=max_context,
        eos_token_ids=ids,
        dtype=str(config.get("dtype") or config.get("torch_dtype") or "float32"),
        is_causal=is_causal(fields),
        extra_layers=fields.positive(_EXTRA_LAYERS) if config.get(_EXTRA_LAYERS) else 0,
        stored_names=stored_names,
    )
