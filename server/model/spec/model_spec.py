"""ModelSpec: one value that says all that a base model computes. Pure.

From it come the tensors to load, the modules that adapters may change, the sites, the sizes of
memory, and the products to time at start. A family (`loraplex.server.model.families`) reads it from
`config.json`.
"""

from collections.abc import Callable, Iterator
from itertools import chain
from typing import TYPE_CHECKING, Literal, NamedTuple

import msgspec

from loraplex.adapters.base import BEFORE, ON_SUM, OWN_FEEDS
from loraplex.adapters.base import layer_path as layer_path
from loraplex.adapters.classes import HEAD_OF_CLASSES, ClassForm
from loraplex.server.model.quantisation.quantisation import Quantisation
from loraplex.server.model.spec.distance_spec import DistanceBias as DistanceBias
from loraplex.server.model.spec.distance_spec import DistanceVectors as DistanceVectors
from loraplex.server.model.spec.embedding_spec import EmbeddingSpec as EmbeddingSpec
from loraplex.server.model.spec.embedding_spec import LayerInputs as LayerInputs
from loraplex.server.model.spec.embedding_spec import PositionTable as PositionTable
from loraplex.server.model.spec.linear_spec import LinearSpec, Matrix, Tensors, tensors_of
from loraplex.server.model.spec.moe_spec import FeedForwardSpec, MoeSpec
from loraplex.server.model.spec.norm_spec import NormSpec as NormSpec
from loraplex.server.model.spec.rope_spec import PositionScale as PositionScale
from loraplex.server.model.spec.rope_spec import RopeKind as RopeKind
from loraplex.server.model.spec.rope_spec import RopeSpec as RopeSpec
from loraplex.server.model.spec.state_spec import StateForm, StateSpec
from loraplex.server.protocol import Pooling

if TYPE_CHECKING:
    from loraplex.server.model.spec.picture_spec import PictureSpec  # made of a ModelSpec

Activation = Literal["silu", "gelu_tanh", "gelu", "relu", "relu2", "xielu", "tanh", "quick_gelu"]
# Activations that an operation behind the product of gate and up computes with LoRA of it.
FUSED_ACTIVATIONS: tuple[Activation, ...] = ("silu", "gelu_tanh")


# The tensor of a layer's sinks.
SINKS = "self_attn.sinks"


class AttentionSpec(msgspec.Struct, frozen=True):
    """Attention between the products `qkv` and `o`. scale: of `q k^T`. rope: None = positions do
    not turn q and k. window: a token sees that many latest tokens, itself included; None = all.
    softcap: scores become `softcap * tanh(score / softcap)`. q_norm, k_norm: before the rotation,
    over each head or, where their size says so, all heads together; both or none; LayerNorms are
    over each head, before the rotation. q_scale: of rotated q. norms_rotated: these norms come
    behind the rotation. sinks: each head has a further score beside those of the tokens, which
    gives no value. is_gated: q's module has for each head the query, then a gate, whose sigmoid the
    head's result is multiplied with. gate: a module of such gates, for each feature of the heads;
    None = none. norms_values: each value has a norm as each key, without a weight. keys_are_values:
    `qkv` has no v; values are keys before their norm. keys_of: the number of an earlier layer,
    whose keys and values this one reads: `qkv` is q alone, and `k_norm` None; None = its own.
    distances: makes queries and keys of `ModelSpec.distances`, None = q and k of `qkv` do. clip:
    bounds of q, k and v as the product gives them; 0 = none. slopes: ALiBi's, as of `ScoreRule`,
    one a head, beside no sinks; () = none. joins_pictures: tokens of a picture see all of its
    tokens, but those that left the window."""

    qkv: LinearSpec
    o: LinearSpec
    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    rope: RopeSpec | None
    window: int | None = None
    softcap: float | None = None
    q_norm: NormSpec | None = None
    k_norm: NormSpec | None = None
    q_scale: PositionScale | None = None
    sinks: bool = False
    norms_rotated: bool = False
    is_gated: bool = False
    gate: LinearSpec | None = None
    norms_values: bool = False
    keys_are_values: bool = False
    keys_of: int | None = None
    clip: float = 0.0
    slopes: tuple[float, ...] = ()
    distances: LinearSpec | None = None
    joins_pictures: bool = False

    @property
    def parts(self) -> int:
        """Parts of `qkv`: 3 = q, k and v; 2 = q and k; 1 = q."""
        return 1 if self.keys_of is not None else 3 - self.keys_are_values

    @property
    def q_size(self) -> int:
        """Features of what all heads give."""
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        """Features of a token's keys, half of what the cache keeps of the token."""
        return self.num_kv_heads * self.head_dim

    @property
    def qk_epsilon(self) -> float:
        """Epsilon of the norms of q and k; 0 without them."""
        return 0.0 if self.q_norm is None else self.q_norm.epsilon

    @property
    def has_layer_norms(self) -> bool:
        """Whether the norms of q and k are LayerNorms."""
        return self.q_norm is not None and self.q_norm.kind == "layer"

    @property
    def norms_all_heads(self) -> bool:
        """Whether the norms of q and k are over all heads together."""
        return self.q_norm is not None and self.q_norm.size != self.head_dim

    @property
    def linears(self) -> tuple[LinearSpec, ...]:
        """Products that adapters may change, in the order of their sites."""
        others = (each for each in (self.gate, self.distances) if each is not None)
        return self.qkv, *others, self.o

    @property
    def inner_norms(self) -> tuple[NormSpec, ...]:
        """Norms between the products."""
        return tuple(norm for norm in (self.q_norm, self.k_norm) if norm is not None)

    @property
    def free_norms(self) -> tuple[NormSpec | None, NormSpec | None]:
        """The norms of q and of k, where keys are not read as values, too."""
        return (None, None) if self.keys_are_values else (self.q_norm, self.k_norm)

    def tensors(self) -> Tensors:
        """Names, relative to the layer, and shapes of what the checkpoint holds."""
        yield from tensors_of(*self.linears, *self.inner_norms)
        if self.sinks:
            yield SINKS, (self.num_heads,)


# Tensors of xIELU (arXiv 2411.13010), by their names and shapes.
XIELU = "mlp.act_fn"
XIELU_TENSORS: dict[str, tuple[int, ...]] = {
    "alpha_p": (1,),
    "alpha_n": (1,),
    "beta": (),
    "eps": (),
}


class MlpSpec(FeedForwardSpec, frozen=True):
    """`down(activation(gate) * up)`. is_gated: False = `down(activation(up))`, where `gate_up` has
    no gate. Only then the activation may be `xielu`, which has tensors of its own. out_gate: a
    product with one output, whose sigmoid the result is multiplied with; None = none. gate_factor:
    of the gate, before the activation. takes_inputs: without gate, the activation is multiplied
    with what `LayerInputs` gives the layer."""

    activation: Activation = "silu"
    is_gated: bool = True
    out_gate: LinearSpec | None = None
    gate_factor: float = 1.0
    takes_inputs: bool = False

    @property
    def chooser(self) -> LinearSpec | None:
        return self.out_gate

    def tensors(self) -> Tensors:
        """Names, relative to the layer, and shapes of what the checkpoint holds."""
        yield from FeedForwardSpec.tensors(self)
        if self.activation == "xielu":
            yield from ((f"{XIELU}.{name}", shape) for name, shape in XIELU_TENSORS.items())


FeedForward = MlpSpec | MoeSpec
Mixer = AttentionSpec | StateSpec
Branch = Mixer | FeedForward


class BranchNorms(NamedTuple):
    """Norms of one branch. pre: of the stream, which the branch reads in place of what the step
    reads. post: of what the branch gives, before the step's sum. None = none."""

    pre: NormSpec | None = None
    post: NormSpec | None = None


class StepSpec(msgspec.Struct, frozen=True):
    """A part of a layer that ends with a residual sum: `x + factor * post(sum of branches)`. Every
    branch reads `pre(x)`. pre, post: None = read, or summed, as it is. At most one branch mixes
    tokens. own: norms of each branch, in their order; () = none has some. Where a branch has a norm
    behind it, all have one, and none mixes tokens.
    scalar: a stored number that the sum is multiplied with; "" = none.
    reads_last: its branches read what those of the step before read, and `pre` is None.
    after: a norm of the residual sum, whose result is the stream from there on; None = none.
    """

    branches: tuple[Branch, ...]
    pre: NormSpec | None
    post: NormSpec | None = None
    factor: float = 1.0
    own: tuple[BranchNorms, ...] = ()
    scalar: str = ""
    reads_last: bool = False
    after: NormSpec | None = None

    @property
    def attention(self) -> AttentionSpec | None:
        """Its attention, which may mix tokens."""
        found = (branch for branch in self.branches if isinstance(branch, AttentionSpec))
        return next(found, None)

    def of_feed(self, number: int) -> BranchNorms:
        """Norms that a feed-forward has alone. number: among the step's."""
        of_each = zip(self.branches, self.own, strict=False)
        found = [norms for branch, norms in of_each if isinstance(branch, FeedForwardSpec)]
        return found[number] if number < len(found) else BranchNorms()

    @property
    def other_norms(self) -> tuple[NormSpec, ...]:
        """The norms but `pre`: those of the sum, before and behind it, and those of branches."""
        norms = (self.post, self.after, *chain.from_iterable(self.own))
        return tuple(norm for norm in norms if norm is not None)


class LayerSpec(msgspec.Struct, frozen=True):
    """One layer: its steps in order. Paths are relative to the layer."""

    steps: tuple[StepSpec, ...]

    @property
    def branches(self) -> tuple[Branch, ...]:
        return tuple(chain.from_iterable(step.branches for step in self.steps))

    @property
    def attention(self) -> AttentionSpec:
        """The attention of a layer that has one."""
        return next(branch for branch in self.branches if isinstance(branch, AttentionSpec))

    @property
    def states(self) -> tuple[StateForm, ...]:
        """Tensors that a sequence keeps in the layer beside keys and values."""
        of_each = (each.states for each in self.branches if isinstance(each, StateSpec))
        return tuple(chain.from_iterable(of_each))

    @property
    def state_inputs(self) -> tuple[int, ...]:
        """Features of each product that the layer's states take."""
        of_each = (each.linears[:-1] for each in self.branches if isinstance(each, StateSpec))
        return tuple(linear.out_features for linear in chain.from_iterable(of_each))

    @property
    def feed_forwards(self) -> tuple[FeedForward, ...]:
        return tuple(each for each in self.branches if isinstance(each, FeedForwardSpec))

    @property
    def linears(self) -> tuple[LinearSpec, ...]:
        """Products that adapters may change, in the order of their sites."""
        return tuple(chain.from_iterable(branch.linears for branch in self.branches))

    def tensors(self) -> Tensors:
        """Names, relative to the layer, and shapes of what the checkpoint holds."""
        for step in self.steps:
            yield from tensors_of(*step.branches, step.pre, *step.other_norms)
            if step.scalar:
                yield step.scalar, (1,)

    def mapped(self, change: Callable[[Branch], Branch]) -> "LayerSpec":
        """The layer with every branch changed."""
        steps = (
            msgspec.structs.replace(step, branches=tuple(map(change, step.branches)))
            for step in self.steps
        )
        return LayerSpec(tuple(steps))


class ScoreSpec(msgspec.Struct, frozen=True):
    """A score head: `out(norm(activation(dense(x))))` of what `pooling` makes of a text's tokens;
    of all tokens each has scores. path, bias: of out. activation: None = there is no dense. norm:
    None = none."""

    path: str = HEAD_OF_CLASSES
    bias: bool = False
    pooling: Pooling = "last"
    dense: LinearSpec | None = None
    activation: Activation | None = None
    norm: NormSpec | None = None

    def tensors(self, labels: int, hidden: int) -> Tensors:
        """Names and shapes of what the checkpoint holds, the weight of the labels first."""
        yield f"{self.path}.weight", (labels, hidden)
        if self.bias:
            yield f"{self.path}.bias", (labels,)
        yield from self.inner_tensors()

    def inner_tensors(self) -> Tensors:
        """List tensors of the parts before the labels."""
        return tensors_of(self.dense, self.norm)


class HeadSpec(msgspec.Struct, frozen=True):
    """Head of a model, from the last norm to logits: the product times `scale`, then `softcap *
    tanh(x / softcap)`. tied: its matrix is the embedding's. is_normed: each row of the stored
    matrix is divided by its length.
    """

    linear: LinearSpec
    tied: bool
    scale: float = 1.0
    softcap: float | None = None
    is_normed: bool = False

    @property
    def tensor(self) -> str:
        return f"{self.linear.parts[0].path}.weight"

    @property
    def linears(self) -> tuple[LinearSpec, ...]:
        return (self.linear,)

    def tensors(self) -> Tensors:
        """Names and shapes of what the checkpoint holds."""
        yield from tensors_of(*self.linears)


class ModelSpec(msgspec.Struct, frozen=True):
    """A decoder. dtype: as the checkpoint names that of its weights.

    extra_layers: stored beyond the last, to predict further tokens; they are not computed.
    is_text_part: of a larger model, whose checkpoint holds other parts, too.
    quantisation: of the matrices that the checkpoint does not hold in floating point; None = of
    none.
    writes: whether it has a head for text. Without one that of its embedding stands in its place,
    and nobody asks it for a token. classes: of a classifier. pad_token_id: see `ClassForm`.
    stored_names: patterns in tensors' names, as checkpoints may have them, and what `tensors` has
    in their place, one after the other.
    is_causal: whether tokens see none behind them. Else a window is the least distance of a token
    that is not seen, and nothing keeps keys and values.
    scores: score heads that the model or an adapter may have, the usual one first. unread: pattern
    of names of tensors that a checkpoint may hold, whose result nobody asks for. unread_modules:
    such modules that some version of transformers makes, too. biases: None = scores have none.
    distances: None = scores are of tokens alone.
    output: a product with the normed stream, which score heads, the head for text and vectors are
    made of; None = they are made of the stream.
    pictures: how it reads pictures; None = it reads none.
    Raises ValueError where layers differ in what all must share: the modules of each role.
    """

    family: str
    embedding: EmbeddingSpec
    layers: tuple[LayerSpec, ...]
    norm: NormSpec
    head: HeadSpec
    max_context: int
    eos_token_ids: tuple[int, ...]
    dtype: str
    extra_layers: int = 0
    is_text_part: bool = False
    quantisation: Quantisation | None = None
    writes: bool = True
    classes: ClassForm | None = None
    pad_token_id: int | None = None
    stored_names: tuple[tuple[str, str], ...] = ()
    is_causal: bool = True
    scores: tuple[ScoreSpec, ...] = (ScoreSpec(),)
    unread: str = ""
    unread_modules: tuple[str, ...] = ()
    biases: DistanceBias | None = None
    output: LinearSpec | None = None
    distances: DistanceVectors | None = None
    pictures: "PictureSpec | None" = None

    def __post_init__(self) -> None:
        linears = {linear for layer in set(self.layers) for linear in layer.linears}
        is_empty = self.writes and not linears
        if is_empty or len(linears) != len({linear.role for linear in linears}):
            raise ValueError("every layer must have the same modules, and one must exist")
        if len(self._switches) > 1:
            raise ValueError("long factors must begin at the same length in every layer")

    def within(self, max_context: int) -> "ModelSpec":
        """Return the model for contexts of at most so many tokens: a window that no position can
        leave is no window, and factors that no sequence reaches are none.
        """
        return self.mapped(lambda branch: _within(branch, max_context))

    def mapped(self, change: Callable[[Branch], Branch]) -> "ModelSpec":
        """Return the model with every branch of its layers changed."""
        layers = tuple(layer.mapped(change) for layer in self.layers)
        return msgspec.structs.replace(self, layers=layers)

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    @property
    def is_decoder(self) -> bool:
        """Whether its score head is that of decoders."""
        return self.scores == (ScoreSpec(),)

    @property
    def kinds_within(self) -> int:
        """Number of first layers that have one of every kind."""
        return 1 + max(self.layers.index(layer) for layer in set(self.layers))

    @property
    def num_sites(self) -> int:
        """Products that adapters may change: those of layers, those beside, the embedding and the
        head."""
        return sum(len(layer.linears) for layer in self.layers) + len(self.beside) + 2

    @property
    def beside(self) -> tuple[LinearSpec, ...]:
        """Products outside the layers but the head's, in the order of a step."""
        inputs = self.embedding.inputs
        found = (self.embedding.projection, None if inputs is None else inputs.linear, self.output)
        return tuple(linear for linear in found if linear is not None)

    @property
    def placed_norms(self) -> tuple[NormSpec | None, ...]:
        """The norms at all places of weights (`norm_place`); None = none, or adapters may not
        change it."""
        behind_all = {BEFORE: self.norm, ON_SUM: self.embedding.norm}
        of_steps = zip(*map(_placed_norms, self.steps), strict=True)
        found = ((*of_each, behind_all.get(where)) for where, of_each in enumerate(of_steps))
        return tuple(norm if norm and norm.is_plain else None for norm in chain(*found))

    @property
    def steps(self) -> tuple[StepSpec, ...]:
        """Steps of all layers, in order."""
        return tuple(chain.from_iterable(layer.steps for layer in self.layers))

    @property
    def hidden_size(self) -> int:
        projection = self.embedding.projection
        return self.embedding.size if projection is None else projection.out_features

    @property
    def output_size(self) -> int:
        """Features of a token behind all layers."""
        return self.hidden_size if self.output is None else self.output.out_features

    def score(self, *, of_tokens: bool) -> ScoreSpec:
        """The score head of that kind; without one for tokens, the usual one."""
        if of_tokens and self.is_decoder:
            return ScoreSpec(bias=True, pooling="all")
        return next((s for s in self.scores if (s.pooling == "all") is of_tokens), self.scores[0])

    @property
    def own_score(self) -> ScoreSpec | None:
        """The score head of a classifier."""
        return None if self.classes is None else self.score(of_tokens=self.classes.of_tokens)

    @property
    def vocab_size(self) -> int:
        return self.embedding.vocab_size

    @property
    def attentions(self) -> dict[int, AttentionSpec]:
        """The attention of each layer that has one, by the layer's number."""
        return {
            number: branch
            for number, layer in enumerate(self.layers)
            for branch in layer.branches
            if isinstance(branch, AttentionSpec)
        }

    @property
    def states(self) -> dict[int, tuple[StateForm, ...]]:
        """Tensors of a sequence's state in each layer that has some, by the layer's number."""
        return {number: of.states for number, of in enumerate(self.layers) if of.states}

    @property
    def state_inputs(self) -> dict[int, tuple[int, ...]]:
        """Features of each product that states take, in each layer that has some."""
        return {number: of.state_inputs for number, of in enumerate(self.layers) if of.states}

    @property
    def windows(self) -> tuple[int | None, ...]:
        """The window of each layer that attends."""
        return tuple(attention.window for attention in self.attentions.values())

    @property
    def short_context(self) -> int | None:
        """Number of tokens up to which a sequence is short. Sequences of more tokens take the long
        factors of their rotation, for all their tokens; None = no sequence does.
        """
        return next(iter(self._switches), None)

    @property
    def _switches(self) -> set[int]:
        ropes = {attention.rope for attention in self.attentions.values()}
        return {rope.original_context for rope in ropes if rope is not None and rope.long_factors}

    def matrices(self) -> Iterator[Matrix]:
        """Matrices of layers, those beside, and that of the head where it is no table of the
        embedding's."""
        for index, layer in enumerate(self.layers):
            for linear in layer.linears:
                for matrix in linear.matrices():
                    yield matrix._replace(path=layer_path(index, matrix.path))
        for linear in self.beside:
            yield from linear.matrices()
        for linear in () if self.head.tied else self.head.linears:
            yield from linear.matrices()

    def tensors(self) -> dict[str, tuple[int, ...]]:
        """Every tensor that a checkpoint must hold in floating point, with its shape."""
        shapes: dict[str, tuple[int, ...]] = dict(self.embedding.tensors())
        shapes.update(tensors_of(self.norm, self.output, self.distances))
        if self.biases is not None:
            heads = self.layers[0].attention.num_heads
            shapes[self.biases.tensor] = self.biases.buckets, heads
        if not self.head.tied:
            shapes.update(self.head.tensors())
        if self.classes is not None and self.own_score is not None:
            shapes.update(self.own_score.tensors(len(self.classes.labels), self.output_size))
        for index, layer in enumerate(self.layers):
            shapes.update((layer_path(index, name), shape) for name, shape in layer.tensors())
        return shapes

    def optional_tensors(self) -> dict[str, tuple[int, ...]]:
        """List tensors, as `tensors` does, that a checkpoint may hold: those of score heads whose
        labels an adapter may bring.
        """
        return {name: shape for score in self.scores for name, shape in score.inner_tensors()}


def _placed_norms(step: StepSpec) -> tuple[NormSpec | None, ...]:
    """The norms of a step, in the order of `norm_place`."""
    attention = step.attention
    of_heads = (None, None) if attention is None else attention.free_norms
    of_feeds = chain.from_iterable(step.of_feed(number) for number in range(OWN_FEEDS))
    return (step.pre, step.after, step.post, *of_heads, *of_feeds)


def _within(branch: Branch, max_context: int) -> Branch:
    if not isinstance(branch, AttentionSpec):
        return branch
    rope = branch.rope
    if branch.window is not None and branch.window >= max_context:
        branch = msgspec.structs.replace(branch, window=None)
    if rope is not None and rope.long_factors and rope.original_context >= max_context:
        branch = msgspec.structs.replace(
            branch, rope=msgspec.structs.replace(rope, long_factors=())
        )
    return branch
