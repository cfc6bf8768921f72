"""Step loops with grammars over the demo model's vocabulary, each on a thread of its own."""

import json
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import Any

import msgspec

from loraplex.adapters.grammar.limits import ServedGrammarLimits
from loraplex.adapters.grammar.vocabulary import Vocabulary, VocabularyError
from loraplex.server.constraints.constraints import Constraints
from loraplex.server.engine.channel import WorkerChannel, WorkerGone
from loraplex.server.engine.executor import Executor
from loraplex.server.engine.loop import EngineLoop
from loraplex.server.engine.scheduling.scheduler import Scheduler
from loraplex.server.engine.scheduling.scheduler_config import SchedulerConfig
from loraplex.server.model.tokenizer.grammar_vocabulary import read_vocabulary
from loraplex.server.protocol import TokenEvent
from tests.certifying.certificates import CertifyOptions
from tests.certifying.executor import CertifyingExecutor
from tests.server.engine.harness import limits
from tests.server.engine.worker_end import TIMEOUT_S, FakeWorker

DEMO = Path(__file__).parents[3] / "launcher" / "demo" / "model"
VOCAB = 2048
EOS = (2,)
MASK_THREADS = 2
LIMITS = limits(
    num_pages=256,
    page_size=16,
    max_rows=16,
    max_step_tokens=64,
    max_context=1000,
    vocab_size=VOCAB,
    eos_token_ids=EOS,
)
OPTIONS = CertifyOptions(VOCAB, EOS)
OBJECT = json.dumps(
    {
        "type": "object",
        "properties": {"n": {"type": "integer", "minimum": 0, "maximum": 99}, "b": {"enum": [1]}},
        "required": ["n", "b"],
        "additionalProperties": False,
        "x-guidance": {"whitespace_flexible": False},
    }
)


@cache
def vocabulary() -> Vocabulary:
    return read_vocabulary(DEMO, VOCAB, EOS)


def tokens(text: str) -> list[int]:
    ids: list[int] = vocabulary().tokenizer.tokenize_str(text)
    return ids


def text(token_ids: list[int]) -> str:
    return vocabulary().tokenizer.decode_str([i for i in token_ids if i not in EOS])


def constraints(load: Callable[[], Vocabulary] = vocabulary, **changes: Any) -> Constraints:
    """Opened. changes: of its limits."""
    made = Constraints(load, VOCAB, EOS, ServedGrammarLimits(**changes), MASK_THREADS)
    made.open()
    return made


def no_vocabulary() -> Vocabulary:
    raise VocabularyError("it has no tokenizer")


def certifying(**changes: Any) -> CertifyingExecutor:
    return CertifyingExecutor(msgspec.structs.replace(LIMITS, **changes), OPTIONS)


@contextmanager
def serving(
    executor: Executor[Any], depth: int, made: Constraints, max_draft: int = 0
) -> Iterator[FakeWorker]:
    """The worker of a running loop."""
    ours, theirs = socket.socketpair()
    worker, channel = FakeWorker(ours), WorkerChannel(theirs)
    scheduler = Scheduler(executor.limits, SchedulerConfig(max_draft=max_draft))
    loop = EngineLoop(executor, scheduler, channel, depth, made)

    def run() -> None:
        try:
            with suppress(WorkerGone):
                loop.run()
        finally:
            channel.close(flush_s=5)

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield worker
    finally:
        ours.close()
        thread.join(TIMEOUT_S)
        assert not thread.is_alive(), "the loop does not end"


def last(worker: FakeWorker, key: int) -> TokenEvent:
    worker.answer(key)
    return worker.events[key][-1]
