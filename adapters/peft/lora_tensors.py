"""The tensors of a validated adapter, in the base's modules. Pure."""

import msgspec

from loraplex.adapters.base import BaseNorm
from loraplex.adapters.coverage import Coverage, Site, coverage_of
from loraplex.adapters.peft.config import PeftConfig
from loraplex.adapters.peft.tensor_names import WHOLE, Naming
from loraplex.adapters.safetensors.header import TensorInfo

# What an adapter has for each output of a module, beside A and B; bits.
MAGNITUDES, B_BIAS, OWN_BIAS = 1, 2, 4


class PlacedLora(msgspec.Struct, frozen=True):
    """LoRA of one module, or of one that all experts of a layer have, in any form:
    `y += scale * B (A x)`.

    layer: 0-based, -1 for `embed_tokens` and `lm_head`. module: its short name.
    """

    layer: int
    module: str
    lora_rank: int
    scale: float

    @property
    def shares_a(self) -> bool:
        """The site's other modules have the same A."""
        return False

    @property
    def vectors(self) -> int:
        """Bits for the numbers of each output: MAGNITUDES, B_BIAS or none."""
        return 0

    @property
    def sites(self) -> tuple[Site, ...]:
        """The modules that have tensors."""
        return ((self.layer, self.module),)


class ModuleLora(PlacedLora, frozen=True, gc=False):
    """LoRA of one module. a: `[lora_rank, in_features]`; b: `[out_features, lora_rank]`.
    magnitude: of DoRA, `[out_features]`. bias: of B, likewise."""

    a: TensorInfo
    b: TensorInfo
    magnitude: TensorInfo | None = None
    bias: TensorInfo | None = None

    @property
    def vectors(self) -> int:
        lengths = 0 if self.magnitude is None else MAGNITUDES
        return lengths | (0 if self.bias is None else B_BIAS)

    @property
    def tensors(self) -> tuple[TensorInfo, ...]:
        of_outputs = (self.magnitude, self.bias)
        return (self.a, self.b, *(tensor for tensor in of_outputs if tensor is not None))


class OwnBias(msgspec.Struct, frozen=True, gc=False):
    """A bias that replaces that of a module of the base; `[out_features]`."""

    layer: int
    module: str
    tensor: TensorInfo


class ExpertPair(msgspec.Struct, frozen=True, gc=False):
    """LoRA of one expert's module, as in `ModuleLora`. factor: its scale over that of all."""

    expert: int
    lora_rank: int
    factor: float
    a: TensorInfo
    b: TensorInfo


class ExpertsLora(PlacedLora, frozen=True):
    """LoRA of a module of each expert, with a pair of tensors for each.

    Experts without a pair stay as in the base. lora_rank, scale: the largest, by magnitude.
    """

    pairs: tuple[ExpertPair, ...]

    @property
    def tensors(self) -> tuple[TensorInfo, ...]:
        return tuple(tensor for pair in self.pairs for tensor in (pair.a, pair.b))

    @property
    def sites(self) -> tuple[Site, ...]:
        return tuple((self.layer, self.module, pair.expert) for pair in self.pairs)


class StackedLora(PlacedLora, frozen=True):
    """LoRA of one module's rows in a tensor of all experts (`ExpertWeight`).

    PEFT's `ParamWrapper` saves one pair for the whole tensor.
    a: `[experts * lora_rank, in]`, experts outermost. b: `[out, lora_rank * experts]`, experts
    innermost. rows: of `out`, those of this module.
    is_swapped: a reads what should be written and b writes what should be read:
        a `[experts * lora_rank, out]`, b `[in, lora_rank * experts]`.
    has_others: other modules have the other rows.
    """

    a: TensorInfo
    b: TensorInfo
    rows: range
    is_swapped: bool
    has_others: bool

    @property
    def shares_a(self) -> bool:
        return self.has_others

    @property
    def tensors(self) -> tuple[TensorInfo, ...]:
        return self.a, self.b


class OwnTable(msgspec.Struct, frozen=True):
    """Rows that replace those of `embed_tokens` or `lm_head` (module).

    tensor: `[rows, hidden]`. ids: the token of each row; () = the adapter's whole vocabulary.
    trained: rows that replace some of a whole table, `[len(trained_ids), hidden]`. lora: it is
    added to a whole table.
    """

    module: str
    tensor: TensorInfo
    ids: tuple[int, ...]
    trained: TensorInfo | None = None
    trained_ids: tuple[int, ...] = ()
    lora: ModuleLora | None = None

    @property
    def size(self) -> int:
        """Tokens of the adapter's vocabulary; for trained rows alone, the last id plus one."""
        return max(self.ids) + 1 if self.ids else self.tensor.shape[0]

    @property
    def tensors(self) -> tuple[TensorInfo, ...]:
        own = (self.tensor,) if self.trained is None else (self.tensor, self.trained)
        return own if self.lora is None else (*own, *self.lora.tensors)


class OwnNorm(msgspec.Struct, frozen=True, gc=False):
    """A norm's own weight or bias. place: of the tensor, as in `BaseNorm`. tensor: `[size]`."""

    norm: BaseNorm
    place: int
    tensor: TensorInfo

    @property
    def module(self) -> str:
        """The norm's short name."""
        return self.norm.name


class OwnScores(msgspec.Struct, frozen=True):
    """A score head in place of the base's. tensors: with their numbers in `ScoreParts`, that of
    the labels first. of_tokens: as of ScoreParts."""

    tensors: tuple[tuple[int, TensorInfo], ...]
    of_tokens: bool = False

    @property
    def labels(self) -> TensorInfo:
        """The weight of the labels, `[labels, hidden]`."""
        return self.tensors[0][1]


class LoraTensors(msgspec.Struct, frozen=True):
    """A validated adapter. modules: by layer, then by name.

    base_copies: module -> the base's own weights, saved beside the adapter; to be compared with
    `BaseSpec.embedding_digests` before the adapter is served, and otherwise not used.
    missing: targeted modules without tensors; they stay as the base has them.
    naming: how the adapter calls the modules.
    biases: of any modules, also of those without LoRA. tables: of tied ones both have one tensor.
    head: of a classifier. norms: in the order of their places.
    of_images: modules with weights of a part for images, which are left out.
    """

    config: PeftConfig
    modules: tuple[ModuleLora | ExpertsLora | StackedLora, ...]
    base_copies: tuple[tuple[str, TensorInfo], ...] = ()
    missing: tuple[Site, ...] = ()
    naming: Naming = WHOLE
    biases: tuple[OwnBias, ...] = ()
    tables: tuple[OwnTable, ...] = ()
    head: OwnScores | None = None
    norms: tuple[OwnNorm, ...] = ()
    of_images: int = 0

    def table_size(self, vocab_size: int) -> int:
        """Tokens of its vocabulary, where its tables have other sizes than the base's; else 0."""
        sizes = {t.size for t in self.tables if not t.ids or t.size > vocab_size}
        return min(sizes - {vocab_size}, default=0)

    @property
    def is_lora_alone(self) -> bool:
        """Whether products with A and B are all that the adapter changes."""
        beside = self.biases or self.tables or self.head or self.norms
        return not beside and not any(module.vectors for module in self.modules)

    @property
    def ordinary(self) -> tuple[ModuleLora, ...]:
        """LoRA of modules that are not of experts."""
        return tuple(module for module in self.modules if isinstance(module, ModuleLora))

    @property
    def sites(self) -> tuple[Site, ...]:
        """The targeted modules that have tensors."""
        added = (table.lora for table in self.tables if table.lora is not None)
        return tuple(site for module in (*self.modules, *added) for site in module.sites)

    @property
    def tensors(self) -> tuple[TensorInfo, ...]:
        """All tensors, each once: modules may share them."""
        found = {tensor.name: tensor for module in self.modules for tensor in module.tensors}
        others: tuple[OwnBias | OwnNorm, ...] = (*self.biases, *self.norms)
        found |= {each.tensor.name: each.tensor for each in others}
        found |= {each.name: each for table in self.tables for each in table.tensors}
        of_head = () if self.head is None else self.head.tensors
        return tuple((found | {each.name: each for _, each in of_head}).values())

    @property
    def coverage(self) -> Coverage:
        return coverage_of(self.sites, self.missing, self.of_images)
