"""The device table (adapter slot, site) -> weight pointers, ranks and scales that the kernels read.

Owns the records' layout and their upload; the bytes they point to belong to whoever owns the arena.
"""

import struct
from collections.abc import Sequence

import torch

MAX_PROJECTIONS = 3
MAX_RANK = 256
POINTER_ALIGNMENT = 16

# One record is 64 bytes: a cache line never holds parts of two.
RECORD_WORDS = 8
_RECORD = struct.Struct("=4q4i3f4x")


class LoraTable:
    """One 64-byte record for each (slot, site), slots outermost.

    A record, by 8-byte words: 0 = address of the stacked A `[sum(ranks), in_features]`; 1-3 =
    addresses of B `[out_features, rank]`, one for each projection; 4-5 = int32 ranks of the
    projections and their sum; 6-7 = float32 scales. All zero = the adapter does not touch the site.

    `write` changes the host's copy; `upload` copies a slot's records to the device on the current
    stream, and `clear` does both. A slot must not be written again before its last upload ran, and
    not uploaded while a step that reads the slot may run.
    """

    def __init__(self, num_sites: int, num_slots: int, device: torch.device | str) -> None:
        if num_sites < 1 or num_slots < 1:
            raise ValueError(f"expected at least one site and slot, got {num_sites}, {num_slots}")
        self.num_sites = num_sites
        self.num_slots = num_slots
        self.device = torch.device(device)
        shape = (num_slots, num_sites, RECORD_WORDS)
        self.words = torch.zeros(shape, dtype=torch.int64, device=self.device)
        on_host = self.device.type == "cpu"
        self._host = self.words if on_host else torch.zeros(shape, dtype=torch.int64).pin_memory()
        self._records = memoryview(self._host.numpy()).cast("B")  # type: ignore[arg-type]
        self.ints = self.words.view(torch.int32)
        self.floats = self.words.view(torch.float32)

    def write(
        self,
        slot: int,
        site: int,
        a_ptr: int,
        b_ptrs: Sequence[int],
        ranks: Sequence[int],
        scales: Sequence[float],
    ) -> None:
        """Set one record; the sequences have one entry for each projection of the site (1 to 3).

        Addresses are device addresses of tensors aligned to 16 bytes; those of a projection of
        rank 0 are ignored. Raises ValueError for a slot, site, rank or address out of range.
        """
        self._check_slot(slot)
        if not 0 <= site < self.num_sites:
            raise ValueError(f"site {site} is not in 0..{self.num_sites - 1}")
        _check_record(a_ptr, b_ptrs, ranks, scales)
        at = (slot * self.num_sites + site) * _RECORD.size
        if not any(ranks):
            self._records[at : at + _RECORD.size] = bytes(_RECORD.size)
            return
        used = [b_ptr if rank else 0 for b_ptr, rank in zip(b_ptrs, ranks, strict=True)]
        none = (0,) * (MAX_PROJECTIONS - len(ranks))
        values = (a_ptr, *used, *none, *ranks, *none, sum(ranks), *scales, *none)
        # A tensor's elements one by one would take longer than the adapter's copy.
        _RECORD.pack_into(self._records, at, *values)

    def upload(self, slot: int) -> None:
        """Copy the slot's records to the device, asynchronously on the current stream."""
        self._check_slot(slot)
        if self._host is not self.words:
            self.words[slot].copy_(self._host[slot], non_blocking=True)

    def clear(self, slot: int) -> None:
        """Make the slot touch nothing, and upload that."""
        self._check_slot(slot)
        self._host[slot].zero_()
        self.upload(slot)

    def _check_slot(self, slot: int) -> None:
        if not 0 <= slot < self.num_slots:
            raise ValueError(f"slot {slot} is not in 0..{self.num_slots - 1}")


def _check_record(
    a_ptr: int, b_ptrs: Sequence[int], ranks: Sequence[int], scales: Sequence[float]
) -> None:
    if not 1 <= len(ranks) <= MAX_PROJECTIONS or not len(ranks) == len(b_ptrs) == len(scales):
        raise ValueError(
            f"expected 1 to {MAX_PROJECTIONS} ranks and as many B addresses and scales, "
            f"got {len(ranks)}, {len(b_ptrs)}, {len(scales)}"
        )
    if any(not 0 <= rank <= MAX_RANK for rank in ranks):
        raise ValueError(f"ranks {list(ranks)} are not all in 0..{MAX_RANK}")
    used = [a_ptr] * any(ranks) + [p for p, rank in zip(b_ptrs, ranks, strict=True) if rank]
    if any(p <= 0 or p % POINTER_ALIGNMENT for p in used):
        raise ValueError(f"addresses must be positive multiples of {POINTER_ALIGNMENT}: {used}")
