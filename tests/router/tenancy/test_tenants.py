"""Whose request it is goes with the request to where work is shared."""

import time

import msgspec

from loraplex.router.api.openai import completions as openai_completions
from loraplex.router.generation.dispatcher import ArrivedRequest
from loraplex.router.telemetry.observer import RequestObserver
from loraplex.router.telemetry.request import in_hand
from loraplex.router.tenancy.keys import NOBODY, ApiKey, Caller
from tests.router.fake_worker import BASE_NAME, FakeWorker
from tests.router.serving import Running


async def test_tenants_share_no_prefixes(router: Running, worker: FakeWorker) -> None:
    body = msgspec.json.encode({"model": BASE_NAME, "prompt": "x"})
    for caller in (NOBODY, Caller(ApiKey("one", "acme", "0" * 64))):
        arrived = ArrivedRequest(f"for-{caller.tenant}", caller, body, openai_completions.parse)
        charge = router.service.tenancy.metering.charge(caller, arrived.request_id)
        observer = RequestObserver(
            in_hand(), router.service.metrics, charge, lambda error: None, time.monotonic
        )
        generation, _ = await router.service.dispatcher.start(arrived, charge, observer)
        await generation.finish()
        generation.close()
    assert [request.salt for request in worker.requests] == ["", "acme"]
    assert [request.tenant for request in worker.requests] == ["", "acme"]
