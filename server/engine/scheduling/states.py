"""Where states of sequences are saved, and under which hashes. Pure."""

from collections.abc import Iterable, Iterator

import msgspec

from loraplex.server.engine.executor import ExecutorLimits
from loraplex.server.engine.memory.pages import PageHash, SnapshotPool
from loraplex.server.engine.plan import StateCopy, StateSave
from loraplex.server.engine.scheduling.sequence import Sequence
from loraplex.server.engine.swapping.swaps import PageSwaps

# A long prompt has a border after so many tokens, again and again.
_FAR_TOKENS = 4096


class SequenceStates:
    """Snapshots, as sequences use them.

    The state of a prompt is saved at *borders*, which are ends of pages: the last one of the
    prompt, the last one before an activated adapter acts, every so many tokens, and where the
    prompt parts from what others have computed. Saves of rows that leave wait for the next plan.

    Snapshots that the device has overwritten may lie below it (`swaps`), and come back.
    """

    def __init__(
        self, limits: ExecutorLimits, stored: Iterable[PageHash], numbers: Iterator[int]
    ) -> None:
        """stored: snapshots on disk. numbers: of copies."""
        self.pool = SnapshotPool(limits.num_snapshots)
        # As a page of so many tokens as lie between two borders of a long prompt.
        of_snapshots = msgspec.structs.replace(
            limits,
            page_size=_FAR_TOKENS,
            page_windows=(None,),
            host_pages=limits.host_snapshots,
            disk_pages=limits.disk_snapshots,
        )
        self.swaps = PageSwaps(of_snapshots, self.pool.slots, stored, numbers, of_states=True)
        self.saves = list[StateCopy]()
        self._size = limits.page_size
        self._far = max(1, _FAR_TOKENS // self._size) * self._size

    def __bool__(self) -> bool:
        return self.pool.count > 0

    def begin(self, sequence: Sequence, known: int) -> None:
        """The sequence has taken a row, with the state of its computed tokens. known: first tokens
        that it shares with others."""
        computed = sequence.num_in_state = sequence.num_computed
        if not self:
            return
        sequence.left_at = 0
        if computed:
            sequence.snapshot = self.pool.read(sequence.digest_at(self._size, computed))
        tokens = len(sequence.tokens)
        ends = (tokens - 1, sequence.adapter_from, known)
        borders = {end // self._size * self._size for end in ends}
        borders |= {*range(self._far, tokens, self._far)}
        sequence.borders = sorted(border for border in borders if border > computed)

    def saves_of(self, sequence: Sequence, start: int, end: int) -> list[StateSave]:
        """Saves of a slice that computes these tokens of a prompt."""
        found = list[StateSave]()
        for border in [border for border in sequence.borders if start < border <= end]:
            known = self.pool.knows(sequence.digest_at(self._size, border))
            taken = None if known else self.pool.take()
            if taken is None:
                sequence.borders.remove(border)
            else:
                found.append(StateSave(border, taken))
        return found

    def saved(self, sequence: Sequence, saves: Iterable[StateSave], *, is_valid: bool) -> None:
        """The step with these saves of the sequence is over."""
        for save in saves:
            if save.position in sequence.borders:
                sequence.borders.remove(save.position)
            if is_valid:
                digest = sequence.digest_at(self._size, save.position)
                self.pool.keep(save.snapshot, digest)
            else:
                self.pool.give_back(save.snapshot)

    def leave(self, sequence: Sequence) -> int:
        """Save the state of a sequence that gives up its row and will come back. Returns of how
        many tokens it is; 0 = it is not saved, since it may hold tokens that come again."""
        count = sequence.num_in_state
        if not 0 < count <= sequence.num_computed:
            return 0
        digest = sequence.digest_at(self._size, count)
        if not self.pool.knows(digest):
            taken = self.pool.take()
            if taken is None:
                return 0
            self.saves.append(StateCopy(sequence.seq_row, taken))
            self.pool.publish(taken, digest)
        sequence.left_at = count
        return count

    def lost(self, saves: Iterable[StateSave]) -> None:
        """The device failed. saves: of slices in flight. No snapshot holds what it should."""
        for save in saves:
            self.pool.give_back(save.snapshot)
        self.forget(self.pool.known())
        self.take_saves()

    def forget(self, digests: Iterable[PageHash]) -> None:
        """No sequence may read these snapshots any more, wherever they are."""
        digests = list(digests)
        self.pool.forget(digests)
        self.swaps.forget(digests)

    def take_saves(self) -> list[StateCopy]:
        """Saves of rows that left since the last call, which the caller carries out. Until then
        their snapshots are not copied."""
        saves, self.saves = self.saves, []
        for save in saves:
            self.pool.give_back(save.snapshot)
        return saves
