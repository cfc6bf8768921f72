"""The base model as an adapter sees it: which modules exist, their shapes, and how several devices
share them. Pure.

A *shard* is one device's part of the model. All shards have the same shapes. A shard has the rows
of neighbouring tokens of the base. *New ids* lie behind the base's tables. They are shared out
apart, as if there were as many as there may be. So an id's shard does not depend on the adapter. A
shard counts its tokens from 0 on, those of the base first.
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Literal, NamedTuple

import msgspec

from loraplex.adapters.classes import SCORE, SCORE_BIAS

# By output features, by input features, or not at all.
Sharding = Literal["column", "row", "none"]
# Features of each shard are a multiple of this where they do not divide.
_ROUNDED = 8

Role = Literal[
    "qkv",
    "o",
    "wide_qkv",
    "wide_o",
    "q",
    "wide_q",
    "wide_gate_up",
    "wide_down",
    "layer_gate",
    "layer_out",
    "q_a",
    "q_b",
    "kv_a",
    "kv_b",
    "distances",
    "gate_up",
    "down",
    "up",
    "in",
    "gates",
    "out",
    "shared_gate_up",
    "shared_down",
    "shared_out_gate",
    "router",
    "experts_gate_up",
    "experts_down",
    "latent_in",
    "latent_out",
    "embed_tokens",
    "project_in",
    "project_out",
    "per_layer_model_projection",
    "lm_head",
    "merger",
]

# Of products that choose experts, or weigh what comes out.
CHOOSERS: tuple[Role, ...] = ("router", "shared_out_gate")
# A *site* is one fused matrix product of the base; its projections share the input. These are of a
# layer of Llama and of models after it.
LAYER_SITES: dict[Role, tuple[str, ...]] = {
    "qkv": ("q_proj", "k_proj", "v_proj"),
    "o": ("o_proj",),
    "gate_up": ("gate_proj", "up_proj"),
    "down": ("down_proj",),
}
# Sites outside the layers, before and behind them, with a table each. Every site outside has one
# module, of the same name.
MODEL_SITES: tuple[Role, ...] = ("embed_tokens", "lm_head")
# Outside, beside a further table of the base's tokens.
LAYER_INPUTS: Role = "per_layer_model_projection"
# Stands for an expert's number in the path of a module that each expert of a layer has.
ANY_EXPERT = "{}"
_BESIDE_MLPS = "self_attn.gate_proj"  # whose name an MLP has, too
_NAMING_PARENTS = ("shared_expert", "shared_experts", "attn", "intermediate", "output")
# Beside `output.dense` of the same layer, in BERT and its kin.
_OF_ATTENTION = "attention.output.dense"
# Ids behind the base's tables that an adapter may have.
MAX_NEW_IDS = 4096


@dataclass(frozen=True, slots=True)
class Shard:
    """One of the `count` parts that devices share a model in."""

    index: int = 0
    count: int = 1


WHOLE = Shard()


class Span(msgspec.Struct, frozen=True):
    """Neighbouring features that shards share out evenly.

    unit: so many stay together, those of a head. Units are heads, which may be repeated but never
    filled up; single features are filled up with zeros where they do not divide.
    """

    features: int
    unit: int = 1

    @property
    def units(self) -> int:
        return self.features // self.unit

    def divides(self, count: int) -> bool:
        """Whether so many shards can share it."""
        return self.unit == 1 or self.units % count == 0 or count % self.units == 0

    def width(self, count: int) -> int:
        """Features of each shard."""
        if self.features % (count * self.unit) == 0:
            return self.features // count
        if self.unit > 1:
            return self.unit
        return -(-self.features // (count * _ROUNDED)) * _ROUNDED

    def piece(self, shard: Shard) -> slice:
        """Finds the features that a shard has."""
        if self.unit > 1:
            heads = heads_of(self.units, shard)
            return slice(heads.start * self.unit, heads.stop * self.unit)
        width = self.width(shard.count)
        begin, end = (min(n * width, self.features) for n in (shard.index, shard.index + 1))
        return slice(begin, end)


def heads_of(heads: int, shard: Shard) -> slice:
    """Finds a shard's heads. Fewer heads than shards are repeated, among neighbouring shards."""
    each = max(1, heads // shard.count)
    begin = shard.index * heads // shard.count
    return slice(begin, begin + each)


class Piece(NamedTuple):
    """Some features of a module, and their place among those of the shard."""

    source: slice
    target: slice


class Groups(msgspec.Struct, frozen=True):
    """How a file holds the spans of a module: in `count` groups, one behind the other.

    Each group has an equal part of every span. order: of the spans in a group, by their numbers;
    () = as they are listed.
    """

    count: int = 1
    order: tuple[int, ...] = ()


UNGROUPED = Groups()


def pieces(spans: Sequence[Span], shard: Shard, groups: Groups = UNGROUPED) -> tuple[Piece, ...]:
    """A shard's pieces of each span, one after the other. groups: as the file has them."""
    found, target = [], 0
    widths = [span.features // groups.count for span in spans]
    order = groups.order or tuple(range(len(spans)))
    for number, span in enumerate(spans):
        mine, width = span.piece(shard), widths[number]
        before = sum(widths[other] for other in order[: order.index(number)])
        for group in range(groups.count):
            begin, end = max(mine.start, group * width), min(mine.stop, (group + 1) * width)
            if begin >= end and groups.count > 1:
                continue
            source = group * (sum(widths) - width) + before + begin
            at, size = target + begin - mine.start, end - begin
            found.append(Piece(slice(source, source + size), slice(at, at + size)))
        target += span.width(shard.count)
    return tuple(found)


def total_width(spans: Sequence[Span], count: int) -> int:
    """Features of each shard."""
    return sum(span.width(count) for span in spans)


class ModuleShape(msgspec.Struct, frozen=True):
    """A linear module `y = x W^T`. path: as in the checkpoint, e.g. `self_attn.q_proj`.

    experts: how many experts of a layer have such a module; its path has `{}` for their number, as
    in `mlp.experts.{}.gate_proj`. 1 = an ordinary module. sharding: how devices share it.
    spans: of its inputs or outputs that are shared; () = one. has_bias: of an ordinary module.
    groups: how files hold its outputs. kernel: of a convolution, the shape of its inputs; such a
    module is no linear one to PEFT, and files have further dimensions. () = it is none.
    factor_behind: a factor of its inputs is that of its outputs, which no bias may have.
    """

    path: str
    in_features: int
    out_features: int
    experts: int = 1
    sharding: Sharding = "none"
    spans: tuple[Span, ...] = ()
    has_bias: bool = False
    groups: Groups = UNGROUPED
    kernel: tuple[int, ...] = ()
    factor_behind: bool = False

    @property
    def is_of_experts(self) -> bool:
        return ANY_EXPERT in self.path

    @property
    def shared(self) -> tuple[Span, ...]:
        """Returns the features that `sharding` shares out."""
        features = self.in_features if self.sharding == "row" else self.out_features
        return self.spans or (Span(features),)

    def of_shard(self, count: int) -> "ModuleShape":
        """Returns the part that each of `count` devices has."""
        if self.sharding == "none" or count == 1:
            return self
        width = total_width(self.shared, count)
        whole = msgspec.structs.replace(self, spans=(), groups=UNGROUPED)
        if self.sharding == "row":
            return msgspec.structs.replace(whole, in_features=width)
        return msgspec.structs.replace(whole, out_features=width)

    def inputs(self, shard: Shard) -> tuple[Piece, ...]:
        """Finds the input features that a device has."""
        return self._pieces("row", self.in_features, shard)

    def outputs(self, shard: Shard) -> tuple[Piece, ...]:
        """Finds the output features that a device has."""
        return self._pieces("column", self.out_features, shard)

    def _pieces(self, sharding: Sharding, features: int, shard: Shard) -> tuple[Piece, ...]:
        if self.sharding != sharding:
            return pieces((Span(features),), WHOLE)
        return pieces(self.shared, shard, self.groups)


class ExpertWeight(msgspec.Struct, frozen=True):
    """The weights of all experts of a layer in one tensor, which PEFT's `target_parameters` names.

    path: within the layer, `mlp.experts.gate_up_proj`. parts: short names of the modules whose
    output rows it holds, in order. interleaved: the parts' rows take turns; else they lie one part
    below the other. transposed: stored as `[experts, in, out]` and not `[experts, out, in]`.
    """

    path: str
    parts: tuple[str, ...]
    interleaved: bool = False
    transposed: bool = False

    @property
    def holder(self) -> str:
        """The module that has the tensor."""
        return self.path.rpartition(".")[0]


class BaseNorm(msgspec.Struct, frozen=True):
    """A norm of the base.

    path: its whole name. size: numbers of its weight, and of its bias.
    place, bias: of weight and bias, as `norm_place` numbers them. -1 = it has none, or lies
        elsewhere; adapters may not change that.
    head: features of a head, where devices share out those of the norm. 0 = each has the whole.
    """

    path: str
    size: int
    place: int
    bias: int = -1
    head: int = 0

    def part(self, shard: Shard) -> slice:
        """Finds the numbers that a device has."""
        return Span(self.size, self.head).piece(shard) if self.head else slice(self.size)

    def places(self, *, whole: bool) -> dict[str, int]:
        """The tensors that an adapter may have, or only that of the bias -> their places."""
        found = {f"{self.path}.weight": self.place} if whole else {}
        return found if self.bias < 0 else found | {f"{self.path}.bias": self.bias}

    @property
    def name(self) -> str:
        """Its short name."""
        return self.path.rpartition(".")[2]

    @property
    def is_served(self) -> bool:
        return self.place >= 0


# Where norms lie that adapters may change: before a step (`StepSpec`), on its residual sum, behind
# its branches, of q and of k, and before and behind a feed-forward alone, the step's first or
# second. The last norm lies before the step behind all, the embedding's on that step's sum.
BEFORE, ON_SUM, BEHIND, OF_Q, OF_K, BEFORE_FEED, BEHIND_FEED = range(7)
OWN_FEEDS = 2


def feed_place(where: int, number: int) -> int:
    """Numbers, as `where` of norm_place, the place of a feed-forward. where: of the first."""
    return where + 2 * number


def norm_place(where: int, step: int, steps: int) -> int:
    """Numbers the weights of norms; behind all of them lie the biases, in the same order. step: of
    all steps of the model, of which there are `steps`."""
    return where * (steps + 1) + step


def module_name(path: str) -> str:
    """A module's short name: `q_proj`, and `experts.gate_proj` of one that each expert has. Some
    parents stay, since another module of the layer has the same last name.
    """
    if path == _OF_ATTENTION:
        return path
    head, _, last = path.rpartition(".")
    parent = head.rpartition(".")[2]
    if head.endswith(ANY_EXPERT):
        parent = "experts"
    elif parent not in _NAMING_PARENTS and path != _BESIDE_MLPS:
        return last
    return f"{parent}.{last}"


def layer_stem(layer: int) -> str:
    """The whole name of a decoder's layer."""
    return f"model.layers.{layer}"


def layer_path(layer: int, path: str) -> str:
    """The whole name of what a decoder's layer has at `path`."""
    return f"{layer_stem(layer)}.{path}"


class LayerModules(msgspec.Struct, frozen=True):
    """The modules of one layer. Layers with the same modules share the objects that say so.

    path: the layer's whole name, `model.layers.3`; all paths within are relative to it.
    modules: short name (`q_proj`, …; see `module_name`) -> shape.
    sites: role -> short names of the site's modules, in the order of a step.
    expert_weights: tensors that hold all experts, in the order in which transformers registers
        them.
    aliases: other paths of modules, as some versions of transformers name them -> their paths.
    others: other whole names of the layer, likewise.
    """

    path: str
    modules: dict[str, ModuleShape]
    sites: dict[Role, tuple[str, ...]]
    expert_weights: tuple[ExpertWeight, ...] = ()
    aliases: dict[str, str] = {}
    others: tuple[str, ...] = ()

    def whole(self, path: str) -> str:
        """The whole name of what the layer has at `path`."""
        return f"{self.path}.{path}"


class BaseModule(msgspec.Struct, frozen=True):
    """One module of the base, or one of all experts of a layer. layer: 0-based, -1 outside the
    layers. path: its whole name."""

    layer: int
    name: str
    path: str
    shape: ModuleShape


class ScoreParts(msgspec.Struct, frozen=True):
    """Tensors of a score head, by name and shape: the weight of the labels first, where 0 stands
    for their number. of_tokens: the head gives each token of a text scores."""

    tensors: tuple[tuple[str, tuple[int, ...]], ...]
    of_tokens: bool = False

    @property
    def labels(self) -> str:
        """The name of the weight of the labels."""
        return self.tensors[0][0]

    @property
    def required(self) -> frozenset[str]:
        """Names of the weight of the labels, and of the tensors that are saved together with it."""
        top = self.labels.partition(".")[0] + "."
        return frozenset(name for name, _ in self.tensors if name.startswith(top))


class BaseSpec(msgspec.Struct, frozen=True):
    """Describes the base model that adapters are validated against.

    digest: identity of the base (sha256 hex); "" = it was inferred from an adapter's tensors.
    names: what it is called; `names_base` says which other names mean the same.
    layers: their modules, numbered through over all stacks of layers.
    hidden_size: features of what the head reads.
    model_modules: `embed_tokens` (in = vocabulary, out = hidden), `lm_head`, and products between
        these and the layers, if there are some -> shape.
    embedding_digests: `embed_tokens`, `lm_head`, `lm_head.bias` -> `float_digest` of the base's
        (`loraplex.adapters.safetensors.floats`). An adapter that brings an equal copy of them, as
        PEFT saves it, is then accepted.
    tokens: text -> id, all that the base's tokenizer knows; None = not known.
    eos_token_ids: ids that its files name as the end of an answer.
    shards: devices that share the base. quantize: how its weights are quantised at load, "" = they
        are not.
    is_tied: the head's matrix is the embedding's. num_classes: labels of its score head; 0 = it
        has none. norms: all of them. score_heads: those that an adapter may have, the usual one
        first; () = that of decoders. unread: whole names of modules whose result nobody asks for;
        LoRA of them is left out. unread_tensors: a pattern of whole names of such weights.
    tower_layer: number of the first layer of an encoder of pictures, which lies behind all others;
        its products outside of layers are layers of one module. -1 = the base has none.
    """

    digest: str
    names: tuple[str, ...]
    hidden_size: int
    vocab_size: int
    layers: tuple[LayerModules, ...]
    model_modules: dict[str, ModuleShape]
    embedding_digests: dict[str, str] = {}
    tokens: dict[str, int] | None = None
    eos_token_ids: tuple[int, ...] = ()
    shards: int = 1
    quantize: str = ""
    is_tied: bool = False
    num_classes: int = 0
    norms: tuple[BaseNorm, ...] = ()
    score_heads: tuple[ScoreParts, ...] = ()
    unread: tuple[str, ...] = ()
    unread_tensors: str = ""
    tower_layer: int = -1

    def score_head(self, *, of_tokens: bool) -> ScoreParts:
        """The score head that an adapter may have; without one for tokens, the usual one."""
        usual = ((SCORE, (0, self.hidden_size)),)
        of_each = ScoreParts((*usual, (SCORE_BIAS, (0,))), of_tokens=True)
        heads = self.score_heads or (ScoreParts(usual), of_each)
        return next((head for head in heads if head.of_tokens is of_tokens), heads[0])

    def table_width(self, name: str) -> int:
        """Features of a row of a table. name: the short one."""
        module = self.model_modules.get(name)
        if module is None:
            return self.hidden_size
        return module.out_features if name == MODEL_SITES[0] else module.in_features

    @property
    def tables(self) -> frozenset[str]:
        """Whole names of the embedding and of the head for text."""
        names = MODEL_SITES[:1] if self.score_heads else MODEL_SITES
        return frozenset(of.path for name, of in self.model_modules.items() if name in names)

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    @property
    def text_layers(self) -> int:
        """Layers that are not of an encoder of pictures."""
        return self.num_layers if self.tower_layer < 0 else self.tower_layer

    @property
    def text_part(self) -> "BaseSpec":
        """The base without an encoder of pictures."""
        layers = self.layers[: self.text_layers]
        return msgspec.structs.replace(self, layers=layers, unread_tensors="", tower_layer=-1)

    def is_of_tower(self, layer: int) -> bool:
        return 0 <= self.tower_layer <= layer

    def is_unread(self, path: str) -> bool:
        """Whether nobody asks for a module's result. path: its whole name."""
        if path in self.unread:
            return True
        return bool(self.unread_tensors) and _matches(self.unread_tensors, f"{path}.weight")

    @property
    def is_inferred(self) -> bool:
        return not self.digest

    @property
    def most_ids(self) -> int:
        """The most ids of an adapter: the base's rows, and new ids where the base is known and has
        no further table of its tokens."""
        has_new = not self.is_inferred and LAYER_INPUTS not in self.model_modules
        return self.vocab_size + (MAX_NEW_IDS if has_new else 0)

    @property
    def num_tokens(self) -> int:
        """The number of the tokenizer's ids; the tables may have more rows. 0 = not known."""
        return max(self.tokens.values()) + 1 if self.tokens else self.vocab_size

    def modules_of(self, layer: int) -> dict[str, ModuleShape]:
        """The modules of a layer by short name; of -1, those outside the layers."""
        return self.model_modules if layer < 0 else self.layers[layer].modules

    def module(self, layer: int, name: str) -> BaseModule:
        """The module of that short name in a layer; -1 = outside the layers."""
        shape = self.modules_of(layer)[name]
        path = shape.path if layer < 0 else self.layers[layer].whole(shape.path)
        return BaseModule(layer, name, path, shape)

    def site_names(self, layer: int, role: Role) -> tuple[str, ...]:
        """Short names of a site's modules. layer: 0-based, or -1 outside the layers."""
        return (role,) if layer < 0 else self.layers[layer].sites[role]

    def of_site(self, layer: int, role: Role, projection: int) -> ModuleShape:
        """A module of a site, whole. Those of one site share their input, and their experts."""
        return self.modules_of(layer)[self.site_names(layer, role)[projection]]


@cache
def _pattern(pattern: str) -> re.Pattern[str]:
    return re.compile(pattern)


def _matches(pattern: str, name: str) -> bool:
    return _pattern(pattern).fullmatch(name) is not None


def base_modules(base: BaseSpec) -> Iterator[BaseModule]:
    """Yields all modules: those of each layer, then those outside the layers."""
    for layer in (*range(base.num_layers), -1):
        for name in base.modules_of(layer):
            yield base.module(layer, name)


def tokens_of_shard(vocab: int, shard: Shard) -> tuple[Piece, Piece]:
    """Finds a shard's ids of the base, which has `vocab`, and its new ids, as it counts them.
    New ids have the same place on all shards."""
    base, new = pieces((Span(vocab), Span(MAX_NEW_IDS)), shard)
    return base, new


def new_ids_width(count: int) -> int:
    """New ids of each shard."""
    return Span(MAX_NEW_IDS).width(count)


def ids_of_shard(ids: Sequence[int], vocab: int, shard: Shard) -> tuple[int, ...]:
    """Finds the tokens whose rows a shard has, as the shard counts them."""
    return tuple(token for _, token in _rows(ids, vocab, shard))


def rows_of_shard(ids: Sequence[int], vocab: int, shard: Shard) -> list[int]:
    """The places of these tokens in `ids`."""
    return [place for place, _ in _rows(ids, vocab, shard)]


def _rows(ids: Sequence[int], vocab: int, shard: Shard) -> Iterator[tuple[int, int]]:
    """Places in `ids` of a shard's tokens, and tokens as it counts them. The only shard has all."""
    if shard.count == 1:
        yield from enumerate(ids)
        return
    parts = [
        (range(source.start, source.stop), target.start - source.start)
        for source, target in tokens_of_shard(vocab, shard)
    ]
    for place, token in enumerate(ids):
        for mine, shift in parts:
            if token in mine:
                yield place, token + shift


def most_rows(ids: Sequence[int], vocab: int, count: int) -> int:
    """Counts these tokens' rows in the shard that has the most, at least 1."""
    return max(1, *(len(rows_of_shard(ids, vocab, Shard(i, count))) for i in range(count)))


def pieces_of_table(size: int, vocab: int, shard: Shard) -> tuple[Piece, ...]:
    """Finds a shard's rows of a table of `size` rows, and their places among its own. A row's place
    is its token, as the shard counts it."""
    if shard.count == 1:
        return (Piece(slice(0, size), slice(0, size)),)
    found = []
    for source, target in tokens_of_shard(vocab, shard):
        rows = min(source.stop, size) - source.start
        if rows > 0:
            source = slice(source.start, source.start + rows)
            found.append(Piece(source, slice(target.start, target.start + rows)))
    return tuple(found)


def rows_of_each(size: int, vocab: int, count: int) -> int:
    """Counts the rows that each shard keeps for a table: as many as the first, which has most.
    Some between the base's rows and those of new ids may be unused."""
    rows: int = pieces_of_table(size, vocab, Shard(0, count))[-1].target.stop
    return rows
