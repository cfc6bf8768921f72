"""How long admissions take while Redis is frozen: `python -m tests.router.tenancy.frozen_redis`.

Times are the machine's, so this measures and the tests do not.
"""

import asyncio
import contextlib
import logging
import time
from typing import get_args

from loraplex.launcher.bench.report import percentile
from loraplex.router.call import RequestError
from loraplex.router.policy.quota import Ask, Limits, Subject
from loraplex.router.shared.redis_link import RedisLink
from loraplex.router.shared.redis_store import RedisStore
from loraplex.router.tenancy.metering import Admission, OutageMode
from tests.router.serving import poll
from tests.router.shared.redis_server import RedisServer, running_redis

TIMEOUT_S = 0.05  # --redis-timeout-s as it is by default
FREEZES = 20
CALLERS = 64  # at the moment of the freeze; there are fewer connections
LATER = 200  # one after the other, while it lasts


def ask_of(number: int) -> Ask:
    return Ask("acme", (Subject("key:app", Limits(concurrency=1 << 20)),), f"lease-{number}", 10)


async def admit_s(admission: Admission, number: int) -> float:
    """Seconds until it is decided, whatever is decided."""
    began = time.perf_counter()
    with contextlib.suppress(RequestError):
        await admission.admit(ask_of(number))
    return time.perf_counter() - began


async def measure(server: RedisServer, mode: OutageMode) -> tuple[list[float], list[float]]:
    """Of those that come when it freezes, and of those that come later."""
    link = RedisLink(server.url, TIMEOUT_S)
    admission = Admission(RedisStore(link, "frozen"), lambda: link.is_up, mode, "router")
    running = asyncio.create_task(link.run())
    at_once: list[float] = []
    later: list[float] = []

    async def is_up() -> bool:
        return link.is_up

    for _ in range(FREEZES):
        await poll(is_up)
        await admit_s(admission, 0)
        server.freeze()
        at_once += await asyncio.gather(*(admit_s(admission, i) for i in range(CALLERS)))
        later += [await admit_s(admission, i) for i in range(LATER)]
        server.thaw()
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    await link.close()
    return at_once, later


async def main() -> None:
    logging.disable(logging.WARNING)
    async with running_redis() as server:
        for mode in get_args(OutageMode):
            for name, times in zip(("at once", "later"), await measure(server, mode), strict=True):
                p50, p99 = (1e3 * percentile(times, p) for p in (50, 99))
                print(
                    f"{mode:12} {name:8} p50 {p50:7.2f} ms, p99 {p99:7.2f} ms, "
                    f"max {1e3 * max(times):7.2f} ms of {len(times)}",
                    flush=True,
                )


if __name__ == "__main__":
    asyncio.run(main())
