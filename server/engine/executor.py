"""The seam between policy and tensors: what an engine needs of a device."""

from collections.abc import Callable
from typing import NamedTuple, Protocol, TypeVar

import msgspec
import numpy as np

from adapters.manifest import SlabLayout
from server.engine.plan import SliceResult, StepPlan

# What callers are told of a copy that failed for no fault of the adapter's.
COPY_FAILED = "it could not be copied to the device"


class ExecutorLimits(msgspec.Struct, frozen=True):
    """What the executor allocated; constant for its life.

    max_rows: sequences that may hold a row at once. max_step_tokens: of one plan.
    adapter_slots: rows of the device table. arena_extents: extents of `extent_bytes` for adapters.
    max_guesses: tokens that a decode slice may compute beyond the row's last sample.
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
    max_guesses: int = 0


class Masks(NamedTuple):
    """Tokens that constrained slices of a step may draw.

    slices: places in the plan, ascending. bits: int32 `[len(slices), ceil(vocab / 32)]` of
    `Executor.mask_memory`; bit i % 32 of word i // 32 is set where token i may be drawn.
    """

    slices: list[int]
    bits: np.ndarray


class AdapterCopy(msgspec.Struct, frozen=True):
    """Copy a slab from the host arena to the device arena and write the slot's table rows.

    host_extents, device_extents: the first extent of each run of `layout.runs`, in either arena.
    """

    adapter_slot: int
    layout: SlabLayout
    host_extents: tuple[int, ...]
    device_extents: tuple[int, ...]


class CopyUsable(msgspec.Struct, frozen=True):
    """Steps launched from now on may use the slot: the device lets them wait for what is left of
    the copy. Its host block is still read, until CopyOver."""

    adapter_slot: int
    digest: str


class CopyOver(msgspec.Struct, frozen=True):
    """Nothing reads the host block any more. After CopyUsable, or instead of it with an error.

    copy_s: seconds that its bytes were on their way, without waits for others; 0 = unknown.
    """

    adapter_slot: int
    digest: str
    error: str | None = None
    copy_s: float = 0.0


CopyNews = CopyUsable | CopyOver


class Ticket(Protocol):
    """A launched step. `ready()` never blocks."""

    def ready(self) -> bool: ...


T = TypeVar("T", bound=Ticket)


class Executor(Protocol[T]):
    """Launch and collect are apart so that the host plans step n+1 while the device runs step n.

    Steps run in launch order. A row, page or extent freed by a plan may be reused by the next one.
    """

    limits: ExecutorLimits
    summary: tuple[str, ...]  # for a person: memory split, back ends

    def launch(self, plan: StepPlan, meanwhile: Callable[[], None] | None = None) -> T:
        """meanwhile: to be called now and then where this takes long; it may collect steps before,
        and start and poll copies. Raises anything when the device fails: then all running sequences
        end, steps in flight are never collected, and the next plan may free rows that were never
        started.
        """
        ...

    def mask_memory(self, count: int) -> np.ndarray:
        """int32 `[count, ceil(vocab / 32)]` of any content, to be filled for the next `constrain`
        and not kept beyond that."""
        ...

    def constrain(self, ticket: T, masks: Masks) -> None:
        """Draw for the constrained slices of a launched step, once and before the next launch; the
        ticket is ready only after that. Slices without a mask may draw any token."""
        ...

    def collect(self, ticket: T) -> list[SliceResult]:
        """Wait for the step; one result per slice, in order."""
        ...

    def drain(self) -> None:
        """After a failure: wait until nothing runs of what was launched and is not collected.
        Raises anything when the device is lost for good."""
        ...

    def start_copy(self, copy: AdapterCopy) -> None:
        """Begin a copy beside running steps; never blocks them. Copies write in the order of their
        start: one may take the place of another that is usable, though that is not over."""
        ...

    def poll_copies(self) -> list[CopyNews]:
        """What has become of copies since the last call; never blocks. Raises anything when the
        device is lost for good, as it is when a copy fails that is usable already."""
        ...

    def close(self) -> None: ...
