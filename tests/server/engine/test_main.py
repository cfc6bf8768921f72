"""The engine process itself, with the certifying executor."""

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
import pytest

from loraplex.adapters.grammar.limits import ServedGrammarLimits
from loraplex.server.config import EngineConfig
from loraplex.server.engine.executor import ExecutorLimits
from loraplex.server.engine.main import _cache_line
from loraplex.server.engine.messages import EngineFailed, EngineReady, Shutdown
from tests.certifying.certificates import CertifyOptions, certified_output
from tests.certifying.factory import certify
from tests.server.constraints.serving import DEMO, text
from tests.server.engine.harness import make_request
from tests.server.engine.worker_end import TIMEOUT_S, FakeWorker
from tests.tethered import tethered

ARENA_BYTES = 1 << 16
CONFIG = EngineConfig(
    model_path="/nowhere",
    device="cpu",
    dtype="float32",
    page_size=16,
    kv_memory=1 << 20,
    adapter_memory=4096,
    host_arena_bytes=ARENA_BYTES,
    extent_bytes=256,
    max_context=None,
    max_running=8,
    max_waiting=16,
    max_step_tokens=64,
    adapter_slots=4,
)

FACTORY = "tests.certifying.factory:make"
CERTIFY = certify()


class Engine:
    def __init__(self, config: EngineConfig, executor: str) -> None:
        ours, theirs = socket.socketpair()
        arena = os.memfd_create("arena")
        os.ftruncate(arena, ARENA_BYTES)
        command = [sys.executable, "-m", "loraplex.server.engine.main"]
        command += ["--socket-fd", str(theirs.fileno()), "--arena-fd", str(arena)]
        command += ["--config", msgspec.json.encode(config).decode(), "--executor", executor]
        self.process = subprocess.Popen(
            tethered(*command), pass_fds=(theirs.fileno(), arena), stderr=subprocess.DEVNULL
        )
        theirs.close()
        os.close(arena)
        self.worker = FakeWorker(ours)


@contextmanager
def engine(config: EngineConfig = CONFIG, executor: str = CERTIFY) -> Iterator[Engine]:
    started = Engine(config, executor)
    try:
        yield started
    finally:
        started.worker.sock.close()
        try:
            started.process.wait(TIMEOUT_S)
        finally:
            started.process.kill()
            started.process.wait()


def test_serves_until_shutdown_and_ignores_ctrl_c() -> None:
    with engine() as run:
        ready = run.worker.expect(EngineReady)
        assert (ready.max_rows, ready.max_context, ready.arena_bytes) == (8, 1024, 4096)
        assert ready.total_pages * ready.page_size == 1024
        run.process.send_signal(signal.SIGINT)
        run.worker.submit(1, make_request([5, 6], 12, "a"))
        run.worker.submit(2, make_request([5, 6], 12))
        for key, adapter in ((1, "a"), (2, None)):
            assert run.worker.answer(key) == certified_output(adapter, [5, 6], 12, CertifyOptions())
        run.worker.send(Shutdown())
        assert run.process.wait(TIMEOUT_S) == 0


def test_leaves_when_the_worker_is_gone() -> None:
    with engine() as run:
        run.worker.expect(EngineReady)
        run.worker.submit(1, make_request([5, 6], 900))
        run.worker.sock.close()
        assert run.process.wait(TIMEOUT_S) == 0


def test_takes_vocabulary_and_context_from_the_model(tmp_path: Path) -> None:
    model = {"vocab_size": 40, "eos_token_id": [7, 8], "max_position_embeddings": 100}
    (tmp_path / "config.json").write_text(json.dumps(model))
    config = msgspec.structs.replace(CONFIG, model_path=str(tmp_path))
    with engine(config, certify(eos_percent=20)) as run:
        assert run.worker.expect(EngineReady).max_context == 100
        run.worker.submit(1, make_request([5, 6], 90))
        options = CertifyOptions(40, (7, 8), eos_percent=20)
        assert run.worker.answer(1) == certified_output(None, [5, 6], 90, options)


def test_grammars_are_of_the_models_own_tokens_and_within_its_options() -> None:
    grammar = ServedGrammarLimits(source_bytes=100)
    config = msgspec.structs.replace(CONFIG, model_path=str(DEMO), grammar=grammar)
    with engine(config) as run:
        run.worker.expect(EngineReady)
        run.worker.submit(1, make_request([5, 6], 30, grammar='start: "yes" | "no"'))
        run.worker.submit(2, make_request([5, 6], 30, grammar='start: "yes"' + " " * 100))
        assert text(run.worker.answer(1)) in ("yes", "no")
        run.worker.answer(2)
        assert run.worker.events[2][-1].error == "bad_grammar"
        run.worker.send(Shutdown())
        assert run.process.wait(TIMEOUT_S) == 0


def test_without_a_tokenizer_grammars_alone_are_refused() -> None:
    with engine() as run:
        run.worker.expect(EngineReady)
        run.worker.submit(1, make_request([5, 6], 12, grammar='start: "yes"'))
        run.worker.submit(2, make_request([5, 6], 12))
        run.worker.answer(1)
        assert run.worker.events[1][-1].error == "bad_grammar"
        assert run.worker.answer(2) == certified_output(None, [5, 6], 12, CertifyOptions())


@pytest.mark.parametrize(
    ("config", "executor", "word"),
    [
        (msgspec.structs.replace(CONFIG, host_arena_bytes=ARENA_BYTES + 1), CERTIFY, "arena"),
        (CONFIG, "magic", "expected torch or MODULE:FACTORY[:TEXT], got 'magic'"),
        (CONFIG, "json:nothing", "has no attribute 'nothing'"),
        (CONFIG, f"{FACTORY}:{{", "--executor: Input data was truncated"),
        (CONFIG, f"{FACTORY}:[1]", "--executor: Expected `object`"),
        (CONFIG, certify(step_s="x"), "--executor: Expected `float`"),
        (CONFIG, certify(nope=1), "unknown field `nope`"),
    ],
)
def test_says_why_it_cannot_start(config: EngineConfig, executor: str, word: str) -> None:
    with engine(config, executor) as run:
        assert word in run.worker.expect(EngineFailed).message
        assert run.process.wait(TIMEOUT_S) == 1


@pytest.mark.parametrize(
    ("windows", "line"),
    [
        ((None,), "16000 tokens (1000 pages of 16)"),
        (
            (None, 512),
            "8000 tokens (1000 pages of 16, 2 for the same tokens; 15738 in sequences of 32768)",
        ),
    ],
)
def test_what_the_cache_holds_is_said(windows: tuple[int | None, ...], line: str) -> None:
    limits = ExecutorLimits(1000, 16, 4, 64, 32768, 100, (2,), 0, 0, 4096, page_windows=windows)
    assert _cache_line(limits) == f"KV cache: {line}"
