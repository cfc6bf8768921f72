"""Compiles grammars in turn, in threads. What is known already never waits."""

import logging
import queue
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from typing import Generic, NamedTuple, TypeVar

from llguidance import LLMatcher

from loraplex.adapters.common.turns import Room, Turns, WorkTurn
from loraplex.adapters.grammar.checker import GrammarChecker
from loraplex.adapters.grammar.compile import GrammarError, GrammarTooCostly, compile_grammar
from loraplex.adapters.grammar.deep_threads import DeepThreads
from loraplex.adapters.grammar.limits import ServedGrammarLimits
from loraplex.adapters.grammar.vocabulary import Vocabulary, VocabularyError
from loraplex.server.constraints.constraint import NameTokens
from loraplex.server.constraints.wishes import ConstraintWish
from loraplex.server.engine.messages import GrammarCompiled, GrammarFault

V = TypeVar("V")
log = logging.getLogger(__name__)

_KIND = "grammar"

Compiled = Future[LLMatcher]


class _Tools(NamedTuple):
    """Things that compile grammars for one model. idle: takes no token."""

    vocabulary: Vocabulary
    checker: GrammarChecker
    idle: LLMatcher
    name_tokens: NameTokens


class _Compilation:
    """A grammar to compile. turns: by key of each waiting sequence, until the work begins."""

    def __init__(self, grammar: str) -> None:
        self.grammar = grammar
        self.result: Compiled = Future()
        self.turns: dict[int, WorkTurn[_Compilation]] = {}
        self.has_begun = False


class Compilations:
    """Compile grammars in threads, and keep the results. One thread calls it. Compiled grammars are
    kept by their texts.

    load: makes the vocabulary, once, in a thread; raises VocabularyError where the model has none.
    """

    def __init__(self, load: Callable[[], Vocabulary], limits: ServedGrammarLimits) -> None:
        self._load = load
        self._limits = limits
        self._threads = DeepThreads(limits.threads, "grammar-compile")
        # One is for whoever comes next. Sequences that wait are bounded elsewhere.
        room = Room(limits.threads, max(1, limits.threads - 1), sys.maxsize)
        self._turns: Turns[_Compilation] = Turns({_KIND: room})
        self._changing = threading.RLock()  # of turns: a thread that is done lets another begin
        self._is_closed = False
        self._cache: BoundedCache[_Compilation] = BoundedCache(
            limits.cache_entries, limits.cache_bytes
        )
        self._waiting: dict[int, _Compilation] = {}  # for its turn, by sequences' keys
        self._tools: Future[_Tools] | None = None
        self._ended: queue.SimpleQueue[GrammarCompiled] = queue.SimpleQueue()

    def open(self) -> None:
        """Begin to make the vocabulary."""
        self._tools = self._threads.submit(self._make_tools)

    @property
    def tools(self) -> "Future[_Tools]":
        if self._tools is None:
            raise RuntimeError("constraints are used before they are opened")
        return self._tools

    def close(self) -> None:
        """End the threads and processes."""
        with self._changing:
            self._is_closed = True
        self._threads.shutdown(wait=False, cancel_futures=True)
        tools = self._tools
        if tools is not None and tools.done() and not tools.cancelled() and not tools.exception():
            tools.result().checker.close()

    def start(self, wish: ConstraintWish) -> Compiled:
        """The wish's compiled grammar, or its compilation, which `abandon` may cancel."""
        grammar = wish.sampling.grammar
        compilation = self._cache.get(grammar)
        if compilation is None or _may_succeed_now(compilation.result):
            compilation = _Compilation(grammar)
            self._cache.put(grammar, compilation)
        with self._changing:
            if not compilation.has_begun:
                self._wait(compilation, wish)
        return compilation.result

    def abandon(self, key: int) -> None:
        """The sequence with this key waits no more."""
        with self._changing:
            compilation = self._waiting.pop(key, None)
            if compilation is not None:
                self._turns.leave(compilation.turns.pop(key))
                if not compilation.turns:
                    compilation.result.cancel()

    def forget(self, grammar: str) -> None:
        """Compile it again for the next request."""
        self._cache.remove(grammar)

    def refuse(self, grammar: str, why: str) -> None:
        """Refuse it while it is remembered."""
        refused = _Compilation(grammar)
        refused.has_begun = True
        refused.result.set_exception(GrammarTooCostly(why))
        self._cache.put(grammar, refused)

    def take_ended(self) -> list[GrammarCompiled]:
        """Compilations since the last call, for metrics."""
        ended = []
        while not self._ended.empty():
            ended.append(self._ended.get_nowait())
        return ended

    def _wait(self, compilation: _Compilation, wish: ConstraintWish) -> None:
        """Gives each waiting sequence a turn; the first turn that comes is for all of them."""
        turn = WorkTurn(_KIND, wish.tenant, wish.is_batch, 1, compilation)
        compilation.turns[wish.key] = turn
        self._waiting[wish.key] = compilation
        self._turns.join(turn)
        self._begin()

    def _begin(self) -> None:
        while not self._is_closed and (begun := self._turns.begin()):
            for turn in begun:
                if turn.work.has_begun:
                    self._turns.leave(turn)
                else:
                    self._start(turn)

    def _start(self, turn: WorkTurn[_Compilation]) -> None:
        compilation = turn.work
        compilation.has_begun = True
        for key, other in compilation.turns.items():
            del self._waiting[key]
            if other is not turn:
                self._turns.leave(other)
        compilation.turns.clear()
        job = self._threads.submit(self._compile, compilation.grammar)
        job.add_done_callback(partial(self._done, turn))

    def _done(self, turn: WorkTurn[_Compilation], job: Compiled) -> None:
        """Ends a turn, in the thread that compiled. After closing nothing is ended."""
        if job.cancelled():
            return
        with self._changing:
            self._turns.leave(turn)
            self._begin()
        error = job.exception()
        if error is None:
            turn.work.result.set_result(job.result())
        else:
            turn.work.result.set_exception(error)

    def _make_tools(self) -> _Tools:
        try:
            vocabulary = self._load()
        except VocabularyError as error:
            log.info("grammars are refused: %s", error)
            raise
        checker = GrammarChecker(vocabulary.tokens, self._limits, self._limits.threads)
        name_tokens = NameTokens(vocabulary.tokens.by_id)
        return _Tools(vocabulary, checker, LLMatcher(vocabulary.tokenizer, ""), name_tokens)

    def _compile(self, grammar: str) -> LLMatcher:
        began = time.monotonic()
        try:
            tools = self.tools.result()
            tools.checker.check(grammar)
            matcher = compile_grammar(tools.vocabulary, grammar, self._limits)
        except Exception as error:
            self._ended.put(GrammarCompiled(time.monotonic() - began, _fault(error)))
            raise
        self._ended.put(GrammarCompiled(time.monotonic() - began, None))
        return matcher


def _fault(error: Exception) -> GrammarFault:
    if isinstance(error, GrammarTooCostly):
        return "costly"
    if isinstance(error, GrammarError):
        return "wrong"
    return "no_vocabulary" if isinstance(error, VocabularyError) else "unavailable"


def _may_succeed_now(compiled: Compiled) -> bool:
    """Whether the compilation failed through no fault of the grammar."""
    if not compiled.done():
        return False
    if compiled.cancelled():
        return True
    error = compiled.exception()
    return error is not None and not isinstance(error, GrammarError | VocabularyError)


class BoundedCache(Generic[V]):
    """Cache of a bounded number of values, by text; the longest unused goes first. max_bytes: bound
    on the bytes of all keys in UTF-8.
    """

    def __init__(self, max_entries: int, max_bytes: int) -> None:
        self._max_entries, self._max_bytes = max_entries, max_bytes
        self._values: dict[str, V] = {}  # the last used last
        self._bytes = 0

    def get(self, key: str) -> V | None:
        if key not in self._values:
            return None
        value = self._values[key] = self._values.pop(key)
        return value

    def put(self, key: str, value: V) -> None:
        """Keep a value. A key of more than `max_bytes` is not kept."""
        if key in self._values:
            self._drop(key)
        self._values[key] = value
        self._bytes += _size(key)
        while len(self._values) > self._max_entries or self._bytes > self._max_bytes:
            self._drop(next(iter(self._values)))

    def remove(self, key: str) -> None:
        if key in self._values:
            self._drop(key)

    def _drop(self, key: str) -> None:
        del self._values[key]
        self._bytes -= _size(key)


def _size(key: str) -> int:
    return len(key.encode("utf-8", "surrogatepass"))
