"""Constraints of sequences, made and used in threads. The step loop waits only for masks."""

import logging
import queue
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from concurrent.futures import Future, wait
from functools import partial
from itertools import accumulate
from typing import TypeVar
from weakref import WeakKeyDictionary

import numpy as np
from llguidance import LLMatcher

from adapters.grammar.checker import CheckerBroken, CheckerUnavailable
from adapters.grammar.compile import (
    GrammarError,
)
from adapters.grammar.deep_threads import DeepThreads
from adapters.grammar.limits import ServedGrammarLimits
from adapters.grammar.vocabulary import Vocabulary, VocabularyError
from server.constraints.compilations import Compilations
from server.constraints.constraint import NO_FORESIGHT, Constraint, Foresight
from server.constraints.rules import TokenRules, step_words
from server.constraints.wishes import ConstraintNews, ConstraintWish, ForesightWish, MaskWish
from server.engine.admission import Refusal
from server.engine.messages import GrammarCompiled

log = logging.getLogger(__name__)

# Processor time of looking at one draft. A sequence whose drafts need more has none from then on.
_FORESIGHT_S = 0.002

T = TypeVar("T")


class Constraints:
    """Called by the loop's thread. Other threads do what takes time. Its owner opens it, and
    closes it.

    load: makes the vocabulary, once, in a thread; raises VocabularyError where the model has none.
    eos: the worker's end tokens. mask_threads: number of threads that fill masks.
    """

    def __init__(
        self,
        load: Callable[[], Vocabulary],
        vocab_size: int,
        eos: Collection[int],
        limits: ServedGrammarLimits,
        mask_threads: int,
    ) -> None:
        self._compilations = Compilations(load, limits)
        self._vocab_size = vocab_size
        self._eos = eos
        self._limits = limits
        self._too_slow = f"one token needs more than {limits.mask_s:g} s of processor time"
        self._grammars: WeakKeyDictionary[Constraint, str] = WeakKeyDictionary()
        self._num_filling = mask_threads
        self._making = DeepThreads(1, "grammar-copy")
        self._filling = DeepThreads(mask_threads, "grammar-mask")
        self._news: queue.SimpleQueue[ConstraintNews] = queue.SimpleQueue()
        self._unanswered = 0

    def open(self) -> None:
        """Begin to make the vocabulary."""
        self._compilations.open()

    @property
    def busy(self) -> bool:
        """Whether some wish has not been answered."""
        return self._unanswered > 0

    def start(self, wish: ConstraintWish) -> None:
        """Begin to make a constraint. `poll` answers once."""
        self._unanswered += 1
        if wish.sampling.grammar:
            compiled = self._compilations.start(wish)
            compiled.add_done_callback(partial(self._go_on, wish))
        else:
            self._making.submit(self._answer, wish, None)

    def abandon(self, key: int) -> None:
        """Nobody waits for this sequence's constraint any more."""
        self._compilations.abandon(key)

    def poll(self) -> list[ConstraintNews]:
        """Answers since the last call; never blocks."""
        news = _taken(self._news)
        self._unanswered -= len(news)
        return news

    def take_compiled(self) -> list[GrammarCompiled]:
        """Compilations since the last call, for metrics."""
        return self._compilations.take_ended()

    def filled(
        self, wishes: Sequence[MaskWish], memory: Callable[[int, int], np.ndarray]
    ) -> np.ndarray:
        """Masks as of `fill`, in memory of `Executor.mask_memory`."""
        sizes = (wish.constraint.num_ids for wish in wishes if wish.constraint is not None)
        words = step_words(self._vocab_size, sizes)
        masks = memory(sum(wish.num_masks for wish in wishes), words)
        self.fill(wishes, masks)
        return masks

    def fill(self, wishes: Sequence[MaskWish], masks: np.ndarray) -> None:
        """Write masks, int32 `[sum of num_masks, words]`. A mask of nothing ends its draft
        (`Constraint.fill_ahead`)."""
        ends = [*accumulate(wish.num_masks for wish in wishes)]
        rows = [masks[end - wish.num_masks : end] for wish, end in zip(wishes, ends, strict=True)]
        parts = min(self._num_filling, len(wishes))
        filling = [
            self._filling.submit(_fill, wishes[i::parts], rows[i::parts], self._limits.mask_s)
            for i in range(parts)
        ]
        for part in filling:
            for slow in part.result():
                self._refuse(slow)
        self._renew(wish.constraint for wish in wishes)

    def foresee(self, wishes: Sequence[ForesightWish]) -> list[Foresight]:
        """Of each wish."""
        parts = min(self._num_filling, len(wishes))
        looking = [self._filling.submit(_foresee, wishes[i::parts]) for i in range(parts)]
        found: list[Foresight] = [NO_FORESIGHT] * len(wishes)
        for i, part in enumerate(looking):
            found[i::parts] = part.result()
        self._renew(wish.constraint for wish in wishes)
        return found

    def _renew(self, constraints: Iterable[Constraint | None]) -> None:
        """A grammar whose matchers fail is compiled again for the next request."""
        for constraint in constraints:
            if constraint is not None and constraint.broken:
                grammar = self._grammars.pop(constraint, None)
                if grammar is not None:
                    self._compilations.forget(grammar)

    def _refuse(self, slow: Constraint) -> None:
        slow.give_up(self._too_slow)
        grammar = self._grammars.get(slow)
        if grammar is not None:
            self._compilations.refuse(grammar, self._too_slow)

    def close(self) -> None:
        """End the threads. Wishes that are not answered never will be."""
        self._compilations.close()
        for threads in (self._making, self._filling):
            threads.shutdown(wait=False, cancel_futures=True)

    def wait_for_vocabulary(self) -> None:
        """Block until grammars can be compiled, or are known to be refused."""
        wait([self._compilations.tools])

    def _go_on(self, wish: ConstraintWish, compiled: "Future[LLMatcher]") -> None:
        if compiled.cancelled():
            self._news.put(ConstraintNews(wish.key, Refusal("internal", "nobody waits for it")))
        else:
            self._making.submit(self._answer, wish, compiled)

    def _answer(self, wish: ConstraintWish, compiled: "Future[LLMatcher] | None") -> None:
        outcome: Constraint | Refusal
        try:
            matcher = None if compiled is None else compiled.result().deep_copy()
            outcome = self._constraint(wish, matcher)
        except (GrammarError, CheckerBroken) as error:
            outcome = Refusal("bad_grammar", f"grammar: {error}")
        except VocabularyError as error:
            outcome = Refusal("bad_grammar", f"grammar: this model can be held to none: {error}")
        except CheckerUnavailable as error:
            outcome = Refusal("overloaded", str(error))
        except Exception as error:  # of any type; only this sequence ends
            log.error("a grammar could not be used", exc_info=error)
            outcome = Refusal("internal", "the grammar could not be used")
        self._news.put(ConstraintNews(wish.key, outcome))

    def _constraint(self, wish: ConstraintWish, matcher: LLMatcher | None) -> Constraint:
        """Raises GrammarError where the accepted tokens cannot begin an answer."""
        sampling = wish.sampling
        vocab_size = wish.vocab_size or self._vocab_size
        rules = TokenRules.of(sampling, self._eos, vocab_size, self._vocab_size)
        constraint = Constraint(matcher, rules, sampling.min_tokens)
        if matcher is not None:
            self._grammars[constraint] = sampling.grammar
        for token_id in wish.accepted_ids:
            constraint.take(token_id)
        if constraint.state == "failed":
            raise GrammarError(f"accepted_ids do not keep to it: {constraint.problem}")
        return constraint


def _fill(
    wishes: Sequence[MaskWish], masks: Sequence[np.ndarray], limit_s: float
) -> list[Constraint]:
    """Fill masks. Returns the constraints that took longer than `limit_s` of processor time."""
    slow = []
    for (_, constraint, draft), rows in zip(wishes, masks, strict=True):
        if constraint is None:
            rows.fill(-1)
            continue
        began = time.thread_time()
        constraint.fill(rows[0])
        if time.thread_time() - began > limit_s:
            slow.append(constraint)
            rows[1:].fill(0)
        elif draft:
            _fill_ahead(constraint, draft, rows[1:], limit_s)
    return slow


def _fill_ahead(
    constraint: Constraint, draft: Sequence[int], rows: np.ndarray, limit_s: float
) -> None:
    """As many masks as can be filled in `limit_s` of processor time. So one that takes as long
    alone is filled once more where it is the next token's, and its sequence ends there."""
    until = time.thread_time() + limit_s
    constraint.fill_ahead(draft, rows, lambda: time.thread_time() <= until)
    constraint.costly |= time.thread_time() > until


def _foresee(wishes: Sequence[ForesightWish]) -> list[Foresight]:
    found = []
    for constraint, draft, most in wishes:
        began = time.thread_time()
        found.append(constraint.foresee(draft, most))
        if time.thread_time() - began > _FORESIGHT_S:
            constraint.costly = True
    return found


def _taken(items: "queue.SimpleQueue[T]") -> list[T]:
    taken = []
    while not items.empty():
        taken.append(items.get_nowait())
    return taken
