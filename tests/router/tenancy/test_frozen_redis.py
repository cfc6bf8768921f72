"""While a real Redis is frozen, an admission waits for it once, for as long as is configured."""

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

import pytest

from loraplex.adapters.common.bounded import bounded
from loraplex.router.call import RequestError
from loraplex.router.policy.quota import Verdict
from loraplex.router.shared import redis_link
from loraplex.router.shared.redis_link import RedisLink
from loraplex.router.shared.redis_store import RedisStore
from loraplex.router.tenancy.metering import Admission, Admitted, OutageMode
from tests.router.shared.redis_server import running_redis
from tests.router.tenancy.frozen_redis import ask_of

T = TypeVar("T")

TIMEOUT_S = 0.05
CALLERS = 40  # more than there are connections: the wait for one counts, too


class Deadlines:
    """Every deadline that a call to Redis was given, in place of the clock."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.given: list[float] = []
        monkeypatch.setattr(redis_link, "bounded", self._note)

    async def _note(self, work: Coroutine[Any, Any, T], timeout_s: float) -> T:
        self.given.append(timeout_s)
        return await bounded(work, timeout_s)


async def decision(admission: Admission, number: int) -> str:
    try:
        answer = await admission.admit(ask_of(number))
    except RequestError as error:
        return error.cause
    assert not isinstance(answer, Verdict)
    return "not counted" if answer is None else _where(answer)


def _where(admitted: Admitted) -> str:
    return "counted here" if not isinstance(admitted.store, RedisStore) else "counted there"


@pytest.mark.parametrize(
    ("mode", "decided"),
    [("open", "not counted"), ("closed", "unavailable"), ("local-share", "counted here")],
)
async def test_all_is_decided_at_one_deadline(
    mode: OutageMode, decided: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with running_redis() as server:
        # Long at first: what has to be answered is not to depend on how busy the machine is.
        link = RedisLink(server.url, 10.0)
        admission = Admission(RedisStore(link, "frozen"), lambda: link.is_up, mode, "router")
        assert await decision(admission, 0) == "counted there"
        link.timeout_s = TIMEOUT_S
        deadlines = Deadlines(monkeypatch)
        server.freeze()
        async with asyncio.timeout(240):  # of a test that would else never end
            answers = await asyncio.gather(*(decision(admission, n) for n in range(CALLERS)))
        assert answers == [decided] * CALLERS
        assert deadlines.given == [TIMEOUT_S] * CALLERS, "each waits once, none is tried again"
        assert admission.mode == mode

        deadlines.given.clear()
        assert await decision(admission, CALLERS) == decided
        assert deadlines.given == [], "from then on Redis is not asked"
        await link.close()
