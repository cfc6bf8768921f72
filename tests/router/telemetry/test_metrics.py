"""A router's metrics under requests: by adapter within bounds, as gateways read them, and small."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry
from prometheus_client.parser import text_string_to_metric_families

from loraplex.router.build import build_service
from loraplex.router.config import RouterConfig
from loraplex.router.names.served import OwnedName
from loraplex.router.operations import compat_metrics
from loraplex.router.telemetry.top_adapters import COUNTS
from tests.grids import beyond
from tests.router.fake_worker import EOS, FakeWorker, make_manifest, running_worker
from tests.router.generation.test_lifecycle import Held
from tests.router.serving import FakeHub, Running, poll, running_router

MANY = 10_000
PROMPT = "hi"


def series(text: str) -> dict[tuple[str, frozenset[str]], float]:
    """Name and label values -> value."""
    return {
        (sample.name, frozenset(sample.labels.values())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


async def ask(router: Running, **parameters: Any) -> int:
    body = {"inputs": PROMPT, "parameters": {"max_new_tokens": 5, **parameters}}
    return (await router.client.post("/generate", json=body)).status_code


LOADED = "vllm:lora_adapter_loaded"


async def lora_names(router: Running) -> tuple[str, str]:
    """Running and waiting adapters, as `vllm:lora_requests_info` lists them."""
    text = (await router.client.get("/metrics")).text
    families = {family.name: family for family in text_string_to_metric_families(text)}
    (sample,) = families["vllm:lora_requests_info"].samples
    return sample.labels["running_lora_adapters"], sample.labels["waiting_lora_adapters"]


async def scrape(router: Running) -> dict[tuple[str, frozenset[str]], float]:
    return series((await router.client.get("/metrics")).text)


async def test_registered_adapters_have_names_and_no_others(tmp_path: Path) -> None:
    async with (
        running_worker(FakeWorker()) as worker,
        running_router(tmp_path, worker, adapters=("mine=hub:org/mine",)) as router,
    ):
        worker.script = lambda request: [*b"abcd", EOS]
        for parameters in ({}, {"adapter_id": "mine"}, {"adapter_id": "org/other"}):
            assert await ask(router, **parameters) == 200
        found = await scrape(router)
        for name in ("_base", "mine", "_other"):
            assert found["loraplex_adapter_requests_total", frozenset({name})] == 1
            assert found["loraplex_adapter_prompt_tokens_total", frozenset({name})] == len(PROMPT)
            assert found["loraplex_adapter_generated_tokens_total", frozenset({name})] == 5
        (info,) = (values for name, values in found if name == "loraplex_adapter_info")
        assert info == {"mine", "registered", "8", "false"}
        assert not any("org/" in value for _, values in found for value in values)


async def test_latencies_are_measured_once_a_request(tmp_path: Path) -> None:
    async with (
        running_worker(FakeWorker()) as worker,
        running_router(tmp_path, worker, adapters=("mine=hub:org/mine",)) as router,
    ):
        worker.script = lambda request: [*b"abcd", EOS]
        assert await ask(router) == 200
        worker.load_s = 0.01
        assert await ask(router, adapter_id="mine") == 200
        worker.load_s = None
        assert await ask(router, adapter_id="mine") == 200
        await router.until_idle()
        found = await scrape(router)
        assert found["loraplex_request_seconds_count", frozenset()] == 3
        assert found["loraplex_time_per_output_token_seconds_count", frozenset()] == 3
        assert found["loraplex_inter_token_latency_seconds_count", frozenset()] == 3 * 4
        starts = {
            start: found["loraplex_time_to_first_token_seconds_count", frozenset({start})]
            for start in ("base", "warm", "cold")
        }
        assert starts == {"base": 1, "warm": 1, "cold": 1}


async def test_a_resumed_stream_has_a_gap(tmp_path: Path) -> None:
    async def lose(worker: FakeWorker, request: Any, index: int) -> Any:
        return "engine_lost" if (request.attempt, index) == (0, 2) else None

    async with (
        running_worker(FakeWorker()) as worker,
        running_router(tmp_path, worker) as router,
    ):
        worker.script = lambda request: [*b"abcd", EOS]
        worker.before_token = lose
        assert await ask(router) == 200
        assert await router.metric("loraplex_resume_gap_seconds_count") == 1
        assert await router.metric("loraplex_inter_token_latency_seconds_count") == 4


async def test_failures_are_counted_by_cause_and_adapter(tmp_path: Path) -> None:
    async def fail(worker: FakeWorker, request: Any, index: int) -> Any:
        return "internal"

    async with (
        running_worker(FakeWorker()) as worker,
        running_router(tmp_path, worker, adapters=("mine=hub:org/mine",)) as router,
    ):
        worker.before_token = fail
        assert await ask(router, adapter_id="mine") == 500
        assert await ask(router, adapter_id="nobody") == 404
        assert await ask(router, temperature=-1) == 422
        found = await scrape(router)
        errors = "loraplex_request_errors_total"
        for cause in ("internal", "adapter_not_found", "invalid"):
            assert found[errors, frozenset({cause, "generation"})] == 1
        assert found["loraplex_adapter_errors_total", frozenset({"mine"})] == 1


async def test_health_that_is_asked_for_is_no_generation(tmp_path: Path) -> None:
    async with running_router(tmp_path) as router:
        for path in ("/", "/info", "/health"):
            assert (await router.client.get(path)).status_code == 503
        found = await scrape(router)
    assert found["loraplex_request_errors_total", frozenset({"unavailable", "other"})] == 1
    assert found["loraplex_request_errors_total", frozenset({"unavailable", "generation"})] == 0
    assert found["loraplex_requests_total", frozenset({"/health", "503"})] == 2
    assert ("loraplex_requests_total", frozenset({"/", "503"})) not in found


@asynccontextmanager
async def compat_router(folder: Path) -> AsyncIterator[Running]:
    """A router that shows vLLM's names, with a worker and the adapter `mine`."""
    options: dict[str, Any] = {"adapters": ("mine=hub:org/mine",), "metrics_compat": True}
    async with (
        running_worker(FakeWorker()) as worker,
        running_router(folder, worker, **options) as router,
    ):
        yield router


async def test_gateways_find_the_names_that_they_read(tmp_path: Path) -> None:
    async with compat_router(tmp_path) as router:
        text = (await router.client.get("/metrics")).text
        names = {family.name for family in text_string_to_metric_families(text)}
        assert {
            "vllm:num_requests_waiting",
            "vllm:num_requests_running",
            "vllm:kv_cache_usage_perc",
            "vllm:lora_requests_info",
            "vllm:num_gpu_loaded_lora_adapters",
            "vllm:max_gpu_lora_adapters",
        } <= names
        assert 'vllm:num_requests_waiting{engine="0",model_name="fake-base"} 0.0' in text


@pytest.mark.parametrize("accept", ["", "application/openmetrics-text; version=1.0.0"])
def test_names_have_their_colon_in_every_format(tmp_path: Path, accept: str) -> None:
    config = RouterConfig(workers=(), cache_dir=tmp_path, metrics_compat=True)
    service = build_service(config, CollectorRegistry(), FakeHub())
    text, _ = service.metrics.meters.render(accept)
    assert (
        b'\nvllm:request_success_total{engine="0",finished_reason="stop",model_name=""} 0' in text
    )
    assert b"vllm_" not in text


async def test_a_measure_has_vllms_name_too(tmp_path: Path) -> None:
    """Read from the same meter, over labels that are loraplex's own."""
    async with compat_router(tmp_path) as router:
        assert [await ask(router), await ask(router, adapter_id="mine")] == [200, 200]
        text = (await router.client.get("/metrics")).text
        families = {family.name: family for family in text_string_to_metric_families(text)}
        service = router.service
    own: dict[str, float] = {}
    for name, source in compat_metrics.same_meters(service.metrics).items():
        (found,) = source.collect()
        total = sum(s.value for s in found.samples if s.name.endswith(("_total", "_count")))
        shown = families[f"vllm:{name}"]
        assert shown.type == found.type
        assert all(s.labels["model_name"] == "fake-base" for s in shown.samples), name
        assert all(s.labels["engine"] == "0" for s in shown.samples), name
        counts = [s for s in shown.samples if s.name.endswith(("_total", "_count"))]
        assert sum(s.value for s in counts) == total, name
        own[name] = total
        if found.type == "histogram":
            most = max(s.value for s in shown.samples if s.labels.get("le") == "+Inf")
            assert most == total, name
    assert own["time_to_first_token_seconds"] == own["request_params_n"] == 2
    assert own["request_success"] == own["request_decode_time_seconds"] == 2
    reasons = {s.labels["finished_reason"] for s in families["vllm:request_success"].samples}
    assert reasons == {"stop", "length", "abort", "error"}


async def test_gateways_see_every_adapter_that_runs(tmp_path: Path) -> None:
    """By its name, or as requests named it, while they run."""
    local = "local:a,b"
    async with (
        running_worker(FakeWorker()) as worker,
        running_router(
            tmp_path, worker, adapters=("zed=hub:org/zed",), metrics_compat=True
        ) as router,
    ):
        held = Held(worker)
        tasks = [asyncio.create_task(ask(router, adapter_id=n)) for n in ("zed", "org/ref", local)]
        await worker.until(lambda: len(worker.requests) == 3)
        assert await lora_names(router) == ("", "zed,local:a%2Cb,org/ref")
        worker.resident = {make_manifest(name).digest for name in ("org/zed", "org/ref")}
        await worker.announce(ready=True)

        async def moved() -> bool:
            return await lora_names(router) == ("zed,org/ref", "local:a%2Cb")

        await poll(moved)
        loaded = {next(iter(v - {"gpu", "false"})) for n, v in await scrape(router) if n == LOADED}
        assert loaded == {"zed", "org/ref"}
        held.gate.set()
        assert await asyncio.gather(*tasks) == [200] * 3
        assert await lora_names(router) == ("", "")
        loaded = {next(iter(v - {"gpu", "false"})) for n, v in await scrape(router) if n == LOADED}
        assert loaded == {"zed"}


@given(st.lists(st.text("ab,%", max_size=6), max_size=40), st.integers(1, 5), st.integers(4, 40))
def test_names_of_a_label_are_bounded(names: list[str], most: int, chars: int) -> None:
    with (
        patch.object(compat_metrics, "MAX_NAMES", most),
        patch.object(compat_metrics, "MAX_LABEL_CHARS", chars),
    ):
        label = compat_metrics.listed(names)
    assert len(label) <= chars
    escaped = list(dict.fromkeys(name.replace(",", "%2C") for name in names))
    kept = label.split(",") if label or escaped[:1] == [""] else []
    assert kept == escaped[: len(kept)]
    assert len(kept) <= most


async def test_they_are_not_there_unless_asked_for(tmp_path: Path) -> None:
    async with running_router(tmp_path) as router:
        assert "vllm:" not in (await router.client.get("/metrics")).text


@pytest.mark.parametrize("accept", beyond(1, ["application/openmetrics-text; version=1.0.0", ""]))
async def test_ten_thousand_adapters_fit(tmp_path: Path, accept: str) -> None:
    names = [f"tenant-{i:05}.a-name-as-long-as-people-give-them" for i in range(MANY)]
    aliases = tuple(f"{name}=hub:org/{name[:12]}" for name in names)
    config = RouterConfig(workers=(), adapters=aliases, cache_dir=tmp_path, metrics_compat=True)
    service = build_service(config, CollectorRegistry(), FakeHub())
    for i, name in enumerate(names):
        for what in range(len(COUNTS)):
            service.metrics.top_adapters.count(OwnedName(name), what, i + 1)
    text, _ = service.metrics.meters.render(accept)
    assert len(text) < 1 << 20
    shown = [line for line in text.decode().splitlines() if line.startswith("loraplex_adapter_req")]
    assert len(shown) == config.metrics_adapters + 2
