"""Constraints of sequences, made and used in threads. The step loop waits only for masks."""

import logging
import math
import os
import queue
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from concurrent.futures import Executor, Future, wait
from functools import partial
from itertools import accumulate
from typing import Generic, NamedTuple, TypeVar, cast
from weakref import WeakKeyDictionary

import numpy as np
from llguidance import LLMatcher

from loraplex.adapters.common.turns import Room, Turns, WorkTurn
from loraplex.adapters.grammar.checker import CHECKER, CheckerBroken, CheckerUnavailable
from loraplex.adapters.grammar.compile import GrammarError
from loraplex.adapters.grammar.deep_threads import DeepThreads, deep_executor
from loraplex.adapters.grammar.limits import ServedGrammarLimits
from loraplex.adapters.grammar.vocabulary import Vocabulary, VocabularyError
from loraplex.adapters.helpers.helper import start_problem
from loraplex.server.constraints.compilations import Compilations
from loraplex.server.constraints.constraint import (
    COSTLY_S,
    NO_FORESIGHT,
    Constraint,
    Foresight,
    GrammarMatcher,
    Names,
    Thinking,
)
from loraplex.server.constraints.rules import TokenRules, mask_words, step_words
from loraplex.server.constraints.wishes import (
    AsideWish,
    ConstraintNews,
    ConstraintWish,
    ForesightWish,
    MaskWish,
)
from loraplex.server.engine.admission import Refusal
from loraplex.server.engine.executor import ExecutorLimits
from loraplex.server.engine.messages import GrammarCompiled

T = TypeVar("T")
R = TypeVar("R")
log = logging.getLogger(__name__)

_MAX_MASK_THREADS = 8
_THREAD_S = 0.002  # of work, for each thread that does it
# Masks that cost no more are filled together, by llguidance's threads. Each of those in Python
# would take the interpreter twice.
_CHEAP_S = 0.001


class _Mask(NamedTuple):
    """Request to fill the mask rows of one constraint. place: of its wish. begin: of its rows in
    the step's memory. rows: of the mask, and of those that follow a draft's tokens.
    """

    place: int
    constraint: Constraint
    draft: Sequence[int]
    begin: int
    rows: np.ndarray


class _Masks(NamedTuple):
    """Masks that one thread fills: one, or several cheap ones."""

    masks: Sequence[_Mask]

    @property
    def constraints(self) -> list[Constraint]:
        return [mask.constraint for mask in self.masks]


W = TypeVar("W", _Masks, ForesightWish)


class Constraints:
    """Hold the constraints of sequences, and fill their masks. The loop's thread calls it. Other
    threads do what takes time. Its owner opens it, and closes it.

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
        self.mask_threads = mask_threads
        self._making = DeepThreads(1, "grammar-copy")
        self._filling = DeepThreads(mask_threads, "grammar-mask")
        num_aside = max(1, mask_threads // 2)
        self._matching = deep_executor(mask_threads)
        self._aside = DeepThreads(num_aside, "grammar-mask-aside")
        self._turns = Turns[Constraint]({"mask": Room(num_aside, num_aside, sys.maxsize)})
        self._turning = threading.Lock()
        self._finished: queue.SimpleQueue[Constraint] = queue.SimpleQueue()
        self._num_aside = 0
        # Constraints whose first mask is being filled, with their answers.
        self._beginning: dict[Constraint, ConstraintNews] = {}
        self._made: queue.SimpleQueue[tuple[ConstraintWish, Constraint | Refusal]]
        self._made = queue.SimpleQueue()
        self._unanswered = 0

    def open(self) -> None:
        """Begin to make the vocabulary."""
        self._compilations.open()

    @property
    def busy(self) -> bool:
        """Whether `poll` will have something to note."""
        return self._unanswered > 0 or self._num_aside > 0

    def start(self, wish: ConstraintWish) -> None:
        """Begin to make a constraint. `poll` answers once."""
        self._unanswered += 1
        if wish.sampling.grammar:
            compiled = self._compilations.start(wish)
            compiled.add_done_callback(partial(self._go_on, wish))
        else:
            self._making.submit(self._answer, wish, None)

    def abandon(self, key: int) -> None:
        """Close the sequence's constraint: nobody waits for it any more."""
        self._compilations.abandon(key)

    def poll(self) -> list[ConstraintNews]:
        """Answers since the last call; never blocks. A constraint comes with its first mask, so
        that what a mask costs is known."""
        news = list[ConstraintNews]()
        for wish, outcome in _taken(self._made):
            made = ConstraintNews(wish.key, outcome)
            if isinstance(outcome, Constraint) and outcome in self._grammars:
                self._beginning[outcome] = made
                self.fill_aside(AsideWish(outcome, wish.tenant, wish.is_batch))
            else:
                news.append(made)
        finished = _taken(self._finished)
        for constraint in finished:
            constraint.is_busy = False
            if (begun := self._beginning.pop(constraint, None)) is not None:
                news.append(_begun(begun, constraint))
        self._num_aside -= len(finished)
        self._unanswered -= len(news)
        self._renew(finished)
        return news

    def take_compiled(self) -> list[GrammarCompiled]:
        """Compilations since the last call, for metrics."""
        return self._compilations.take_ended()

    def filled(
        self, wishes: Sequence[MaskWish], memory: Callable[[int, int], np.ndarray], wait_s: float
    ) -> tuple[np.ndarray, list[int]]:
        """Masks as of `fill`, in memory of `Executor.mask_memory`, and the late places."""
        sizes = (wish.constraint.num_ids for wish in wishes if wish.constraint is not None)
        count, words = sum(wish.num_masks for wish in wishes), step_words(self._vocab_size, sizes)
        masks = memory(count, words)
        late = self.fill(wishes, masks, wait_s)
        if late:  # threads still write into that memory
            others, masks = masks, memory(count, words)
            masks[:] = others
            of = np.repeat([wish.place for wish in wishes], [wish.num_masks for wish in wishes])
            masks[np.isin(of, late)] = 0
        return masks, late

    def fill(self, wishes: Sequence[MaskWish], masks: np.ndarray, wait_s: float) -> list[int]:
        """Write masks, int32 `[sum of num_masks, words]`. A mask of nothing ends its draft
        (`Constraint.fill_ahead`).

        Returns the places of wishes that are not fulfilled after `wait_s`. Their masks are filled
        for a later step: by the threads that are at them, or when they are asked for.
        """
        cheap, work = list[_Mask](), list[_Masks]()
        ends = accumulate(wish.num_masks for wish in wishes)
        for wish, end in zip(wishes, ends, strict=True):
            begin, constraint = end - wish.num_masks, wish.constraint
            rows = masks[begin:end]
            if constraint is None:
                rows.fill(-1)
            elif constraint.is_ready and not wish.draft:
                constraint.fill(rows[0])
            else:
                mask = _Mask(wish.place, constraint, wish.draft, begin, rows)
                if 0 < constraint.mask_s <= _CHEAP_S and not wish.draft:
                    cheap.append(mask)
                else:
                    work.append(_Masks([mask]))
        work = [_Masks(cheap), *work] if cheap else work
        filled = self._share(work, partial(self._fill, masks), self._keep, wait_s)
        late = [mask for i, item in enumerate(work) if i not in filled for mask in item.masks]
        for mask in late:
            mask.constraint.is_late = not mask.constraint.is_busy
        return [mask.place for mask in late]

    def foresee(self, wishes: Sequence[ForesightWish], wait_s: float) -> list[Foresight]:
        """Foresight for each wish; none for wishes that are not fulfilled after `wait_s`."""
        found = self._share(wishes, _foresee, self._finish, wait_s)
        return [found.get(i, NO_FORESIGHT) for i in range(len(wishes))]

    def fill_aside(self, wish: AsideWish) -> None:
        """Begin to fill a mask that no step waits for. `poll` notes its end."""
        wish.constraint.is_busy = True
        with self._turning:
            self._turns.join(WorkTurn("mask", wish.tenant, wish.is_batch, 1, wish.constraint))
            self._begin_turns()
        self._num_aside += 1

    def _share(
        self,
        items: Sequence[W],
        do: Callable[[W, Callable[[], bool]], R],
        late: Callable[[W], None],
        wait_s: float,
    ) -> dict[int, R]:
        """Results by place, of the items that are done after `wait_s`. The constraints of others
        are busy as long as a thread is at them."""
        work = SharedWork(items, do, late)
        # Threads that do little only take the interpreter from each other.
        costs = (each.mask_s for item in items for each in item.constraints)
        few, many = math.ceil(sum(costs) / _THREAD_S), self.mask_threads
        done, begun = work.finish(self._filling, min(max(1, few), many), many, wait_s)
        for place, item in enumerate(items):
            for constraint in item.constraints:
                constraint.is_busy = place in begun
        self._num_aside += sum(len(items[place].constraints) for place in begun)
        self._renew(each for place in done for each in items[place].constraints)
        return done

    def _fill(self, memory: np.ndarray, item: "_Masks", is_open: Callable[[], bool]) -> None:
        if len(item.masks) > 1:
            self._fill_together(memory, item.masks)
            return
        [(_, constraint, draft, _, rows)] = item.masks
        self._fill_next(constraint, rows[0])
        if constraint.too_slow:
            rows[1:].fill(0)
        elif draft:
            self._fill_ahead(constraint, draft, rows[1:], is_open)

    def _fill_together(self, memory: np.ndarray, masks: Sequence["_Mask"]) -> None:
        """Fill cheap masks without drafts together.

        A row of a batch that turns out dear is late, and is filled alone then.
        """
        count, words = memory.shape
        asked, wanted = set[int](), list[tuple[LLMatcher, int]]()
        for mask in masks:
            mask.constraint.catch_up()
            matcher = mask.constraint.matcher_to_ask(words)
            if isinstance(matcher, LLMatcher):
                asked.add(mask.begin)
                wanted.append((matcher, mask.begin))
        began = time.perf_counter()
        if wanted:
            row_bytes = memory.strides[0]
            self._matching.unsafe_compute_mask_ptr(wanted, memory.ctypes.data, row_bytes, count)
        each_s = (time.perf_counter() - began) * self.mask_threads / len(masks)
        for mask in masks:
            mask.constraint.fill(mask.rows[0], mask.begin in asked)
            mask.constraint.took(min(each_s, _CHEAP_S))

    def _fill_next(self, constraint: Constraint, row: np.ndarray) -> None:
        began = time.thread_time()
        constraint.catch_up()
        caught_up = time.thread_time()
        constraint.fill(row)
        filled = time.thread_time()
        constraint.took(filled - began)
        if filled - caught_up > self._limits.mask_s:
            constraint.too_slow = True
            constraint.give_up(self._too_slow)

    def _fill_ahead(
        self,
        constraint: Constraint,
        draft: Sequence[int],
        rows: np.ndarray,
        is_open: Callable[[], bool],
    ) -> None:
        """Fills as many masks of a draft as time allows.

        A mask that takes too long alone is filled again as the next token's, and ends its sequence.
        """
        until = time.thread_time() + self._limits.mask_s
        constraint.fill_ahead(draft, rows, lambda: is_open() and time.thread_time() <= until)
        constraint.costly |= time.thread_time() > until

    def _keep(self, item: "_Masks") -> None:
        for mask in item.masks:
            mask.constraint.keep(mask.rows[0])
        self._finish(item)

    def _finish(self, item: "_Masks | ForesightWish") -> None:
        """Gives constraints back, which no thread uses any more."""
        for constraint in item.constraints:
            self._finished.put(constraint)

    def _begin_turns(self) -> None:
        for turn in self._turns.begin():
            self._aside.submit(self._fill_turn, turn)

    def _fill_turn(self, turn: WorkTurn[Constraint]) -> None:
        """A long answer that is resumed takes several turns to be taken."""
        constraint, until = turn.work, time.thread_time() + self._limits.mask_s
        is_known = True
        try:
            is_known = constraint.catch_up(lambda: time.thread_time() <= until)
            if is_known:
                row = np.empty(mask_words(constraint.num_ids), np.int32)
                self._fill_next(constraint, row)
                constraint.keep(row)
        finally:
            with self._turning:
                self._turns.leave(turn)
                if not is_known:
                    self._turns.join(turn)
                self._begin_turns()
            if is_known:
                self._finished.put(constraint)

    def _consume(self, matcher: GrammarMatcher, token_id: int) -> None:
        """Gives a matcher a token without keeping the interpreter, as `consume_token` would.

        llguidance lets other threads go on only for several matchers. So an idle one comes along.
        """
        idle = self._compilations.tools.result().idle.deep_copy()
        pair = [(cast(LLMatcher, matcher), token_id), (idle, token_id)]
        self._matching.consume_token_par(pair)

    def _renew(self, constraints: Iterable[Constraint]) -> None:
        """A grammar whose matchers fail is compiled again for the next request; one whose masks
        take too long is refused."""
        for constraint in constraints:
            if constraint.broken or constraint.too_slow:
                grammar = self._grammars.pop(constraint, None)
                if grammar is None:
                    continue
                if constraint.too_slow:
                    self._compilations.refuse(grammar, self._too_slow)
                else:
                    self._compilations.forget(grammar)

    def close(self) -> None:
        """End the threads. Wishes that are not answered never will be."""
        self._compilations.close()
        for threads in (self._making, self._filling, self._aside):
            threads.shutdown(wait=False, cancel_futures=True)

    def wait_for_vocabulary(self) -> None:
        """Block until grammars can be compiled, or are known to be refused."""
        wait([self._compilations.tools])

    def _go_on(self, wish: ConstraintWish, compiled: "Future[LLMatcher]") -> None:
        if compiled.cancelled():
            self._made.put((wish, Refusal("internal", "nobody waits for it")))
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
        self._made.put((wish, outcome))

    def _constraint(self, wish: ConstraintWish, matcher: LLMatcher | None) -> Constraint:
        """Whether the accepted tokens can begin an answer, its first mask says."""
        sampling = wish.sampling
        vocab_size = wish.vocab_size or self._vocab_size
        rules = TokenRules.of(sampling, self._eos, vocab_size, self._vocab_size)
        end, watches = None, list[Names | Thinking]()
        if sampling.thinking is not None:
            watches.append(Thinking(sampling.thinking))
        if matcher is not None:
            tools = self._compilations.tools.result()
            end = tools.vocabulary.tokenizer.eos_token
            if sampling.names_once is not None:
                watches.append(Names(tools.name_tokens, sampling.names_once))
        known = (sampling.min_tokens, self._consume, end, tuple(watches))
        constraint = Constraint(matcher, rules, *known)
        if matcher is not None:
            self._grammars[constraint] = sampling.grammar
        for token_id in wish.accepted_ids:
            constraint.note(token_id)
        return constraint


def make_constraints(
    config: ServedGrammarLimits, limits: ExecutorLimits, load: Callable[[], Vocabulary]
) -> Constraints:
    """Make the constraints. load: makes the vocabulary, without which grammars are refused."""

    def begin() -> Vocabulary:
        start_problem(CHECKER)  # the log says it before the first request
        return load()

    return Constraints(
        begin,
        limits.vocab_size,
        limits.eos_token_ids,
        config,
        mask_threads=max(1, min(_MAX_MASK_THREADS, len(os.sched_getaffinity(0)) // 2)),
    )


def _foresee(wish: ForesightWish, _is_open: Callable[[], bool]) -> Foresight:
    constraint, draft, most = wish
    began = time.thread_time()
    found = constraint.foresee(draft, most)
    if time.thread_time() - began > COSTLY_S:
        constraint.costly = True
    return found


def _begun(news: ConstraintNews, constraint: Constraint) -> ConstraintNews:
    """Refuses a grammar under which no answer can begin."""
    if constraint.state != "failed":
        return news
    problem = f"grammar: no answer can begin so: {constraint.problem}"
    return ConstraintNews(news.key, Refusal("bad_grammar", problem))


def _taken(items: "queue.SimpleQueue[T]") -> list[T]:
    taken = []
    while not items.empty():
        taken.append(items.get_nowait())
    return taken


class SharedWork(Generic[T, R]):
    """Work on several items by several threads, for which a step waits only so long.

    An item that was taken before the work is closed is still done, in vain.
    do: gets an item, and a function that says whether the work is still open. late: gets an item
    that was done in vain, in its thread.
    """

    def __init__(
        self,
        items: Sequence[T],
        do: Callable[[T, Callable[[], bool]], R],
        late: Callable[[T], None],
    ) -> None:
        self._items, self._do, self._late = items, do, late
        self._places = iter(range(len(items)))  # threads share it
        self._lock = threading.Lock()
        self._over = threading.Event()
        self._is_open = True
        self._taken = set[int]()
        self._results = dict[int, R]()
        self._threads = list[Future[None]]()

    def finish(
        self, threads: Executor, few: int, many: int, wait_s: float
    ) -> tuple[dict[int, R], set[int]]:
        """Do the items by a few threads of a pool, and by many where these take long. Close the
        work after `wait_s`. Returns results by place, and the places of items that are done in
        vain. Raises what an item has raised."""
        begun = 0
        for count in (few, many):
            more = range(begun, min(count, len(self._items)))
            self._threads += [threads.submit(self._run) for _ in more]
            begun = len(self._threads)
            if not begun or self._over.wait(min(wait_s / 2, threading.TIMEOUT_MAX)):
                break
        with self._lock:
            self._is_open = False
        for thread in self._threads:
            if thread.done():
                thread.result()
        return self._results, self._taken - self._results.keys()

    def _run(self) -> None:
        try:
            for place in self._places:
                if not self._take(place):
                    return
                result = self._do(self._items[place], lambda: self._is_open)
                if not self._note(place, result):
                    self._late(self._items[place])
        except BaseException:
            self._over.set()
            raise

    def _take(self, place: int) -> bool:
        with self._lock:
            if self._is_open:
                self._taken.add(place)
            return self._is_open

    def _note(self, place: int, result: R) -> bool:
        """Whether the result still counts."""
        with self._lock:
            if self._is_open:
                self._results[place] = result
                if len(self._results) == len(self._items):
                    self._over.set()
            return self._is_open
