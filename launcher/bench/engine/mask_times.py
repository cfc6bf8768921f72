"""`loraplex bench masks`: what grammars cost the host, from a new schema to a step's masks."""

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from random import Random

import numpy as np
from llguidance import LLMatcher

from loraplex.adapters.grammar.checker import GrammarChecker
from loraplex.adapters.grammar.compile import compile_grammar
from loraplex.adapters.grammar.deep_threads import DeepThreads
from loraplex.adapters.grammar.limits import GrammarLimits
from loraplex.adapters.grammar.vocabulary import Vocabulary, make_vocabulary
from loraplex.launcher.bench.engine.made_schemas import json_of
from loraplex.launcher.bench.engine.made_tokenizer import tokenizer_json

_END = 2
_STEPS = 40
_FEW = 8


@dataclass(frozen=True, slots=True)
class MaskTimes:
    """Milliseconds, medians where nothing else is said. new_schema_ms: of one never seen, until its
    first mask is there: tried out in another process (check_ms), then compiled (compile_ms).
    one_row_ms, few_rows_ms, all_rows_ms: the masks of a step with 1, 8 and `schemas` rows, each
    with its own schema. all_rows_p99_ms: the 99th percentile."""

    vocabulary: int
    schemas: int
    threads: int
    vocabulary_ms: float
    check_ms: float
    compile_ms: float
    new_schema_ms: float
    new_schema_most_ms: float
    one_row_ms: float
    few_rows_ms: float
    all_rows_ms: float
    all_rows_p99_ms: float


def measure(vocab_size: int, schemas: int, threads: int) -> MaskTimes:
    """vocab_size: of a made-up vocabulary."""
    rng = Random(0)
    grammars = [f"start: {json_of(rng)}" for _ in range(schemas)]
    text = tokenizer_json(vocab_size, (_END,))
    started = time.perf_counter()
    vocabulary = make_vocabulary(text, vocab_size, (_END,))
    vocabulary_ms = _ms_since(started)
    with DeepThreads(threads) as pool:
        matchers, checks, compiles = _compiled(vocabulary, grammars, pool)
        step = _Step(vocabulary, matchers, threads, pool)
        one, few, most = (step.times(rows) for rows in (1, min(_FEW, schemas), schemas))
    new = [check + compiled for check, compiled in zip(checks, compiles, strict=True)]
    return MaskTimes(
        vocabulary=vocab_size,
        schemas=schemas,
        threads=threads,
        vocabulary_ms=vocabulary_ms,
        check_ms=statistics.median(checks),
        compile_ms=statistics.median(compiles),
        new_schema_ms=statistics.median(new),
        new_schema_most_ms=max(new),
        one_row_ms=statistics.median(one),
        few_rows_ms=statistics.median(few),
        all_rows_ms=statistics.median(most),
        all_rows_p99_ms=float(np.percentile(most, 99)),
    )


def _ms_since(started: float) -> float:
    return 1e3 * (time.perf_counter() - started)


def _compiled(
    vocabulary: Vocabulary, grammars: Sequence[str], pool: DeepThreads
) -> tuple[list[LLMatcher], list[float], list[float]]:
    """Matchers, and milliseconds of trying out and of compiling each. Raises GrammarError."""
    limits = GrammarLimits()
    checker = GrammarChecker(vocabulary.tokens, limits)
    matchers, checks, compiles = [], [], []
    try:
        checker.check("start: /a/")  # its process starts
        for grammar in grammars:
            started = time.perf_counter()
            checker.check(grammar)
            checks.append(_ms_since(started))
            started = time.perf_counter()
            matchers.append(pool.submit(compile_grammar, vocabulary, grammar, limits).result())
            compiles.append(_ms_since(started))
    finally:
        checker.close()
    return matchers, checks, compiles


class _Step:
    """Rows that each write an answer to a schema, drawn from all that its mask allows."""

    def __init__(
        self, vocabulary: Vocabulary, matchers: list[LLMatcher], threads: int, pool: DeepThreads
    ) -> None:
        self._matchers, self._threads, self._pool = matchers, threads, pool
        self._vocabulary = vocabulary
        self._bits = np.zeros((len(matchers), vocabulary.mask_words), dtype=np.int32)
        self._rng = np.random.default_rng(0)

    def times(self, rows: int) -> list[float]:
        """Milliseconds of the masks of each step."""
        found = []
        for _ in range(_STEPS):
            started = time.perf_counter()
            shares = [range(i, rows, self._threads) for i in range(min(self._threads, rows))]
            for _ in self._pool.map(self._fill, shares):
                pass
            found.append(_ms_since(started))
            for row in range(rows):
                self._advance(row)
        return found

    def _fill(self, rows: range) -> None:
        for row in rows:
            own = self._bits[row]
            self._matchers[row].unsafe_compute_mask_ptr(own.ctypes.data, own.nbytes)

    def _advance(self, row: int) -> None:
        bits = np.unpackbits(self._bits[row].view(np.uint8), bitorder="little")
        ids = np.flatnonzero(bits[: self._vocabulary.size])
        ids = ids[~np.isin(ids, self._vocabulary.end_ids)]
        matcher = self._matchers[row]
        goes_on = ids.size and matcher.consume_token(int(self._rng.choice(ids)))
        if not goes_on or matcher.is_stopped():
            matcher.reset()
