"""Whose request it is goes with the request to where work is shared."""

import msgspec

from router.api.openai import completions as openai_completions
from router.api.request.formatter import ApiLimits
from router.tenancy.keys import NOBODY
from tests.router.fake_worker import BASE_NAME, FakeWorker
from tests.router.serving import Running


async def test_tenants_share_no_prefixes(router: Running, worker: FakeWorker) -> None:
    body = msgspec.json.encode({"model": BASE_NAME, "prompt": "x"})
    call = openai_completions.parse(body, ApiLimits(base_names=(BASE_NAME,))).call
    for tenant in ("", "acme"):
        one = msgspec.structs.replace(call, tenant=tenant)
        charge = router.service.tenancy.metering.charge(NOBODY, f"for-{tenant}")
        generation = await router.service.dispatcher.start(one, charge)
        await generation.finish()
        generation.close()
    assert [request.salt for request in worker.requests] == ["", "acme"]
