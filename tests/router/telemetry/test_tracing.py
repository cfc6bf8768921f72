"""Traces as a collector gets them, log lines as programs read them, and neither unless wanted."""

import json
import logging
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from loraplex.adapters.common.logs import JsonFormatter
from loraplex.router.config import RouterConfig
from loraplex.router.telemetry.request import request_id
from loraplex.router.telemetry.tracing import NoTracing, make_tracing
from tests.router.fake_worker import EOS, FakeWorker, running_worker
from tests.router.otlp_receiver import Receiver, notes, running_receiver
from tests.router.serving import Running, running_router

TRACE = "0af7651916cd43dd8448eb211c80319c"
PARENT = "b7ad6b7169203331"
SAMPLED = {"traceparent": f"00-{TRACE}-{PARENT}-01"}
SECRET = "a prompt that is nobody's business"
STAGES = ("resolve", "queue", "placement", "load", "prefill", "decode")


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    with running_receiver() as found:
        yield found


async def generate(router: Running, headers: dict[str, str], **more: Any) -> Any:
    body = {"model": "mine", "prompt": SECRET, "max_tokens": 9, "temperature": 0.5, **more}
    return await router.client.post("/v1/completions", json=body, headers=headers)


async def one_answer(tmp_path: Path, headers: dict[str, str], **options: Any) -> Any:
    """An answer of a router that has stopped since."""
    async with (
        running_worker(FakeWorker()) as worker,
        running_router(tmp_path, worker, adapters=("mine=hub:org/mine",), **options) as router,
    ):
        worker.script = lambda request: [*b"abcd", EOS]
        worker.load_s = 0.001
        return await generate(router, headers)


async def test_a_request_is_a_trace_of_its_stages(tmp_path: Path, receiver: Receiver) -> None:
    answer = await one_answer(tmp_path, SAMPLED, otlp_endpoint=receiver.url)
    assert answer.headers["traceparent"].split("-")[1] == TRACE
    assert receiver.paths == {"/v1/traces"}
    root = receiver.named("text_completion mine")
    assert (root.trace_id.hex(), root.parent_span_id.hex()) == (TRACE, PARENT)
    found = notes(root)
    digest = answer.headers["x-loraplex-adapter-digest"]
    assert found["gen_ai.request.model"] == "mine"
    assert found["gen_ai.response.model"] == "fake-base"
    assert found["gen_ai.request.temperature"] == 0.5
    assert found["gen_ai.usage.input_tokens"] == len(SECRET)
    assert found["gen_ai.usage.output_tokens"] == 5
    assert found["loraplex.adapter.digest"] == digest
    assert found["loraplex.start"] == "cold"
    assert found["http.response.status_code"] == 200
    for name in STAGES:
        span = receiver.named(name)
        assert span.trace_id.hex() == TRACE
        assert span.parent_span_id == root.span_id
        assert root.start_time_unix_nano - 2_000_000 <= span.start_time_unix_nano
        assert span.start_time_unix_nano <= span.end_time_unix_nano <= root.end_time_unix_nano
    placed = notes(receiver.named("prefill"))
    assert placed["loraplex.adapter.digest"] == digest
    assert placed["loraplex.adapter.tier"] == "fetched"
    assert placed["loraplex.worker.id"] == "fake-0"
    assert placed["loraplex.placement.reason"] == found["loraplex.placement.reason"] == "home"
    assert SECRET.encode() not in receiver.raw


async def test_the_callers_decision_not_to_sample_holds(tmp_path: Path, receiver: Receiver) -> None:
    headers = {"traceparent": SAMPLED["traceparent"][:-1] + "0"}
    answer = await one_answer(tmp_path, headers, otlp_endpoint=receiver.url)
    assert answer.headers["traceparent"].endswith("-00")
    assert not receiver.spans


async def test_a_failure_has_its_cause(tmp_path: Path, receiver: Receiver) -> None:
    async with (
        running_worker(FakeWorker()) as worker,
        running_router(tmp_path, worker, otlp_endpoint=receiver.url) as router,
    ):
        answer = await generate(router, SAMPLED, model="nobody")
        assert answer.status_code == 404
    root = receiver.named("text_completion nobody")
    assert notes(root)["error.type"] == "adapter_not_found"
    assert root.status.code == root.status.STATUS_CODE_ERROR


async def test_exemplars_lead_to_traces(tmp_path: Path, receiver: Receiver) -> None:
    async with (
        running_worker(FakeWorker()) as worker,
        running_router(tmp_path, worker, otlp_endpoint=receiver.url) as router,
    ):
        assert (await generate(router, SAMPLED, model="fake-base")).status_code == 200
        asked = {"accept": "application/openmetrics-text; version=1.0.0"}
        text = (await router.client.get("/metrics", headers=asked)).text
    named = [line for line in text.splitlines() if TRACE in line]
    assert {line.partition("{")[0] for line in named} == {
        "loraplex_time_to_first_token_seconds_bucket",
        "loraplex_request_seconds_bucket",
    }


async def test_other_paths_are_not_traced(tmp_path: Path, receiver: Receiver) -> None:
    async with running_router(tmp_path, otlp_endpoint=receiver.url) as router:
        answer = await router.client.get("/health/live", headers=SAMPLED)
        assert "traceparent" not in answer.headers
    assert not receiver.spans


def test_it_is_off_and_not_even_loaded_by_default() -> None:
    assert isinstance(make_tracing(RouterConfig(workers=())), NoTracing)
    code = (
        "import sys, loraplex.router.routes.app; "
        "assert not [m for m in sys.modules if 'opentelemetry' in m]"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize("endpoint", ["collector:4318", "ftp://x", "http://user:pass@x", "http://"])
def test_an_endpoint_that_cannot_be(endpoint: str) -> None:
    with pytest.raises(ValueError, match=r"http://host:port|OTEL_EXPORTER_OTLP_HEADERS"):
        make_tracing(RouterConfig(workers=(), otlp_endpoint=endpoint))


# Logs


def lines(caplog: pytest.LogCaptureFixture) -> list[dict[str, Any]]:
    written = JsonFormatter(request_id)
    found = [r for r in caplog.records if r.name == "loraplex.router.telemetry.request_log"]
    return [json.loads(written.format(record)) for record in found]


@pytest.mark.parametrize(("logged", "shown"), [("no", None), ("yes", False), ("prompts", True)])
async def test_a_line_for_each_request(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, logged: str, shown: bool | None
) -> None:
    caplog.set_level(logging.INFO)
    await one_answer(tmp_path, {"x-request-id": "abc"}, log_requests=logged)
    if shown is None:
        assert lines(caplog) == []
        return
    (line,) = lines(caplog)
    assert line["loraplex.request.id"] == "abc"
    assert line["http.response.status_code"] == 200
    assert line["gen_ai.usage.output_tokens"] == 5
    assert line["loraplex.duration_s"] > 0
    assert (SECRET in json.dumps(line)) == shown


def test_json_lines_say_what_went_wrong() -> None:
    try:
        raise KeyError("x")
    except KeyError:
        record = logging.LogRecord("a", 40, "f", 1, "no %s", ("way",), sys.exc_info())
    line = json.loads(JsonFormatter(lambda: "r1").format(record))
    assert (line["level"], line["message"], line["request_id"]) == ("error", "no way", "r1")
    assert "KeyError" in line["exception"]
    assert line["time"].endswith("Z")
