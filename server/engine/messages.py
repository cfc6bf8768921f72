"""The pipe between a worker and its engine process: typed msgpack frames. Pure.

Framing on the stream socket: a 4-byte little-endian length, then the frame.
"""

from typing import Literal

import msgspec

from loraplex.adapters.manifest import SlabLayout
from loraplex.server.engine.executor import MemoryLine, PageWay
from loraplex.server.engine.memory.residency import EvictionReason
from loraplex.server.protocol import ErrorCode, GenerateRequest, Grid, PictureSpan, TokenEvent


class Submit(msgspec.Struct, frozen=True, array_like=True, tag="su"):
    """Take this sequence. key: the worker's number of the sequence, used in both directions."""

    key: int
    request: GenerateRequest


class AbortSequence(msgspec.Struct, frozen=True, array_like=True, tag="ab"):
    key: int


class SlabStaged(msgspec.Struct, frozen=True, array_like=True, tag="ss"):
    """A slab is in the host arena. It answers NeedSlab, or comes unasked for a sequence that was
    just submitted. Answered by one SlabReleased.

    extents: first extent of each run in the host arena. load_s: seconds of reading the slab from
    disk; 0 if it was in host memory already.
    """

    layout: SlabLayout
    extents: tuple[int, ...]
    load_s: float = 0.0


class SlabMissing(msgspec.Struct, frozen=True, array_like=True, tag="sm"):
    """Answers NeedSlab: the slab cannot be staged. Sequences that wait for it end in an error."""

    digest: str
    message: str


class PinAdapters(msgspec.Struct, frozen=True, array_like=True, tag="pa"):
    """Keeps these adapters, and no others, from eviction. Absent ones are loaded."""

    digests: tuple[str, ...]


class PreloadAdapter(msgspec.Struct, frozen=True, array_like=True, tag="pl"):
    """Bring an adapter to the device though no sequence asks for it. Answered by AdapterSettled.

    order: the worker's number of this order.
    """

    order: int
    digest: str


class WithdrawPreload(msgspec.Struct, frozen=True, array_like=True, tag="wp"):
    """The end of this preload is not awaited any more. Not answered."""

    order: int
    digest: str


class EvictAdapter(msgspec.Struct, frozen=True, array_like=True, tag="ea"):
    """Evict an adapter from the device as soon as no sequence needs it. Answered by AdapterSettled.

    order: the worker's number of this order.
    """

    order: int
    digest: str


class EncodePicture(msgspec.Struct, frozen=True, array_like=True, tag="ep"):
    """A picture's patches are in host memory. It answers PicturesWanted, and is answered by one
    PictureTaken.

    picture: SHA-256 of its file, hexadecimal. grid: patches by (time, height, width). segment: the
    first byte of float32 `[rows, columns]` in the memory file whose beginning is the host arena, in
    the order in which transformers' processor of the base gives `pixel_values`.
    """

    picture: str
    grid: Grid
    segment: int
    rows: int
    columns: int


class PictureFailed(msgspec.Struct, frozen=True, array_like=True, tag="pf"):
    """Answers PicturesWanted: there are no patches. Sequences that wait for the picture of this
    grid end in this error with this message."""

    picture: str
    grid: Grid
    message: str
    error: ErrorCode = "invalid_image"


class Shutdown(msgspec.Struct, frozen=True, array_like=True, tag="sd"):
    """Finish nothing more and leave."""


class StartProgress(msgspec.Struct, frozen=True, array_like=True, tag="sp"):
    """The stage of an engine on its way to EngineReady.

    done, total: of units; total 0 = uncounted.
    """

    stage: str
    done: float = 0.0
    total: float = 0.0
    unit: str = ""

    def __str__(self) -> str:
        """Describe the progress for a person."""
        if not self.total:
            return self.stage
        done, total = (f"{round(number, 1):g}" for number in (self.done, self.total))
        return f"{self.stage}: {done} of {total} {self.unit}"


class EngineReady(msgspec.Struct, frozen=True, array_like=True, tag="er"):
    """Report that the engine is ready: all memory is allocated and warm. summary: lines for a
    person (memory split, back ends). shards: devices that share the model; arena_bytes, memory: of
    each. host_pages, disk_pages: pages that may lie below the device.
    """

    total_pages: int
    page_size: int
    max_rows: int
    max_context: int
    arena_bytes: int
    extent_bytes: int
    dtype: str
    device: str
    summary: tuple[str, ...] = ()
    adapter_slots: int = 0
    shards: int = 1
    memory: tuple[MemoryLine, ...] = ()
    host_pages: int = 0
    disk_pages: int = 0


class EngineFailed(msgspec.Struct, frozen=True, array_like=True, tag="ef"):
    """The engine could not start; message says why and what to do."""

    message: str


class NeedSlab(msgspec.Struct, frozen=True, array_like=True, tag="ns"):
    """The engine wants this adapter's bytes in the host arena. It does not ask for a slab that it
    holds. A slab that is coming unasked answers this, too."""

    digest: str


class AdapterPlaced(msgspec.Struct, frozen=True, array_like=True, tag="al"):
    """The adapter has room on the device. spans: (first extent, extents) of each unbroken row."""

    digest: str
    spans: tuple[tuple[int, int], ...]


class SlabReleased(msgspec.Struct, frozen=True, array_like=True, tag="sr"):
    """The copy to the device is over, or was given up: the host block is left alone.

    copy_s: seconds of the transfer; 0 = unknown; None = nothing was copied. is_finished: as of
    CopyOver.
    """

    digest: str
    copy_s: float | None = None
    is_finished: bool = False


class AdapterSettled(msgspec.Struct, frozen=True, array_like=True, tag="at"):
    """A preload or an eviction is over. error: why it was not carried out."""

    order: int
    error: str | None = None


class PicturesWanted(msgspec.Struct, frozen=True, array_like=True, tag="pw"):
    """The sequence waits for the patches of pictures, each named by one of its spans. Those that
    the device holds or that are coming are not among them; another sequence may have asked for the
    same ones."""

    key: int
    spans: tuple[PictureSpan, ...]


class PictureTaken(msgspec.Struct, frozen=True, array_like=True, tag="pt"):
    """The segment of an EncodePicture is not read any more. error: why the device has not got the
    picture; the sequences that wait for it end."""

    picture: str
    segment: int
    error: str | None = None


class SequenceEvent(msgspec.Struct, frozen=True, array_like=True):
    key: int
    event: TokenEvent


class DeviceUse(msgspec.Struct, frozen=True, array_like=True):
    """Seconds of all devices since the engine's start. All but copies add up to the time for which
    steps kept them busy.

    adapters, base: of tokens on which an adapter acts, and of others. late: of steps whose
    sequences had all ended before their results came, and of pictures that nobody waited for any
    more. copies: of copies of adapters, beside steps. pictures: of the tower.
    """

    adapters: float = 0.0
    base: float = 0.0
    late: float = 0.0
    copies: float = 0.0
    pictures: float = 0.0


class SwapStats(msgspec.Struct, frozen=True, array_like=True):
    """Pages below the device. host, disk: how many are there now. The others are counts since the
    start: of pages that were copied, by way; of those whose copy failed, since a disk was full or a
    file was not as it was written; of those that sequences waited for.
    """

    host: int = 0
    disk: int = 0
    recalled: int = 0
    copied: dict[PageWay, int] = {}
    failed: dict[PageWay, int] = {}


class EngineStats(msgspec.Struct, frozen=True, array_like=True):
    """Gauges after a step. resident: adapters on the device. evictions: counts by reason. swaps,
    state_swaps: of pages, and of snapshots of states as if these were pages."""

    free_pages: int = 0
    running: int = 0
    waiting: int = 0
    resident: int = 0
    loading: tuple[str, ...] = ()
    preemptions: int = 0
    prefix_hit_tokens: int = 0
    prompt_tokens: int = 0
    adapter_bytes: int = 0
    draft_tokens: int = 0
    accepted_draft_tokens: int = 0
    evictions: dict[EvictionReason, int] = {}
    device_use: DeviceUse = DeviceUse()
    swaps: SwapStats = SwapStats()
    state_swaps: SwapStats = SwapStats()


# Why a grammar was refused: it is no grammar; it costs more than the limits allow; the model's
# tokens are unknown; no process could check it.
GrammarFault = Literal["wrong", "costly", "no_vocabulary", "unavailable"]


class GrammarCompiled(msgspec.Struct, frozen=True, array_like=True):
    """A compilation of a grammar that was in no cache. seconds: its time. fault: None = success."""

    seconds: float
    fault: GrammarFault | None


class StepWork(msgspec.Struct, frozen=True, array_like=True):
    """The work of a step, and how the engine's thread spent its time since the last report.

    sequences: slices of the step. adapters: distinct adapters. adapter_tokens: tokens of sequences
    with an adapter. phases_s: seconds of planning, launching, waiting for the device, committing,
    masks. constrained: tokens that were drawn under a mask since the last report.
    """

    sequences: int
    adapters: int
    adapter_tokens: int
    phases_s: tuple[float, float, float, float, float]
    constrained: int = 0


class StepOutput(msgspec.Struct, frozen=True, array_like=True, tag="so"):
    """The results of one step. step_s: seconds from launch to commit. work: None without a step.

    resident: digests of the adapters on the device; None = unchanged (at first there are none).
    compiled: compilations since the last report. Also sent when stats change without a step, and
    every second while sequences wait.
    """

    step: int
    events: tuple[SequenceEvent, ...]
    stats: EngineStats
    step_s: float
    num_tokens: int
    work: StepWork | None = None
    resident: tuple[str, ...] | None = None
    compiled: tuple[GrammarCompiled, ...] = ()


class Alive(msgspec.Struct, frozen=True, array_like=True, tag="hb"):
    """The process runs. A thread beside the step loop sends this when that thread has sent nothing
    else for a while, whatever a step is doing.
    """


ToEngine = (
    Submit
    | AbortSequence
    | SlabStaged
    | SlabMissing
    | PinAdapters
    | PreloadAdapter
    | WithdrawPreload
    | EvictAdapter
    | EncodePicture
    | PictureFailed
    | Shutdown
)
FromEngine = (
    StartProgress
    | EngineReady
    | EngineFailed
    | NeedSlab
    | AdapterPlaced
    | SlabReleased
    | AdapterSettled
    | PicturesWanted
    | PictureTaken
    | StepOutput
    | Alive
)

encode = msgspec.msgpack.Encoder().encode
decode_to_engine = msgspec.msgpack.Decoder(ToEngine).decode
decode_from_engine = msgspec.msgpack.Decoder(FromEngine).decode
