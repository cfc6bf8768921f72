"""How sequences take, share and give up pages of the KV cache. Pure."""

from collections.abc import Callable, Iterable, Iterator
from itertools import count, islice, takewhile

from loraplex.server.engine.executor import ExecutorLimits
from loraplex.server.engine.memory.pages import GroupPages, PageHash, PagePool, group_key
from loraplex.server.engine.scheduling.sequence import Sequence
from loraplex.server.engine.scheduling.states import SequenceStates
from loraplex.server.engine.swapping.swaps import AllSwaps, PageSwaps

Knows = Callable[[PageHash], bool]
# A prompt waits for another sequence's prefill of the same tokens if that saves at least this many.
SHARE_WORTH_TOKENS = 64
# Pages that one plan hashes at most to look prompts up while other sequences run. 16 pages take
# about 20 us.
HASHED_PER_PLAN = 256


class SequencePages:
    """The page pool, as sequences use it.

    A sequence has pages of each group of layers. In a group whose layers see all it has those of
    all known tokens from the start. In a group with a window it has those of the window, and of the
    tokens that a step or two compute; it gives them up as the window leaves them.

    Where rows have states, pages are read up to a place whose state is kept.

    Pages that the device has overwritten may lie below it (`swaps`), and come back, as snapshots
    of states may (`all_swaps`: both).
    """

    def __init__(
        self,
        limits: ExecutorLimits,
        stored: Iterable[PageHash] = (),
        stored_states: Iterable[PageHash] = (),
    ) -> None:
        page_size = limits.page_size
        numbers = count(1)
        self.states = SequenceStates(limits, stored_states, numbers)
        self._has_states = limits.has_states
        self.pool = PagePool(limits.num_pages, page_size)
        self.swaps = PageSwaps(limits, self.pool, stored, numbers)
        self.all_swaps = AllSwaps(self.states.swaps, self.swaps)
        self.windows = limits.page_windows
        # Whether sequences give up pages as they go on.
        self.has_windows = any(window is not None for window in self.windows)
        # Whether pages of the first group may be known below the device alone, behind its window.
        self._may_have_gaps = bool(self.swaps) and self.windows[:1] not in ((), (None,))
        self._step_tokens = limits.max_step_tokens
        # Full prompt pages that are being computed: the next pages of each sequence, enough to
        # decide whether another sequence waits for them.
        self._computing: dict[PageHash, Sequence] = {}
        self._next_pages = -(-SHARE_WORTH_TOKENS // page_size)
        self._budget = HASHED_PER_PLAN
        self._short_context = limits.short_context
        # Pages are no help without the state behind them. A state may need no pages.
        self._shares = bool(self.states) if limits.has_states else bool(limits.page_windows)

    def begin_plan(self) -> None:
        self._budget = HASHED_PER_PLAN
        self.states.pool.begin_plan()

    def look_up(self, sequence: Sequence, others_wait: bool) -> bool:
        """Hash the prompt as far as its pages are cached or being computed. False: this plan has
        hashed enough, and the next plan goes on.

        others_wait: a step waits for this plan. Otherwise hashing delays nothing.
        """
        if self._short_context is not None:
            sequence.set_long(len(sequence.tokens) > self._short_context)
        hashes, size = sequence.hashes, self.pool.page_size
        full = 0 if self._computes_all(sequence) else (len(sequence.tokens) - 1) // size
        while len(hashes) < full:
            if hashes and not (hashes[-1] in self._computing or self._knows(hashes[-1])):
                break
            if others_wait and not self._budget:
                return False
            self._budget = max(0, self._budget - 1)
            sequence.page_hash(size, len(hashes))
        return True

    def is_computed_elsewhere(self, sequence: Sequence) -> bool:
        """Whether a running sequence is about to publish much of the same prompt.

        Many sequences ask in every plan, so few pages are hashed. Hashing stops at the first page
        that is neither cached nor being computed, and where the wait is known to be worth it.
        """
        coming = self.swaps.coming
        if not (self._computing or coming):
            return False
        if self._has_states:
            return self._awaits_border(sequence)
        soon = 0
        for digest in self._readable(sequence):
            if digest in self._computing or digest in coming:
                soon += self.pool.page_size
                if soon >= SHARE_WORTH_TOKENS:
                    return True
            elif not self._knows(digest):
                return False
        return False

    def recall(self, sequence: Sequence, reserve: int) -> bool | None:
        """Begin to bring pages back to the device from which a prompt can go on, and hold them;
        with them there, the snapshot behind them. None = there is nothing for which the prompt
        should wait. False unless all pages of its prompt could be taken, and `reserve` pages a
        group be left.
        """
        tokens = self._worth_recalling(sequence)
        full = tokens // self.pool.page_size
        keys = self._keys_before(sequence, tokens) if tokens else []
        found = [(key, self.pool.page_of(key)) for key in keys]
        held = [page for _, page in found if page is not None]
        missing = [key for key, page in found if page is None]
        lacks_state = tokens > 0 and not self._has_state(sequence, tokens, below=False)
        if not (missing or lacks_state):
            return None
        more = sum(
            self.pool.pages_for(len(sequence.tokens)) - full if window is None else 1
            for window in self.windows
        )
        spare = self.pool.available - reserve * self._groups
        if spare < len(missing) + sum(map(self.pool.is_idle, held)) + more:
            return False
        if not missing:
            return self._recall_state(sequence, tokens)
        self.pool.hold(held)
        pages = self.pool.allocate(len(missing))
        assert pages is not None
        self.swaps.recall(sequence.key, missing, pages, held)
        return True

    def _recall_state(self, sequence: Sequence, tokens: int) -> bool | None:
        """Begin to bring back the snapshot behind so many tokens. None = the device has no room."""
        slot = self.states.pool.take()
        if slot is None:
            return None
        digest = sequence.digest_at(self.pool.page_size, tokens)
        self.states.swaps.recall(sequence.key, [digest], [slot], [])
        return True

    def _worth_recalling(self, sequence: Sequence) -> int:
        """How many tokens a prompt need not compute if it goes on from what lies below the device;
        0 where that saves little."""
        if not (self.swaps or self.states.swaps):
            return 0
        tokens = self._reusable(sequence, self._known(sequence, self._knows), below=True)
        if tokens < SHARE_WORTH_TOKENS:
            return 0
        on_device = self._reusable(sequence, self._known(sequence))
        return tokens if tokens - on_device >= SHARE_WORTH_TOKENS else 0

    def _keys_before(self, sequence: Sequence, tokens: int) -> list[PageHash]:
        """Keys of all pages that the token behind so many others sees."""
        full = tokens // self.pool.page_size
        keys = [key for group in range(self._groups) for key in self._seen(sequence, group, full)]
        if tokens % self.pool.page_size:
            keys += self._keys_of_last(sequence, tokens)
        return keys

    def take(self, sequence: Sequence, reserve: int) -> bool:
        """Take pages, cached pages first: for all its tokens, and with a window for some. False
        unless `reserve` pages a group are left for other sequences."""
        known = self._known(sequence)
        cached = self._reusable(sequence, known)
        full = cached // self.pool.page_size
        sequence.pages = [self._cached(sequence, group, full) for group in range(self._groups)]
        if cached % self.pool.page_size:
            self._hold_last(sequence, cached)
        sequence.num_computed = cached
        spare = self.pool.available - reserve * self._groups
        pages = self._more(sequence, spare, len(sequence.tokens))
        if pages is None:
            self._give_up(sequence)
            return False
        for group, more in zip(sequence.pages, pages, strict=True):
            group.pages += more
        if cached % self.pool.page_size:  # the sequence writes there
            self.pool.forget(group.pages[full - group.first] for group in sequence.pages)
        sequence.num_published = full
        self.states.begin(sequence, self._shared(sequence, known))
        self._computes_next(sequence)
        return True

    def grow(self, sequence: Sequence, draft: int = 0) -> list[list[int]] | None:
        """More pages of each group, so that at least one more token can be computed; [] = it needs
        none, None = there are not enough. draft: tokens for which there may be pages, too."""
        room = sequence.room(self.pool.page_size)
        soon = min(max(1, sequence.num_wanted), self._step_tokens)
        if draft and room < soon + draft:
            tokens = min(sequence.num_computed + 1 + draft, sequence.last_input)
            pages = self._more(sequence, self.pool.available // 2, tokens)
            if pages is not None:
                return pages
        if room >= soon:
            return []
        return self._more(sequence, self.pool.available, sequence.least_end)

    def _more(self, sequence: Sequence, spare: int, tokens: int) -> list[list[int]] | None:
        """Pages of each group that a sequence lacks: with a window for a token at least, and for a
        step where there are as many; else for so many tokens. Takes at most `spare`; None = there
        are not enough."""
        needed, wanted = list[int](), list[int]()
        one = sequence.least_end
        step = max(one, min(len(sequence.tokens), sequence.num_computed + self._step_tokens))
        for window, group in zip(self.windows, sequence.pages, strict=True):
            least, most = (tokens, tokens) if window is None else (one, step)
            needed.append(max(0, self.pool.pages_for(least) - group.end))
            wanted.append(max(0, self.pool.pages_for(most) - group.end))
        left = spare - sum(needed)
        if left < 0:
            return None
        each = left // max(1, len(self.windows))
        counts = [min(most, least + each) for least, most in zip(needed, wanted, strict=True)]
        pages = self.pool.allocate(sum(counts))
        assert pages is not None
        found = iter(pages)
        return [list(islice(found, count)) for count in counts]

    def outgrown(self, sequence: Sequence) -> bool:
        """Whether its next token makes it long, so that all its tokens must be computed again."""
        limit = self._short_context
        return limit is not None and not sequence.is_long and sequence.num_computed >= limit

    def publish(self, sequence: Sequence, num_computed: int) -> None:
        """Offer its full pages for reuse, and give up those behind windows. Its first
        `num_computed` tokens are accepted, and their keys and values are valid."""
        num_full = num_computed // self.pool.page_size
        if num_full <= sequence.num_published or not self.windows:
            return
        for i in range(sequence.num_published, num_full if self._shares else 0):
            digest = sequence.page_hash(self.pool.page_size, i)
            for number, group in enumerate(sequence.pages):
                self.pool.publish(group.pages[i - group.first], group_key(digest, number))
            self._no_longer_computes(sequence, digest)
        sequence.num_published = num_full
        for window, group in zip(self.windows, sequence.pages, strict=True):
            if window is not None:
                self._leave_behind(group, self._first_seen(window, num_computed))
        self._computes_next(sequence)

    def _leave_behind(self, group: GroupPages, first: int) -> None:
        """Release pages before `first`. Steps in flight compute later tokens, so they read no page
        before `first` either.
        """
        count = first - group.first
        if count > 0:
            self.pool.release(group.pages[:count])
            del group.pages[:count]
            group.first = first

    def leave(self, sequence: Sequence) -> None:
        """Keep what a sequence needs that gives up its row and will come back: its state and, until
        others need the room, its pages; also the last one, which is not full."""
        count = self.states.leave(sequence) if self._shares and not sequence.computes_all else 0
        page, rest = divmod(count, self.pool.page_size)
        if rest:
            digest = sequence.digest_at(self.pool.page_size, count)
            for number, group in enumerate(sequence.pages):
                self.pool.publish(group.pages[page - group.first], group_key(digest, number))

    def release(self, sequence: Sequence) -> None:
        for digest in sequence.hashes[sequence.num_published :]:
            self._no_longer_computes(sequence, digest)
        self._give_up(sequence)
        sequence.num_published = 0

    def forget(self, sequence: Sequence) -> None:
        """Forget what the sequence's pages contain: no further sequence may read it."""
        for group in sequence.pages:
            self.pool.forget(group.pages)
        self.states.forget(sequence.hashes)
        numbers = range(self._groups)
        self.swaps.forget(group_key(key, group) for key in sequence.hashes for group in numbers)

    def _give_up(self, sequence: Sequence) -> None:
        for group in sequence.pages:
            self.pool.release(group.pages)
        sequence.pages = []
        sequence.rewind(0)

    def _computes_all(self, sequence: Sequence) -> bool:
        return sequence.computes_all or not self._shares

    @property
    def _groups(self) -> int:
        return len(self.windows)

    def _first_seen(self, window: int | None, position: int) -> int:
        """The first page that the token at `position` sees."""
        return 0 if window is None else max(0, position - window + 1) // self.pool.page_size

    def _known(self, sequence: Sequence, knows: Knows | None = None) -> int:
        """How many leading pages are cached in the first group. knows: which are; None = those on
        the device, and with a window also those below it, as far as nothing sees them."""
        has = (self._knows if self._may_have_gaps else self._has) if knows is None else knows
        return sum(takewhile(bool, map(has, self._readable(sequence))))

    def _has(self, digest: PageHash) -> bool:
        """Whether a page is cached in the first group. Without groups nothing needs to be."""
        return not self.windows or self.pool.knows(digest)

    def _knows(self, digest: PageHash) -> bool:
        """Whether a page is cached on the device or below it."""
        return self._has(digest) or self.swaps.knows(digest)

    def _reusable(self, sequence: Sequence, count: int, *, below: bool = False) -> int:
        """How many leading tokens need not be computed: in each group those pages are cached that
        the next token sees, and the state is kept. count: pages that are cached in the first
        group. below: on the device or below it."""
        size = self.pool.page_size
        if self._has_last(sequence, count, below=below):
            return sequence.left_at
        knows = self._knows if below else self.pool.knows
        while count:
            gap = self._gap(sequence, count, knows)
            if gap is None and self._has_state(sequence, count * size, below=below):
                break
            count = count - 1 if gap is None else gap
        return count * size

    def _has_state(self, sequence: Sequence, tokens: int, *, below: bool) -> bool:
        """Whether the state behind so many tokens is kept, if there is one. below: as of
        `_reusable`."""
        if not self._has_states:
            return True
        digest = sequence.digest_at(self.pool.page_size, tokens)
        return self.states.pool.knows(digest) or (below and self.states.swaps.knows(digest))

    def _has_last(self, sequence: Sequence, count: int, *, below: bool) -> bool:
        """Whether all is there that the sequence left when it gave up its row, within a page."""
        page, rest = divmod(sequence.left_at, self.pool.page_size)
        if not rest or page > count:
            return False
        if not self._has_state(sequence, sequence.left_at, below=below):
            return False
        knows = self._knows if below else self.pool.knows
        keys = self._keys_of_last(sequence, sequence.left_at)
        return all(map(knows, keys)) and self._gap(sequence, page, knows) is None

    def _keys_of_last(self, sequence: Sequence, tokens: int) -> list[PageHash]:
        """Keys of the pages that a sequence left when they were not full."""
        digest = sequence.digest_at(self.pool.page_size, tokens)
        return [group_key(digest, group) for group in range(self._groups)]

    def _hold_last(self, sequence: Sequence, tokens: int) -> None:
        """Hold the pages that a sequence left when they were not full."""
        keys = self._keys_of_last(sequence, tokens)
        for key, group in zip(keys, sequence.pages, strict=True):
            group.pages += self.pool.match([key])

    def _beside(self, sequence: Sequence) -> tuple[Sequence, int] | None:
        """A running sequence that computes the next page that this one could read, and how many
        first tokens both have."""
        if sequence.beside is not None and sequence.beside[0].can_run:
            return sequence.beside
        sequence.beside = None
        for digest in self._readable(sequence):
            other = self._computing.get(digest)
            if other is not None and other is not sequence:
                sequence.beside = other, sequence.shared_with(other)
            if other is not None or not self._has(digest):
                break
        return sequence.beside

    def _awaits_border(self, sequence: Sequence) -> bool:
        """Whether a running sequence is about to save a state of much of the same prompt."""
        beside = self._beside(sequence)
        if beside is None:
            return False
        other, shared = beside
        borders = [b for b in other.borders if b <= min(shared, len(sequence.tokens) - 1)]
        if not borders:
            return False
        reusable = self._reusable(sequence, self._known(sequence))
        return borders[-1] - reusable >= SHARE_WORTH_TOKENS

    def _shared(self, sequence: Sequence, known: int) -> int:
        """How many first tokens of a prompt others have computed, or compute now. known: pages that
        are cached in the first group."""
        beside = self._beside(sequence) if self._has_states else None
        sequence.beside = None
        return max(known * self.pool.page_size, 0 if beside is None else beside[1])

    def _gap(self, sequence: Sequence, count: int, knows: Knows) -> int | None:
        """A page that the token behind `count` pages sees in some group, and that is not cached."""
        position = count * self.pool.page_size
        for group, window in enumerate(self.windows):
            if not (group or self._may_have_gaps):
                continue
            for page in range(count - 1, self._first_seen(window, position) - 1, -1):
                if not knows(group_key(sequence.hashes[page], group)):
                    return page
        return None

    def _cached(self, sequence: Sequence, group: int, count: int) -> GroupPages:
        """The cached pages of a group that the token behind `count` pages sees."""
        first = self._first_seen(self.windows[group], count * self.pool.page_size)
        return GroupPages(first, self.pool.match(self._seen(sequence, group, count)))

    def _seen(self, sequence: Sequence, group: int, count: int) -> list[PageHash]:
        """Keys of the pages of a group that the token behind `count` pages sees."""
        first = self._first_seen(self.windows[group], count * self.pool.page_size)
        return [group_key(digest, group) for digest in sequence.hashes[first:count]]

    def _readable(self, sequence: Sequence, first: int = 0) -> Iterator[PageHash]:
        """Full pages that the sequence may read instead of computing, hashed one by one.

        At least one token is always computed.
        """
        if self._computes_all(sequence):
            return
        size = self.pool.page_size
        for page in range(first, (len(sequence.tokens) - 1) // size):
            yield sequence.page_hash(size, page)

    def _computes_next(self, sequence: Sequence) -> None:
        for digest in islice(self._readable(sequence, sequence.num_published), self._next_pages):
            self._computing.setdefault(digest, sequence)

    def _no_longer_computes(self, sequence: Sequence, digest: PageHash) -> None:
        if self._computing.get(digest) is sequence:
            del self._computing[digest]
