"""What a worker says of its engine's start."""

import asyncio
from typing import cast
from unittest.mock import Mock

import pytest
from starlette.testclient import TestClient

from loraplex.server.engine.messages import StartProgress
from loraplex.server.worker import app
from loraplex.server.worker.app import UploadFace, WorkerApp
from loraplex.server.worker.start_log import StartLog
from loraplex.server.worker.worker import Worker

READING = StartProgress("reading weights", 4.12, 15, "GiB")


def test_lines_come_at_new_stages_and_while_one_takes_long() -> None:
    said = StartLog(100.0)
    assert said.line(StartProgress("loading libraries"), 101.0) is None, "a quick start is silent"
    assert said.line(READING, 103.0) == "starting: reading weights: 4.1 of 15 GiB (3 s so far)"
    assert said.line(READING, 112.0) is None
    assert said.line(READING, 113.0) == "starting: reading weights: 4.1 of 15 GiB (13 s so far)"
    graphs = StartProgress("capturing graphs", 1, 4, "sets")
    assert said.line(graphs, 113.5) == "starting: capturing graphs: 1 of 4 sets (14 s so far)"
    assert said.line(StartProgress("host memory"), 113.6) == "starting: host memory (14 s so far)"


def test_readiness_says_how_far_the_start_is() -> None:
    log = StartLog(0.0)
    log.line(READING, 2.0)
    worker = Mock(spec=Worker, state="starting", takes_work=False)
    worker.start_facts.return_value = log.facts(2.5)
    client = TestClient(WorkerApp(worker, "", cast(UploadFace, None)).build())
    answer = client.get("/health/ready")
    assert answer.status_code == 503
    assert answer.json() == {
        "status": "starting",
        "stage": "reading weights",
        "done": 4.12,
        "total": 15,
        "unit": "GiB",
        "seconds": 2.5,
    }
    worker.state = "draining"
    assert client.get("/health/ready").json() == {"status": "draining"}


async def test_a_router_that_connects_early_waits_for_the_start() -> None:
    worker = Mock(spec=Worker, card=None, became_ready=asyncio.Event())
    started = asyncio.create_task(WorkerApp(worker, "", cast(UploadFace, None))._has_started())
    await asyncio.sleep(0)
    assert not started.done()
    worker.card = b"{}"
    worker.became_ready.set()
    assert await started


async def test_a_router_waits_no_longer_than_it_would_for_an_answer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(app, "_START_WAIT_S", 0.0)
    worker = Mock(spec=Worker, card=None, became_ready=asyncio.Event())
    assert not await WorkerApp(worker, "", cast(UploadFace, None))._has_started()
