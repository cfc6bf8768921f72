"""How sequences take, share and give up pages of the KV cache. Pure."""

from collections.abc import Iterator
from itertools import islice

from server.engine.memory.pages import PageHash, PagePool
from server.engine.scheduling.sequence import Sequence

# A prompt waits for another sequence's prefill of the same tokens if that saves at least this many.
SHARE_WORTH_TOKENS = 64
# Pages that one plan hashes at most to look prompts up while other sequences run. 16 pages take
# about 20 us.
HASHED_PER_PLAN = 256


class SequencePages:
    """The page pool, as sequences use it. short_context: see `ExecutorLimits`."""

    def __init__(self, num_pages: int, page_size: int, short_context: int | None = None) -> None:
        self.pool = PagePool(num_pages, page_size)
        # Full prompt pages that are being computed: the next pages of each sequence, enough to
        # decide whether another sequence waits for them.
        self._computing: dict[PageHash, Sequence] = {}
        self._next_pages = -(-SHARE_WORTH_TOKENS // page_size)
        self._budget = HASHED_PER_PLAN
        self._short_context = short_context

    def begin_plan(self) -> None:
        self._budget = HASHED_PER_PLAN

    def look_up(self, sequence: Sequence, others_wait: bool) -> bool:
        """Hash the prompt as far as its pages are cached or being computed. False: this plan has
        hashed enough, and the next plan goes on.

        others_wait: a step waits for this plan. Otherwise hashing delays nothing.
        """
        if self._short_context is not None:
            sequence.set_long(len(sequence.tokens) > self._short_context)
        hashes, size = sequence.hashes, self.pool.page_size
        full = 0 if sequence.needs_prompt_logprobs else (len(sequence.tokens) - 1) // size
        while len(hashes) < full:
            if hashes and not (hashes[-1] in self._computing or self.pool.knows(hashes[-1])):
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
        if not self._computing:
            return False
        soon = 0
        for digest in self._readable(sequence):
            if digest in self._computing:
                soon += self.pool.page_size
                if soon >= SHARE_WORTH_TOKENS:
                    return True
            elif not self.pool.knows(digest):
                return False
        return False

    def take(self, sequence: Sequence, reserve: int) -> bool:
        """Take pages for all its tokens, cached pages first. False unless `reserve` pages are left
        for other sequences."""
        cached = self.pool.match(self._readable(sequence))
        missing = self.pool.pages_for(len(sequence.tokens)) - len(cached)
        if self.pool.available < missing + reserve:
            self.pool.release(cached)
            return False
        fresh = self.pool.allocate(missing)
        assert fresh is not None
        sequence.pages = cached + fresh
        sequence.num_published = len(cached)
        sequence.num_computed = len(cached) * self.pool.page_size
        self._computes_next(sequence)
        return True

    def missing(self, sequence: Sequence) -> int:
        """Pages that the sequence lacks for one more token."""
        return self.pool.pages_for(sequence.num_computed + 1) - len(sequence.pages)

    def outgrown(self, sequence: Sequence) -> bool:
        """Whether its next token makes it long, so that all its tokens must be computed again."""
        limit = self._short_context
        return limit is not None and not sequence.is_long and sequence.num_computed >= limit

    def publish(self, sequence: Sequence, num_computed: int) -> None:
        """Offer its full pages for reuse. Its first `num_computed` tokens are accepted, and their
        keys and values are valid."""
        num_full = num_computed // self.pool.page_size
        if num_full <= sequence.num_published:
            return
        for i in range(sequence.num_published, num_full):
            digest = sequence.page_hash(self.pool.page_size, i)
            self.pool.publish(sequence.pages[i], digest)
            self._no_longer_computes(sequence, digest)
        sequence.num_published = num_full
        self._computes_next(sequence)

    def release(self, sequence: Sequence) -> None:
        for digest in sequence.hashes[sequence.num_published :]:
            self._no_longer_computes(sequence, digest)
        self.pool.release(sequence.pages)
        sequence.pages = []
        sequence.num_published = 0
        sequence.rewind(0)

    def _readable(self, sequence: Sequence, first: int = 0) -> Iterator[PageHash]:
        """Full pages that the sequence may read instead of computing, hashed one by one.

        At least one token is always computed.
        """
        if sequence.needs_prompt_logprobs:
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
