"""The wire contract between router and worker: typed msgpack frames over one WebSocket. Pure.

Frames are msgspec structs encoded as tagged arrays: small, bounded, without object deserialisation.
New fields go at the end, with a default. One WebSocket message carries one frame.
"""

from typing import Literal

import msgspec

from adapters.chat.conversation import DEFAULT_TEMPLATE, MessageForm
from adapters.errors import AdapterErrorCode, Violation
from adapters.manifest import AdapterManifest
from adapters.merge_recipe import MergeRecipe
from adapters.ref import AdapterRef

PROTOCOL_VERSION = 4
MAX_FRAME_BYTES = 16 << 20

Finish = Literal["stop", "length", "abort", "error"]
ErrorCode = Literal[
    "invalid_request",  # a value that the engine cannot take (an id out of range, …)
    "context_length",  # prompt and max_tokens do not fit
    "adapter_unavailable",  # the adapter could not be brought to the device
    "out_of_memory",
    "deadline",  # dropped: its time was over
    "overloaded",  # the worker has no room
    "engine_lost",  # the engine died under it; a retry elsewhere is safe
    "draining",
    "internal",
]


class SamplingParams(msgspec.Struct, frozen=True, array_like=True):
    """How tokens are drawn. Defaults change nothing.

    temperature: 0 = greedy. top_k: 0 = off. top_p, typical_p: 1 = off. min_p: 0 = off.
    repetition_penalty: over prompt and output (1 = off); frequency and presence: over the output.
    max_tokens: of output, accepted ones included.
    logprobs: None = none; n >= 0 = the chosen token's, with the n most likely beside it;
    prompt_logprobs: the same for the prompt's tokens.
    stop_token_ids: end the output, as the model's own ends do: end_token_ids and the worker's.
    Logprobs are those of the raw logits (log-softmax before temperature, penalties and truncation).
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    typical_p: float = 1.0
    repetition_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    max_tokens: int = 16
    min_tokens: int = 0
    ignore_eos: bool = False
    stop_token_ids: tuple[int, ...] = ()
    logit_bias: dict[int, float] = {}
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    end_token_ids: tuple[int, ...] = ()


class RouterHello(msgspec.Struct, frozen=True, array_like=True, tag="rh"):
    """The router's first frame."""

    router_id: str
    version: int = PROTOCOL_VERSION


class GenerateRequest(msgspec.Struct, frozen=True, array_like=True, tag="gr"):
    """One sequence to generate. `n` choices are n requests with the same prompt and seed.

    adapter: digest, or None for the base. accepted_ids: output already given to the client
    (resume); generation goes on at index len(accepted_ids). deadline_s: time left.
    salt: separates tenants in the prefix cache.
    """

    request_id: str
    attempt: int
    choice: int
    adapter: str | None
    prompt_ids: list[int]
    accepted_ids: list[int]
    sampling: SamplingParams
    seed: int
    priority: int = 0
    deadline_s: float | None = None
    salt: str = ""


class Abort(msgspec.Struct, frozen=True, array_like=True, tag="ab"):
    """Stop a request. choice None = all of its choices. It still ends in one terminal event."""

    request_id: str
    attempt: int
    choice: int | None = None


class AdapterLoad(msgspec.Struct, frozen=True, array_like=True, tag="al"):
    """Turn a pinned reference into a digest: fetch, check, pack. Answered by AdapterState.

    ref: `hub` refs carry a commit as revision. token: the caller's credential for the source; never
    logged or stored. expected_digest: when given, other content is a violation.
    """

    load_id: str
    ref: AdapterRef
    token: str | None = None
    expected_digest: str | None = None


class MemberSource(msgspec.Struct, frozen=True, array_like=True):
    """Where a member of a merge comes from, if the worker lacks it. As in AdapterLoad."""

    ref: AdapterRef
    token: str | None = None


class AdapterMerge(msgspec.Struct, frozen=True, array_like=True, tag="am"):
    """Make an adapter of others, by digest. Answered by AdapterState, as AdapterLoad is.

    sources: parallel to recipe.members. The caller may use every one of them.
    """

    load_id: str
    recipe: MergeRecipe
    sources: tuple[MemberSource, ...]


class AdapterPins(msgspec.Struct, frozen=True, array_like=True, tag="ap"):
    """All that this router wants to stay on the device, until it says otherwise or leaves.

    What is absent is loaded. The worker must have admitted them (AdapterLoad).
    """

    digests: tuple[str, ...]


class AdapterPrefetch(msgspec.Struct, frozen=True, array_like=True, tag="af"):
    """A hint that sequences of these will come soon, soonest first: bring them to host memory when
    nothing more urgent is to be done.

    Not answered; may be repeated, ignored, and name what the worker has not admitted.
    """

    digests: tuple[str, ...]


OrderAction = Literal[
    "load",  # to the device
    "evict",  # from device and host memory, once no sequence needs it
    "status",  # only tell
    "withdraw",  # nobody waits any more for the order of the same id: not answered, nor is that
]


class AdapterOrder(msgspec.Struct, frozen=True, array_like=True, tag="ao"):
    """Move admitted adapters between tiers. Answered by one AdapterReport, when it is done."""

    order_id: str
    action: OrderAction
    digests: tuple[str, ...]


class Inspect(msgspec.Struct, frozen=True, array_like=True, tag="in"):
    """What lies where, for people who look. Answered by one WorkerPicture.

    known: the version of `places` that the router has already (0 = none).
    """

    order_id: str
    known: int = 0


class WorkerHello(msgspec.Struct, frozen=True, array_like=True, tag="wh"):
    """The worker's first frame. credits: sequences this router may have in flight here."""

    worker_id: str
    epoch: int
    card_digest: str
    credits: int
    version: int = PROTOCOL_VERSION


class TokenLogprob(msgspec.Struct, frozen=True, array_like=True):
    """logprob: None only for a prompt's first token. top: (id, logprob), most likely first.

    rank: of a prompt's token, 1 = no token of the vocabulary is likelier; None where not counted.
    """

    token_id: int
    logprob: float | None
    top: tuple[tuple[int, float], ...] = ()
    rank: int | None = None


class TokenEvent(msgspec.Struct, frozen=True, array_like=True):
    """New tokens of one sequence. The event with `finish` set is the last, and the only such.

    index: position in the output of the first of token_ids. A stop token is included in token_ids.
    logprobs: parallel to token_ids when asked for.
    prompt_logprobs, cached_tokens: on the first event. load_s: there too, the seconds for which it
    waited for its adapter, if it did.
    """

    request_id: str
    attempt: int
    choice: int
    index: int
    token_ids: tuple[int, ...]
    finish: Finish | None = None
    logprobs: tuple[TokenLogprob, ...] | None = None
    prompt_logprobs: tuple[TokenLogprob, ...] | None = None
    cached_tokens: int | None = None
    error: ErrorCode | None = None
    message: str | None = None
    load_s: float | None = None


class StepEvents(msgspec.Struct, frozen=True, array_like=True, tag="se"):
    """All events of one engine step for one router."""

    step: int
    events: tuple[TokenEvent, ...]


LoadStage = Literal["fetching", "checking", "ready", "failed"]


class AdapterState(msgspec.Struct, frozen=True, array_like=True, tag="as"):
    """Progress of an AdapterLoad or AdapterMerge.

    Final: `ready` (manifest set), `failed` (error, message set).
    """

    load_id: str
    stage: LoadStage
    manifest: AdapterManifest | None = None
    error: AdapterErrorCode | None = None
    message: str | None = None
    violations: tuple[Violation, ...] = ()
    retry_after_s: float | None = None


class WorkerStatus(msgspec.Struct, frozen=True, array_like=True, tag="ws"):
    """Hints, twice a second. ready: the engine takes work. resident, loading: adapter digests.

    adapter_slots: adapters that may be on the device at once.
    silent: the engine gives no sign of life, or its step no end; its sequences are not lost, but
    had better go on elsewhere.
    credits: sequences this router may have in flight here from now on (0 = as before).
    rows: how many of them can be computed at once (0 = not known).
    load_bytes_s: how fast adapters came to the device lately (0 = not known).
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


TierStage = Literal["absent", "loading", "ready"]


class AdapterTiers(msgspec.Struct, frozen=True, array_like=True):
    """Where a worker has an adapter. slab_bytes: packed, 0 if not known.

    load_s: its last way to the device. idle_s: since a sequence last named it.
    """

    digest: str
    disk: bool
    host: TierStage
    device: TierStage
    pinned: bool
    slab_bytes: int = 0
    load_s: float | None = None
    idle_s: float | None = None


class AdapterReport(msgspec.Struct, frozen=True, array_like=True, tag="ar"):
    """Answers an AdapterOrder. error: why it was not carried out. tiers: as they are now."""

    order_id: str
    tiers: tuple[AdapterTiers, ...]
    error: str | None = None


class AdapterPlace(msgspec.Struct, frozen=True, array_like=True):
    """Where an adapter lies: (first extent, extents) of each unbroken row, in either arena.

    slab_bytes: packed, 0 if not known. load_s: its last way to the device.
    """

    digest: str
    device: TierStage
    host: TierStage
    pinned: bool
    slab_bytes: int
    load_s: float | None
    device_spans: tuple[tuple[int, int], ...]
    host_spans: tuple[tuple[int, int], ...]


class WorkerPicture(msgspec.Struct, frozen=True, array_like=True, tag="wp"):
    """Answers an Inspect: both arenas, and counts since the engine was started.

    in_use: adapters with sequences in flight here, and how many, whoever sent them.
    version: of `places`; None = as the router has them. places_left_out: above the bound.
    restarts: engines lost since the worker was started.
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


class ModelCard(msgspec.Struct, frozen=True):
    """All that a router needs of a model, fetched once over HTTP as JSON and cached by its digest.

    names: what `model` may say for the base itself; the first is shown. listed: those that
    `/v1/models` lists; () = the first. root: what the model is called where it comes from.
    tokenizer_json: the tokenizer's file, whole. chat_template: Jinja source, or None.
    named_templates: those that are not the default, by name. message_forms: how each template
    reads messages, the default by the name `default`; those left out cannot be used.
    special_tokens: `bos_token` and the like, by all names that the template may use.
    eos_token_ids: what ends its answers. max_context: prompt and output together.
    sampling_defaults: its authors' advice, by names of SamplingParams; suppressed_token_ids are
    never drawn. remarks: on advice that is not followed.
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

    @property
    def all_templates(self) -> dict[str, str]:
        """Sources of all chat templates by name."""
        default = {} if self.chat_template is None else {DEFAULT_TEMPLATE: self.chat_template}
        return default | self.named_templates


RouterFrame = (
    RouterHello
    | GenerateRequest
    | Abort
    | AdapterLoad
    | AdapterMerge
    | AdapterPins
    | AdapterOrder
    | AdapterPrefetch
    | Inspect
)
WorkerFrame = WorkerHello | StepEvents | AdapterState | WorkerStatus | AdapterReport | WorkerPicture

encode = msgspec.msgpack.Encoder().encode
decode_router_frame = msgspec.msgpack.Decoder(RouterFrame).decode
decode_worker_frame = msgspec.msgpack.Decoder(WorkerFrame).decode
