"""The interface between scheduling and tensors: what the engine needs of a device."""

from collections.abc import Callable
from typing import Literal, NamedTuple, Protocol, TypeVar

import msgspec
import numpy as np

from loraplex.adapters.base import MAX_NEW_IDS
from loraplex.adapters.manifest import SlabLayout
from loraplex.server.engine.plan import SliceResult, StepPlan
from loraplex.server.protocol import AnyForm, Grid, RoutingForm

# The error message for a copy that failed through no fault of the adapter.
COPY_FAILED = "it could not be copied to the device"


class MemoryLine(NamedTuple):
    """One use of memory: of a device, or of what lies below it."""

    name: str
    nbytes: int
    where: Literal["device", "host", "disk"] = "device"


class PictureLimits(msgspec.Struct, frozen=True):
    """Sizes of what reads pictures. token_id: the placeholder of a token of a picture. form: of its
    placeholders. columns: numbers of a patch. most_tokens: placeholders of one picture. num_blocks,
    block_tokens: of the cache of results, and of one of its blocks. chunk: patches times layers
    that are computed at once, between two steps. is_flat: tokens of a picture turn by their
    positions, as text does. tower_layer: the number, in slabs, of the tower's first layer.
    is_joined: tokens of a picture see each other, so that one step computes all of them.
    """

    token_id: int
    form: AnyForm
    columns: int
    most_tokens: int
    num_blocks: int
    block_tokens: int
    chunk: int
    is_flat: bool = False
    tower_layer: int = 1 << 20
    is_joined: bool = False

    def blocks(self, tokens: int) -> int:
        """Blocks that so many tokens of a picture take."""
        return -(-tokens // self.block_tokens)


class ExecutorLimits(msgspec.Struct, frozen=True):
    """Sizes that the executor allocated; constant for its life.

    max_rows: sequences that may hold a row at once. max_step_tokens: of one plan. adapter_slots:
    adapters on the device at once. arena_extents: extents of `extent_bytes` there. max_decodes:
    tokens that the decode slices of a step may have in all; 0 = no slice has a draft.

    short_context: a sequence of more tokens has other keys and values, from its first token on. A
    row is of one kind, that of the tokens it was started with; None = there is one kind.

    page_windows: of each group of layers, which has pages of its own, the tokens that its layers
    see at most; None = all; () = no layer keeps keys and values. Pages wholly behind the window of
    every token to come are never read.

    num_classes: of the base's score head; 0 = it has none. writes: whether it gives tokens.
    is_causal: whether tokens see none behind them. Else a prompt is computed in one step.
    has_states: a row has a state of its tokens so far, but for those of its last draft. It is
    that of no other sequence, and it cannot go back: it takes a token once. num_snapshots: copies
    of states that the device can keep.

    weight_bytes, token_bytes: of all weights on one device, and of the keys and values of a token
    there; estimates, by which a step's time is shared. num_devices: that compute a step together.
    pictures: None = the base reads none.

    host_pages, disk_pages, host_snapshots, disk_snapshots: that host memory and the disk can keep.
    routing: of layers with experts, all of which choose as many; None = there are none.
    """

    num_pages: int
    page_size: int
    max_rows: int
    max_step_tokens: int
    max_context: int
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    adapter_slots: int
    arena_extents: int
    extent_bytes: int
    max_decodes: int = 0
    short_context: int | None = None
    page_windows: tuple[int | None, ...] = (None,)
    num_classes: int = 0
    writes: bool = True
    is_causal: bool = True
    has_states: bool = False
    num_snapshots: int = 0
    weight_bytes: int = 0
    token_bytes: int = 0
    num_devices: int = 1
    pictures: PictureLimits | None = None
    host_pages: int = 0
    disk_pages: int = 0
    host_snapshots: int = 0
    disk_snapshots: int = 0
    routing: RoutingForm | None = None

    @property
    def table_slots(self) -> int:
        """Slots of the device table: those of adapters, and behind them a row's for each scale."""
        return self.adapter_slots + self.max_rows

    @property
    def most_ids(self) -> int:
        """The most ids of any adapter: those of the base's tables, and new ones."""
        return self.vocab_size + MAX_NEW_IDS

    @property
    def most_decodes(self) -> int:
        """Tokens of slices of one token that a step computes at most, those of drafts included."""
        return max(self.max_rows, self.max_decodes)


class Masks(NamedTuple):
    """Tokens that constrained slices of a step may draw.

    slices: places in the plan, ascending, each as often as the slice draws: once, and once more for
    each token of its draft. bits: int32 `[len(slices), words]` of `Executor.mask_memory`; bit
    i % 32 of word i // 32 is set where token i may be drawn. A mask of nothing ends the draft: that
    draw and those behind give nothing. Where it is the first of a slice, the slice's result says
    nothing, and a later slice computes its last known token again.
    """

    slices: list[int]
    bits: np.ndarray


class AdapterCopy(msgspec.Struct, frozen=True, array_like=True, tag="ac"):
    """Copy a slab from the host arena to the device arena and write the slot's table rows.

    host_extents: the first extent of each run of `layout.all_runs` in the host arena.
    device_extents: of each run of `layout.runs` in the arena of every device.
    """

    adapter_slot: int
    layout: SlabLayout
    host_extents: tuple[int, ...]
    device_extents: tuple[int, ...]

    def of_shard(self, index: int) -> "AdapterCopy":
        """The part of the copy that one device makes."""
        runs = len(self.layout.runs)
        part = self.host_extents[index * runs : (index + 1) * runs]
        return msgspec.structs.replace(self, host_extents=part)


class CopyUsable(msgspec.Struct, frozen=True):
    """Steps launched from now on may use the slot: the device makes them wait for the rest of the
    copy. The host block is still read, or written, until CopyOver."""

    adapter_slot: int
    digest: str


class CopyOver(msgspec.Struct, frozen=True, array_like=True, tag="ov"):
    """Report that a copy from the host arena to the device has ended: it reads and writes the host
    block no more. It follows CopyUsable; where the copy failed it comes instead, with `error`.

    copy_s: seconds of the transfer, without waits for other transfers; 0 = unknown. is_finished:
    the device has written its results into the host block (`SlabLayout.is_finished`).
    """

    adapter_slot: int
    digest: str
    error: str | None = None
    copy_s: float = 0.0
    is_finished: bool = False


# Where pages go: from the device to host memory and back, from there to disk and back; `drop`
# removes them from disk.
PageWay = Literal["out", "in", "write", "read", "drop"]


class PageCopies(msgspec.Struct, frozen=True, array_like=True, tag="gc"):
    """Copies of whole pages, which begin and end together. They write in any order.

    pages: of the device, of the ways out and in. slots: in host memory; none where pages are
    dropped. keys: names on disk; none of the ways out and in. The lists that there are run
    parallel. of_states: pages and slots are those of snapshots of states.
    """

    number: int
    way: PageWay
    pages: tuple[int, ...] = ()
    slots: tuple[int, ...] = ()
    keys: tuple[bytes, ...] = ()
    of_states: bool = False


class PagesCopied(msgspec.Struct, frozen=True, array_like=True, tag="pc"):
    """Copies of this number are over in every process. failed: places in their lists: of what was
    not written, or could not be read as it was written."""

    number: int
    failed: tuple[int, ...] = ()


CopyNews = CopyUsable | CopyOver | PagesCopied


class CopySums(msgspec.Struct, frozen=True, array_like=True, tag="cs"):
    """Numbers that the devices of a group add up before any of them uses a copy.

    numbers: one device's, or the sums; float32, of the device's byte order; none where all wait for
    each other.
    """

    digest: str
    numbers: bytes


class PictureCopy(msgspec.Struct, frozen=True, array_like=True, tag="pt"):
    """Bring a picture's patches to the device. grid, segment, rows, columns: as of `EncodePicture`.
    blocks: of the cache, where the results are to lie. adapter_slot: of the adapter that changes
    the tower, and scale: which multiplies what it adds; -1 = none does."""

    picture: str
    grid: Grid
    segment: int
    rows: int
    columns: int
    blocks: tuple[int, ...]
    adapter_slot: int = -1
    scale: float = 1.0


class PictureIn(msgspec.Struct, frozen=True, array_like=True, tag="pi"):
    """A copy of a picture's patches is over. block: the first of its blocks. error: why the device
    has not got the patches, and has forgotten the picture; None = it has them."""

    block: int
    error: str | None = None


class Ticket(Protocol):
    """A launched step. `ready()` never blocks."""

    def ready(self) -> bool: ...


class TowerTicket(Ticket, Protocol):
    """Launched work of the tower. is_last: the results of its pictures are complete. `seconds()`:
    for how long it kept the device busy, once it is ready."""

    @property
    def is_last(self) -> bool: ...

    def seconds(self) -> float: ...


T = TypeVar("T", bound=Ticket)


class Executor(Protocol[T]):
    """Launch and collect are apart so that the host plans step n+1 while the device runs step n.

    Steps run in launch order. A row, page or extent freed by a plan may be reused by the next one.
    """

    limits: ExecutorLimits
    summary: tuple[str, ...]  # lines for a person: back ends, times of the start
    memory: tuple[MemoryLine, ...]  # what fills the device; () = nobody counts
    stored_pages: tuple[bytes, ...]  # keys of pages on disk, those longest there first
    stored_snapshots: tuple[bytes, ...]  # as of pages

    def launch(self, plan: StepPlan, meanwhile: Callable[[], None] | None = None) -> T:
        """Begin a step.

        meanwhile: called now and then where a launch takes long. It may collect earlier steps, and
        start and poll copies.
        Raises anything when the device fails. Then all running sequences end, steps in flight are
        never collected, and the next plan may free rows that were never started.
        """
        ...

    def mask_memory(self, count: int, words: int) -> np.ndarray:
        """Allocate memory for masks: int32 `[count, words]` of undefined content. The caller fills
        it for the next `constrain` and does not keep it. words: as of
        `loraplex.server.constraints.rules.step_words`.
        """
        ...

    def constrain(self, ticket: T, masks: Masks) -> None:
        """Draw for the constrained slices of a launched step. This happens once, before the next
        launch; the ticket is not ready before. Slices without a mask may draw any token."""
        ...

    def collect(self, ticket: T) -> list[SliceResult]:
        """Wait for the step, and return one result per slice, in order."""
        ...

    def wait_idle(self) -> None:
        """Wait, after a failure, until no launched step runs any more. Raises anything when the
        device is lost for good.
        """
        ...

    def start_copy(self, copy: AdapterCopy) -> None:
        """Begin a copy beside running steps, without blocking them. Copies write in the order of
        their start. A copy may overwrite another that is usable but not over."""
        ...

    def copy_pages(self, copies: PageCopies) -> None:
        """Begin copies of pages beside running steps. No step in flight writes what is read, or
        reads what is written. Steps may use pages once `poll_copies` says that they are there."""
        ...

    def poll_copies(self) -> list[CopyNews]:
        """News of copies since the last call; never blocks.

        Raises anything when the device is lost for good. A failure of a copy that is already usable
        is such a loss.
        """
        ...

    def start_picture(self, copy: PictureCopy) -> None:
        """Begin to bring a picture's patches to the device, without blocking steps."""
        ...

    def poll_pictures(self) -> list[PictureIn]:
        """News of pictures since the last call, in the order of their start; never blocks. Raises
        anything when the device is lost for good."""
        ...

    def encode(self, pictures: int) -> TowerTicket:
        """Launch about `PictureLimits.chunk` of the tower's work, behind the steps launched so far.
        Where no pictures are under way, the oldest ones whose patches are there, so many, begin
        together. Behind the last work their results go to their blocks, for steps that are launched
        later. Raises anything when the device fails; `wait_idle` then forgets all pictures on their
        way.
        """
        ...

    def close(self) -> None: ...
