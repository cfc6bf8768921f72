"""The pipe between a worker's shell and its engine process: typed msgpack frames. Pure.

Framing on the stream socket: a 4-byte little-endian length, then the frame.
"""

from typing import Literal

import msgspec

from adapters.manifest import SlabLayout
from server.engine.memory.eviction import EvictionReason
from server.protocol import GenerateRequest, TokenEvent


class Submit(msgspec.Struct, frozen=True, array_like=True, tag="su"):
    """Take this sequence. key: the shell's own number for it, used in both directions."""

    key: int
    request: GenerateRequest


class AbortSequence(msgspec.Struct, frozen=True, array_like=True, tag="ab"):
    key: int


class SlabStaged(msgspec.Struct, frozen=True, array_like=True, tag="ss"):
    """It lies in the host arena: NeedSlab's answer, or without being asked, for a sequence that was
    just submitted. Answered by one SlabReleased. extents: first extent of each run there.

    load_s: seconds of reading it from disk; 0 if it was there already.
    """

    layout: SlabLayout
    extents: tuple[int, ...]
    load_s: float = 0.0


class SlabMissing(msgspec.Struct, frozen=True, array_like=True, tag="sm"):
    """Answers NeedSlab: it cannot be staged. Its waiting sequences end in an error."""

    digest: str
    message: str


class PinAdapters(msgspec.Struct, frozen=True, array_like=True, tag="pa"):
    """These and no others are not to be evicted; those that are absent are to be loaded."""

    digests: tuple[str, ...]


class PreloadAdapter(msgspec.Struct, frozen=True, array_like=True, tag="pl"):
    """Bring it to the device though no sequence asks for it. Answered by AdapterSettled.

    order: the shell's own number for it.
    """

    order: int
    digest: str


class WithdrawPreload(msgspec.Struct, frozen=True, array_like=True, tag="wp"):
    """Nobody waits for this order's end any more. Not answered."""

    order: int
    digest: str


class EvictAdapter(msgspec.Struct, frozen=True, array_like=True, tag="ea"):
    """Free it on the device as soon as no sequence needs it. Answered by AdapterSettled.

    order: as above.
    """

    order: int
    digest: str


class Shutdown(msgspec.Struct, frozen=True, array_like=True, tag="sd"):
    """Finish nothing more and leave."""


class EngineReady(msgspec.Struct, frozen=True, array_like=True, tag="er"):
    """Everything is allocated and warm. summary: lines for a person (memory split, back ends)."""

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


class EngineFailed(msgspec.Struct, frozen=True, array_like=True, tag="ef"):
    """It could not start; message says why and what to do."""

    message: str


class NeedSlab(msgspec.Struct, frozen=True, array_like=True, tag="ns"):
    """The engine wants this adapter's bytes in the host arena. It asks for none that it was given
    and has not released; what is on its way to it unasked answers this, too."""

    digest: str


class AdapterPlaced(msgspec.Struct, frozen=True, array_like=True, tag="al"):
    """It has room on the device from now on: (first extent, extents) of each unbroken row."""

    digest: str
    spans: tuple[tuple[int, int], ...]


class SlabReleased(msgspec.Struct, frozen=True, array_like=True, tag="sr"):
    """The copy to the device is over (or was given up): the host block is no longer read.

    copy_s: seconds that the bytes were on their way; 0 = unknown; None = they were not copied.
    """

    digest: str
    copy_s: float | None = None


class AdapterSettled(msgspec.Struct, frozen=True, array_like=True, tag="at"):
    """A preload or an eviction is over. error: why it was not carried out."""

    order: int
    error: str | None = None


class SequenceEvent(msgspec.Struct, frozen=True, array_like=True):
    key: int
    event: TokenEvent


class EngineStats(msgspec.Struct, frozen=True, array_like=True):
    """Gauges after a step. resident: adapters on the device. evictions: from there, by reason."""

    free_pages: int = 0
    running: int = 0
    waiting: int = 0
    resident: int = 0
    loading: tuple[str, ...] = ()
    preemptions: int = 0
    prefix_hit_tokens: int = 0
    prompt_tokens: int = 0
    adapter_bytes: int = 0
    evictions: dict[EvictionReason, int] = {}


# Why a grammar was refused: it is no grammar; it costs more than its limits; the model's tokens are
# not known; no process could try it out.
GrammarFault = Literal["wrong", "costly", "no_vocabulary", "unavailable"]


class GrammarCompiled(msgspec.Struct, frozen=True, array_like=True):
    """One that was in no cache. seconds: of compiling it. fault: None = it was compiled."""

    seconds: float
    fault: GrammarFault | None


class StepWork(msgspec.Struct, frozen=True, array_like=True):
    """What a step computed, and the time that the engine's thread gave to steps since the last.

    adapters: distinct ones in it. adapter_tokens: of sequences that have one.
    phases_s: seconds of planning, launching, waiting for the device, committing, masks.
    constrained: sequences that had a mask since the last.
    """

    sequences: int
    adapters: int
    adapter_tokens: int
    phases_s: tuple[float, float, float, float, float]
    constrained: int = 0


class StepOutput(msgspec.Struct, frozen=True, array_like=True, tag="so"):
    """What one step produced. step_s: from launch to commit. work: None without a step. resident:
    digests of the adapters on the device; None = as before, none before the first. compiled: since
    the last.

    Also sent when idle stats change, and every second while sequences wait for anything.
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
    """Nothing else was to be said for a while. It comes from beside the step loop: the process
    runs, whatever a step is doing.
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
    | Shutdown
)
FromEngine = (
    EngineReady
    | EngineFailed
    | NeedSlab
    | AdapterPlaced
    | SlabReleased
    | AdapterSettled
    | StepOutput
    | Alive
)

encode = msgspec.msgpack.Encoder().encode
decode_to_engine = msgspec.msgpack.Decoder(ToEngine).decode
decode_from_engine = msgspec.msgpack.Decoder(FromEngine).decode
