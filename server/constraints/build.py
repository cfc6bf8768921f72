"""The constraints of an engine, as its settings say."""

import os
from functools import partial
from pathlib import Path

from server.config import EngineConfig
from server.constraints.constraints import Constraints
from server.engine.executor import ExecutorLimits
from server.model.tokenizer.grammar_vocabulary import read_vocabulary

_MAX_MASK_THREADS = 8


def make_constraints(config: EngineConfig, limits: ExecutorLimits) -> Constraints:
    """Where the model has no usable tokenizer, grammars are refused."""
    vocab_size, eos = limits.vocab_size, limits.eos_token_ids
    return Constraints(
        partial(read_vocabulary, Path(config.model_path), vocab_size, eos),
        vocab_size,
        eos,
        config.grammar,
        mask_threads=max(1, min(_MAX_MASK_THREADS, len(os.sched_getaffinity(0)) // 2)),
    )
