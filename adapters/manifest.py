"""A validated adapter, and how its weights lie in a packed slab. Pure."""

from typing import Literal, NamedTuple

import msgspec

from loraplex.adapters.base import Role
from loraplex.adapters.chat.conversation import DEFAULT_TEMPLATE
from loraplex.adapters.classes import OwnClasses
from loraplex.adapters.coverage import Coverage

SlabDtype = Literal["float32", "float16", "bfloat16"]
ITEM_BYTES: dict[SlabDtype, int] = {"float32": 4, "float16": 2, "bfloat16": 2}

LAYOUT_VERSION = 4
# How a digest is made of an adapter. Other forms are made anew.
DIGEST_FORM = 2


class AdapterTemplate(msgspec.Struct, frozen=True):
    """An adapter's own chat templates.

    source: the default, or None where it has only others. special_tokens: name -> text, or None
    for no such token; the base's have the other names. named: the others, by name.
    """

    source: str | None
    special_tokens: dict[str, str | None]
    named: dict[str, str] = {}

    @property
    def sources(self) -> dict[str, str]:
        """All templates by name."""
        default = {} if self.source is None else {DEFAULT_TEMPLATE: self.source}
        return default | self.named


class ListedToken(msgspec.Struct, frozen=True, gc=False):
    """A token as `tokenizer.json` lists it."""

    id: int
    content: str = ""
    special: bool = False
    lstrip: bool = False
    rstrip: bool = False
    single_word: bool = False
    normalized: bool = False


class OwnToken(ListedToken, frozen=True, array_like=True, gc=False):
    """A token that the base's tokenizer does not have."""


class AdapterText(NamedTuple):
    """Everything but weights: an adapter's templates, ends, classes and tokens.

    end_token_ids: ids that end its answers beside the base's, as its files name them, ascending.
    classes: what its score head scores; None = it has none.
    added_tokens: those of its tokenizer beside the base's, by id without a gap.
    """

    template: AdapterTemplate | None = None
    end_token_ids: tuple[int, ...] = ()
    classes: OwnClasses | None = None
    added_tokens: tuple[OwnToken, ...] = ()


class AdapterManifest(msgspec.Struct, frozen=True, gc=False, omit_defaults=True):
    """All facts about an admitted adapter. Validated content. `digest` is the adapter's identity
    everywhere after admission.

    digest: sha256 hex over the used config and the weights; of a merged adapter, over its recipe.
    form: how that was made, see DIGEST_FORM.
    base: what the adapter's config names as its base model. targets: short module names it changes,
    sorted. ranks: the distinct LoRA ranks in it, ascending. nbytes: bytes of its LoRA tensors as
    published. dtype: of the published tensors, as safetensors spells it (`BF16`, `F32`, …).
    chat_template, named_templates: the adapter's own default template, if it brings one; others.
    content_digest: of a merged adapter, sha256 hex over its config and weights; else "".
    special_tokens: of its template; None = it has none, or was judged before they were kept.
    coverage: which targeted modules have weights; None = it was judged before this was kept.
    end_token_ids: see AdapterText; None = it was judged before they were kept. invocation_tokens:
    of an activated adapter, which acts from their last occurrence in the prompt on; () = it acts on
    all tokens. classes: see AdapterText. added_tokens: see AdapterText. table_size: ids from it on
    do not exist for the adapter, whose tables end there, before or behind those of the base; 0 =
    all ids of the base do. is_lora_alone: products with A and B are all that it changes; False also
    where it was judged before this was kept.
    """

    digest: str
    base: str
    targets: tuple[str, ...]
    ranks: tuple[int, ...]
    nbytes: int
    dtype: str
    chat_template: str | None = None
    content_digest: str = ""
    special_tokens: dict[str, str | None] | None = None
    coverage: Coverage | None = None
    end_token_ids: tuple[int, ...] | None = None
    named_templates: dict[str, str] | None = None
    invocation_tokens: tuple[int, ...] = ()
    classes: OwnClasses | None = None
    added_tokens: tuple[OwnToken, ...] = ()
    table_size: int = 0
    is_lora_alone: bool = False
    form: int = 1

    @property
    def partial(self) -> Coverage | None:
        """Its coverage, if targeted modules are missing in its weights."""
        return self.coverage if self.coverage is not None and self.coverage.is_partial else None

    def with_coverage(self, coverage: Coverage) -> "AdapterManifest":
        """Adds the coverage to an older manifest that has none."""
        if self.coverage is not None:
            return self
        return msgspec.structs.replace(self, coverage=coverage)

    def of_merge(self, digest: str, coverage: Coverage) -> "AdapterManifest":
        """Turns this into a merge's manifest. digest: of its recipe. coverage: of all members."""
        return msgspec.structs.replace(
            self, digest=digest, content_digest=self.digest, coverage=coverage
        )

    @property
    def knows_ends(self) -> bool:
        """Whether it was judged since ends are kept."""
        return self.end_token_ids is not None

    @property
    def text(self) -> AdapterText:
        classes, added = self.classes, self.added_tokens
        return AdapterText(self.template, self.end_token_ids or (), classes, added)

    @property
    def template(self) -> AdapterTemplate | None:
        if self.chat_template is None and not self.named_templates:
            return None
        tokens = self.special_tokens or {}
        return AdapterTemplate(self.chat_template, tokens, self.named_templates or {})


class SiteLayout(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Places of one site's LoRA tensors. Offsets are bytes from the slab's start, 256-byte aligned.

    layer: 0-based, or -1 for `embed_tokens` and `lm_head`.
    ranks, scales, b_offsets: one entry per projection of the site (`BaseSpec.site_names`);
        rank 0 = not targeted (its b_offset is 0 and means nothing).
    a_offset: A of all projections stacked, `[sum(ranks), in_features]` row-major;
        for `embed_tokens` it is A transposed, `[vocab, rank]`, so that a token reads one row.
        Of experts `[experts, a_rank, in_features]`.
    b_offsets: each B is `[out_features, rank]` row-major, as PEFT stores it; of experts
        `[experts, out_features, rank]`.
    scales: `lora_alpha / r` or `lora_alpha / sqrt(r)` (rsLoRA); not folded into the weights.
    shares_a: all projections have the same A, which is stored once. So it is where one tensor
        holds gate and up of all experts.
    vectors: one entry per projection: which numbers the adapter has for each output (`vectors` of
        `loraplex.adapters.peft.lora_tensors`); () = the site has none.
    vectors_offset: float32 `[2, out_features of all projections]`, whatever the slab's dtype; the
        magnitudes of DoRA, then biases in place of the base's. In a third row biases of B, if a
        projection has one. 0 in place of what the adapter does not have.
    table_offset: of `embed_tokens` or `lm_head`, rows in place of the base's, `[rows, hidden]`; two
        sites may have the same. -1 = none.
    table_ids: the token of each of these rows; () = all tokens, or the first `table_size`.
    table_size: of the adapter's vocabulary, where that is smaller or larger than the base's; 0 =
        it is not.
    """

    layer: int
    role: Role
    ranks: tuple[int, ...]
    scales: tuple[float, ...]
    a_offset: int
    b_offsets: tuple[int, ...]
    shares_a: bool = False
    vectors: tuple[int, ...] = ()
    vectors_offset: int = 0
    table_offset: int = -1
    table_ids: tuple[int, ...] = ()
    table_size: int = 0

    @property
    def a_rank(self) -> int:
        """Rows of the stacked A."""
        return max(self.ranks) if self.shares_a else sum(self.ranks)


class OwnHead(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """The place of a score head. offset: of the weight of its labels, `[labels, hidden]`, as in
    `SiteLayout`. of_tokens: which of the base's `ScoreParts` it is. numbers, offsets: of its other
    tensors, their numbers there and places."""

    offset: int
    labels: int
    of_tokens: bool = False
    numbers: tuple[int, ...] = ()
    offsets: tuple[int, ...] = ()


class OwnNorms(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """The place of norms' weights and biases, `[places, numbers of the largest]`. offset: as in
    `SiteLayout`. places: as in `BaseNorm`."""

    offset: int
    places: tuple[int, ...]


class SlabLayout(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """One adapter packed for one base and dtype.

    A slab has a part for each of the `shards` devices that share the base, one after the other. All
    parts have the same layout, which this is: offsets are from a part's start.

    A part is cut into extents of `extent_bytes`. No tensor crosses an extent's border unless it
    is larger than an extent. A larger tensor starts on a border and owns a *run* of extents that
    must stay contiguous. `runs` lists the lengths, in extents, of the pieces that may be placed
    apart from each other, in order: all 1 but for such tensors. Only sites that the adapter changes
    are listed. head: of a classifier. norms: in place of the base's.

    is_finished: a device has put what steps need in place of the sites' vectors: factors of the
    base's product, and addends. Each B is multiplied by its factors. So this is for the base as it
    was loaded, with its `quantize`.
    """

    digest: str
    base_digest: str
    dtype: SlabDtype
    extent_bytes: int
    runs: tuple[int, ...]
    sites: tuple[SiteLayout, ...]
    shards: int = 1
    version: int = LAYOUT_VERSION
    head: OwnHead | None = None
    norms: OwnNorms | None = None
    is_finished: bool = False

    @property
    def is_lora_alone(self) -> bool:
        """Whether products with A and B are all that the adapter changes."""
        plain = not any(site.vectors or site.table_offset >= 0 for site in self.sites)
        return plain and self.head is None and self.norms is None

    @property
    def is_to_finish(self) -> bool:
        """Whether a device has to make something of it before steps can use it."""
        return not self.is_finished and any(site.vectors for site in self.sites)

    @property
    def shard_nbytes(self) -> int:
        """Bytes of one part."""
        return sum(self.runs) * self.extent_bytes

    @property
    def nbytes(self) -> int:
        return self.shards * self.shard_nbytes

    @property
    def all_runs(self) -> tuple[int, ...]:
        """The runs of all parts, in order."""
        return self.runs * self.shards
