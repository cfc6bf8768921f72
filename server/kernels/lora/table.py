"""Device tables (adapter slot, site) -> weight pointers, ranks and scales that the kernels read.

Owns the records' layout and their upload; the bytes they point to belong to whoever owns the arena.
"""

import numpy as np
import torch
from numpy.typing import ArrayLike

MAX_PROJECTIONS = 3
MAX_RANK = 256
# Multiples of 8 up to one of these are padded to it, and a program holds them as a whole.
RANK_BLOCKS = (16, 32)
POINTER_ALIGNMENT = 16

# One record is 64 bytes: a cache line never holds parts of two.
RECORD_WORDS = 8
INT32_RANKS = 2 * (1 + MAX_PROJECTIONS)
FLOAT32_SCALES = INT32_RANKS + MAX_PROJECTIONS + 1
WIDEST = FLOAT32_SCALES + MAX_PROJECTIONS


class DeviceTable:
    """Words of each slot on the device, and the host's copy, which `write` and `clear` change.

    `upload` copies a slot's words to the device on the current stream. A slot must not be written
    again before its last upload ran, and not uploaded while a step that reads the slot may run.
    words: int64 `[slots, sites, ...]`.
    """

    def __init__(self, shape: tuple[int, ...], device: torch.device | str) -> None:
        self.num_slots, self.num_sites = shape[:2]
        self.device = torch.device(device)
        self.words = torch.zeros(shape, dtype=torch.int64, device=self.device)
        on_host = self.device.type == "cpu"
        self._host = self.words if on_host else torch.zeros(shape, dtype=torch.int64).pin_memory()
        self._records = self._host.numpy()

    def upload(self, slot: int) -> None:
        """Copy the slot's words to the device, asynchronously on the current stream."""
        self._check_slot(slot)
        if self._host is not self.words:
            self.words[slot].copy_(self._host[slot], non_blocking=True)

    def clear(self, slot: int) -> None:
        """Make the slot touch nothing."""
        self._check_slot(slot)
        self._records[slot] = 0

    def check_site(self, site: int) -> None:
        """Check that the table has the site. Raises ValueError where it has not."""
        if not 0 <= site < self.num_sites:
            raise ValueError(f"site {site} is not in 0..{self.num_sites - 1}")

    def _check_slot(self, slot: int) -> None:
        if not 0 <= slot < self.num_slots:
            raise ValueError(f"slot {slot} is not in 0..{self.num_slots - 1}")


class LoraTable(DeviceTable):
    """Table of LoRA weights on the device. One 64-byte record for each (slot, site), slots
    outermost.

    A record, by 8-byte words: 0 = address of the stacked A `[sum(ranks), in_features]`; 1-3 =
    addresses of B `[out_features, rank]`, one for each projection; 4-5 = int32 ranks of the
    projections and the rows of A; 6-7 = float32 scales. Ranks of zero = the adapter does not touch
    the site. The last half word of a slot's first record is the largest rank of any of its
    projections.

    Of experts A and B are those of the first; those of the others follow, each of the same size. A
    has fewer rows than the sum of the ranks where all projections read the same rows.
    """

    def __init__(self, num_sites: int, num_slots: int, device: torch.device | str) -> None:
        if num_sites < 1 or num_slots < 1:
            raise ValueError(f"expected at least one site and slot, got {num_sites}, {num_slots}")
        super().__init__((num_slots, num_sites, RECORD_WORDS), device)
        self.ints = self.words.view(torch.int32)
        self.floats = self.words.view(torch.float32)

    @property
    def tensors(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """The table as kernels take it: the words, and the same as int32 and float32."""
        return self.words, self.ints, self.floats

    def write(
        self,
        slot: int,
        sites: ArrayLike,
        a_ptrs: ArrayLike,
        b_ptrs: ArrayLike,
        ranks: ArrayLike,
        scales: ArrayLike,
        a_ranks: ArrayLike | None = None,
    ) -> None:
        """Set the records of some of the slot's sites, or of one.

        sites, a_ptrs: `[n]`, or a number. b_ptrs, ranks, scales: `[n, p]`, or `[p]`, for 1 to 3
        projections; a site that has fewer has rank 0 in the others. a_ranks: `[n]`, or a number:
        rows of A; None = the sums of the ranks. Addresses are device addresses of tensors aligned
        to 16 bytes; those of a projection of rank 0 are ignored.
        Raises ValueError for a slot, site, rank or address out of range, and then changes nothing.
        """
        self._check_slot(slot)
        rows = np.atleast_1d(np.asarray(sites, dtype=np.int64))
        for site in rows[(rows < 0) | (rows >= self.num_sites)][:1]:
            raise ValueError(f"site {site} is not in 0..{self.num_sites - 1}")
        a_of = np.atleast_1d(np.asarray(a_ptrs, dtype=np.int64))
        b_of = np.atleast_2d(np.asarray(b_ptrs, dtype=np.int64))
        rank_of = np.atleast_2d(np.asarray(ranks, dtype=np.int64))
        scale_of = np.atleast_2d(np.asarray(scales, dtype=np.float32))
        _check_shapes(rows, a_of, b_of, rank_of, scale_of)
        rows_of_a = rank_of.sum(axis=1) if a_ranks is None else np.atleast_1d(np.asarray(a_ranks))
        if rows_of_a.shape != rows.shape:
            raise ValueError(f"expected {len(rows)} ranks of A, got {rows_of_a.shape}")
        self._records[slot, rows] = _pack(a_of, b_of, rank_of, scale_of, rows_of_a)
        ints = self._records[slot].view(np.int32)
        ints[0, WIDEST] = ints[:, INT32_RANKS : INT32_RANKS + MAX_PROJECTIONS].max()

    def scale(self, slot: int, source_slot: int, scale: float) -> None:
        """Set the slot's records to those of another one, with all scales multiplied."""
        self._check_slot(slot)
        self._check_slot(source_slot)
        self._records[slot] = self._records[source_slot]
        floats = self._records[slot].view(np.float32)
        floats[:, FLOAT32_SCALES : FLOAT32_SCALES + MAX_PROJECTIONS] *= np.float32(scale)

    def check_slots(self, num_slots: int) -> None:
        """Check that the table has as many slots as segments know. Raises ValueError."""
        if num_slots > self.num_slots:
            raise ValueError(f"segments of {num_slots} slots, a table of {self.num_slots}")


class VectorTable(DeviceTable):
    """Table of adapters' factors and addends for outputs. One address for each (slot, site), slots
    outermost: of float32 `[2, out_features]`, by which a row of the base's product is
    multiplied, and what is then added. 0 = the adapter has none.
    """

    def __init__(self, num_sites: int, num_slots: int, device: torch.device | str) -> None:
        super().__init__((num_slots, num_sites), device)

    def write(self, slot: int, sites: np.ndarray, addresses: np.ndarray) -> None:
        """Write the addresses of all the slot's sites; sites that are not named have none.

        Raises ValueError for an address that is not aligned.
        """
        for address in addresses[(addresses <= 0) | (addresses % POINTER_ALIGNMENT != 0)][:1]:
            raise ValueError(f"{address} is no positive multiple of {POINTER_ALIGNMENT}")
        self._records[slot] = 0
        self._records[slot, sites] = addresses


def _check_shapes(
    sites: np.ndarray, a_ptrs: np.ndarray, b_ptrs: np.ndarray, ranks: np.ndarray, scales: np.ndarray
) -> None:
    by_site = sites.shape == a_ptrs.shape == ranks.shape[:1]
    by_projection = b_ptrs.shape == ranks.shape == scales.shape
    if not (by_site and by_projection and 1 <= ranks.shape[-1] <= MAX_PROJECTIONS):
        raise ValueError(
            f"expected an A address for each of {len(sites)} sites, 1 to {MAX_PROJECTIONS} ranks "
            f"and as many B addresses and scales, got {a_ptrs.shape}, {ranks.shape}, "
            f"{b_ptrs.shape}, {scales.shape}"
        )


def _pack(
    a_ptrs: np.ndarray,
    b_ptrs: np.ndarray,
    ranks: np.ndarray,
    scales: np.ndarray,
    a_ranks: np.ndarray,
) -> np.ndarray:
    """Pack records of the table, int64 `[n, 8]`."""
    projections = ranks.shape[1]
    for row in ranks[((ranks < 0) | (ranks > MAX_RANK)).any(axis=1)][:1].tolist():
        raise ValueError(f"ranks {row} are not all in 0..{MAX_RANK}")
    used = np.column_stack((ranks.sum(axis=1), ranks)) > 0
    pointers = np.where(used, np.column_stack((a_ptrs, b_ptrs)), 0)
    wrong = used & ((pointers <= 0) | (pointers % POINTER_ALIGNMENT != 0))
    for row in pointers[wrong.any(axis=1)][:1].tolist():
        raise ValueError(f"addresses must be positive multiples of {POINTER_ALIGNMENT}: {row}")
    records = np.zeros((len(ranks), RECORD_WORDS), dtype=np.int64)
    records[:, : 1 + projections] = pointers
    ints, floats = records.view(np.int32), records.view(np.float32)
    ints[:, INT32_RANKS : INT32_RANKS + projections] = ranks
    ints[:, INT32_RANKS + MAX_PROJECTIONS] = a_ranks
    floats[:, FLOAT32_SCALES : FLOAT32_SCALES + projections] = np.where(
        used[:, :1], scales, np.float32(0)
    )
    return records
