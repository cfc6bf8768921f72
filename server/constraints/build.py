"""Builds the constraints of an engine from its settings."""

import os
from collections.abc import Callable

from loraplex.adapters.grammar.checker import CHECKER
from loraplex.adapters.grammar.limits import ServedGrammarLimits
from loraplex.adapters.grammar.vocabulary import Vocabulary
from loraplex.adapters.helpers.helper import start_problem
from loraplex.server.constraints.constraints import Constraints
from loraplex.server.engine.executor import ExecutorLimits

_MAX_MASK_THREADS = 8


def make_constraints(
    config: ServedGrammarLimits, limits: ExecutorLimits, load: Callable[[], Vocabulary]
) -> Constraints:
    """Make the worker's constraints. load: makes the model's vocabulary; where it has none,
    grammars are refused.
    """

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
