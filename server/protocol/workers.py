"""Hellos, status and pictures of routers and workers, and the card of a model. Pure."""

from typing import Literal

import msgspec

from loraplex.adapters.chat.conversation import DEFAULT_TEMPLATE, MessageForm
from loraplex.adapters.classes import ClassForm as ClassForm
from loraplex.adapters.classes import OwnClasses
from loraplex.server.protocol.adapters import TierState
from loraplex.server.protocol.generation import Evidence, Pooling, TextPooling
from loraplex.server.protocol.pictures import VisionCard

# What a model gives: the last are scores of documents.
Gift = Literal["text", "vectors", "classes", "fits"]
PROTOCOL_VERSION = 8


class RouterHello(msgspec.Struct, frozen=True, array_like=True, tag="rh"):
    """The router's first frame."""

    router_id: str
    version: int = PROTOCOL_VERSION


class WorkerHello(msgspec.Struct, frozen=True, array_like=True, tag="wh"):
    """The worker's first frame. credits: sequences this router may have in flight here."""

    worker_id: str
    epoch: int
    card_digest: str
    credits: int
    version: int = PROTOCOL_VERSION


class Inspect(msgspec.Struct, frozen=True, array_like=True, tag="in"):
    """Asks what lies where, for people who look. Answered by one WorkerPicture.

    known: the version of `places` that the router has already (0 = none).
    """

    order_id: str
    known: int = 0


class WorkerStatus(msgspec.Struct, frozen=True, array_like=True, tag="ws"):
    """Hints, twice a second. ready: the engine takes work. resident, loading: adapter digests.

    adapter_slots: adapters that may be on the device at once.
    silent: the engine gives no sign of life, or its step no end; its sequences are not lost, but
    had better go on elsewhere.
    credits: sequences this router may have in flight here from now on (0 = as before).
    rows: how many of them can be computed at once (0 = not known).
    load_bytes_s: how fast adapters came to the device lately (0 = not known).
    preemptions, step_tokens: since the engine was started, as `step`. page_size: in tokens.
    shards: devices that share its model. evidence: of a silent engine, for each sequence of this
    router without a token from it, by request, attempt and choice.
    """

    worker_id: str
    epoch: int
    base_digest: str
    ready: bool
    draining: bool
    free_pages: int
    total_pages: int
    running: int
    waiting: int
    resident: tuple[str, ...]
    loading: tuple[str, ...]
    step: int
    adapter_slots: int = 0
    silent: bool = False
    credits: int = 0
    load_bytes_s: float = 0.0
    rows: int = 0
    preemptions: int = 0
    step_tokens: int = 0
    page_size: int = 0
    shards: int = 1
    evidence: tuple[tuple[str, int, int, Evidence], ...] = ()


class PicturesMissing(msgspec.Struct, frozen=True, array_like=True, tag="pm"):
    """A sequence waits for pictures whose files the worker has not got. The router sends each by a
    PUT of `/pictures/DIGEST`. pictures: SHA-256 of each file."""

    request_id: str
    attempt: int
    choice: int
    pictures: tuple[str, ...]


class AdapterPlace(msgspec.Struct, frozen=True, array_like=True):
    """An adapter's place: (first extent, extents) of each unbroken row, in either arena.

    slab_bytes: packed, 0 if not known. load_s: its last way to the device.
    """

    digest: str
    device: TierState
    host: TierState
    pinned: bool
    slab_bytes: int
    load_s: float | None
    device_spans: tuple[tuple[int, int], ...]
    host_spans: tuple[tuple[int, int], ...]


class WorkerPicture(msgspec.Struct, frozen=True, array_like=True, tag="wp"):
    """Answers an Inspect: both arenas, and counts since the engine was started.

    in_use: adapters with sequences in flight here, and how many, whoever sent them.
    version: of `places`; None = as the router has them. places_left_out: above the bound.
    restarts: engines lost since the worker was started. shards: devices that share its model.
    draft_tokens: that steps checked; accepted_draft_tokens: those that were right.
    memory: what fills a device, with bytes of each; () = nobody counts. kept_pages: of keys and
    values below the device: where, how many are there, and how many can be; () = none can.
    """

    order_id: str
    device: str
    page_size: int
    extent_bytes: int
    device_extents: int
    host_extents: int
    prompt_tokens: int
    output_tokens: int
    evictions: int
    preemptions: int
    restarts: int
    in_use: tuple[tuple[str, int], ...]
    version: int
    places: tuple[AdapterPlace, ...] | None
    places_left_out: int = 0
    shards: int = 1
    draft_tokens: int = 0
    accepted_draft_tokens: int = 0
    memory: tuple[tuple[str, int], ...] = ()
    kept_pages: tuple[tuple[Literal["host", "disk"], int, int], ...] = ()


class VectorForm(msgspec.Struct, frozen=True):
    """The way from texts to vectors. size: numbers of one. max_tokens: of a text, with its prompt.
    prompts: texts to put before, by name. default_prompt: for requests that name none."""

    size: int
    max_tokens: int
    pooling: TextPooling = "last"
    normalises: bool = True
    prompts: dict[str, str] = {}
    default_prompt: str | None = None


class PairForm(msgspec.Struct, frozen=True):
    """The way to a document's fit to a query.

    by: a classifier's one score, the logits of two tokens, or the angle between two vectors.
    token_ids: of a fit, and of none. template: what is read, with `{query}`, `{document}` and
    perhaps `{instruction}`; "" = the tokenizer's own pair. instruction: where a request has none.
    """

    by: Literal["scores", "logits", "vectors"]
    token_ids: tuple[int, ...] = ()
    template: str = ""
    instruction: str = ""


class ModelCard(msgspec.Struct, frozen=True):
    """All that a router needs of a model, fetched once over HTTP as JSON and cached by its digest.

    names: what `model` may say for the base itself; the first is shown. listed: those that
    `/v1/models` lists; () = the first. root: what the model is called where it comes from.
    tokenizer_json: the tokenizer's file, whole. chat_template: Jinja source, or None.
    split_special_tokens: whether texts of special tokens are read as any text.
    named_templates: those that are not the default, by name. message_forms: how each template
    reads messages, the default by the name `default`; those left out cannot be used.
    special_tokens: `bos_token` and the like, by all names that the template may use.
    eos_token_ids: what ends its answers. max_context: prompt and output together.
    sampling_defaults: its authors' advice, by names of SamplingParams; suppressed_token_ids are
    never drawn. remarks: on advice that is not followed. weights: how they are quantised, "" = not.
    writes: whether it gives text. vectors, classes, pairs: how it gives those; None = it does not.
    pad_token_id: see `ClassForm`. score_pooling: what score heads read of a text. token_types: 2 =
    the model marks which tokens are of a pair's second text. vision: the way of pictures to its
    tokens; None = it reads none, blind: why not, where the whole model would.
    """

    base_digest: str
    names: tuple[str, ...]
    tokenizer_json: str
    chat_template: str | None
    special_tokens: dict[str, str]
    eos_token_ids: tuple[int, ...]
    vocab_size: int
    max_context: int
    dtype: str
    device: str
    max_lora_rank: int
    created: int = 0
    sampling_defaults: dict[str, float] = {}
    named_templates: dict[str, str] = {}
    message_forms: dict[str, MessageForm] = {}
    listed: tuple[str, ...] = ()
    root: str = ""
    suppressed_token_ids: tuple[int, ...] = ()
    remarks: tuple[str, ...] = ()
    weights: str = ""
    writes: bool = True
    vectors: VectorForm | None = None
    classes: ClassForm | None = None
    pairs: PairForm | None = None
    pad_token_id: int | None = None
    score_pooling: Pooling = "last"
    token_types: int = 1
    vision: VisionCard | None = None
    blind: str = ""
    split_special_tokens: bool = False

    def with_head(self, own: OwnClasses) -> "ModelCard":
        """The card of the model under an adapter with a score head of its own: a classifier."""
        classes = own.over(self.classes, self.pad_token_id)
        form = PairForm("scores") if self.pairs is None else self.pairs
        is_fit = own.count == 1 and not own.of_tokens
        pairs = PairForm("scores", (), form.template, form.instruction) if is_fit else None
        return msgspec.structs.replace(
            self, writes=False, vectors=None, classes=classes, pairs=pairs
        )

    @property
    def gives(self) -> tuple[Gift, ...]:
        """The kinds of answers that may be asked for."""
        gifts: dict[Gift, bool] = {
            "text": self.writes,
            "vectors": self.vectors is not None,
            "classes": self.classes is not None,
            "fits": self.pairs is not None,
        }
        return tuple(gift for gift, is_given in gifts.items() if is_given)

    @property
    def all_templates(self) -> dict[str, str]:
        """Sources of all chat templates by name."""
        default = {} if self.chat_template is None else {DEFAULT_TEMPLATE: self.chat_template}
        return default | self.named_templates
