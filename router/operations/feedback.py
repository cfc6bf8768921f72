"""Takes scores of answers from callers, for the guards of rollouts."""

import asyncio

import msgspec

from loraplex.router.call import RequestError
from loraplex.router.names.aliases import Aliases
from loraplex.router.names.judged_requests import KEPT_S, JudgedRequest, JudgedRequests, key_of
from loraplex.router.names.rollout_tally import Outcomes
from loraplex.router.policy.rollout import Counted
from loraplex.router.shared.store import Store, StoreDown
from loraplex.router.telemetry.metrics import RouterMetrics
from loraplex.router.tenancy.keys import Caller, opens

_RETRY_S = 1.0


class Feedback:
    """Finds the request that a score is of, in this router or in what routers share."""

    def __init__(self, store: Store, aliases: Aliases, metrics: RouterMetrics) -> None:
        self._store = store
        self._aliases = aliases
        self._metrics = metrics
        self._requests: JudgedRequests = metrics.judged_requests
        self._outcomes: Outcomes = metrics.outcomes
        self._writing = asyncio.Lock()

    async def run(self) -> None:
        """Writes requests to the store as they come, until cancelled."""
        while True:
            await self._requests.waiting.wait()
            try:
                await self._write()
            except StoreDown:
                await asyncio.sleep(_RETRY_S)

    async def take(self, caller: Caller, request_id: str, score: float) -> Counted:
        """Counts a score in [0, 1] of one of the caller's tenant's requests, once. Raises
        RequestError (forbidden; conflict: it has another score), StoreDown."""
        counted = await self._take(caller, request_id, score)
        self._metrics.feedback.labels(counted).inc()
        if counted in ("old", "new"):
            self._metrics.feedback_score.labels(counted).observe(score)
        return counted

    async def _take(self, caller: Caller, request_id: str, score: float) -> Counted:
        await self._write()
        key = key_of(caller.tenant, request_id)
        value = await self._store.get(key)
        if value is None:
            return "unknown"
        request = msgspec.json.decode(value, type=JudgedRequest)
        if not opens(caller, request.name.name, request.base):
            raise RequestError("forbidden", f"this key does not open {request.name.name!r}")
        if request.score is None:
            scored = msgspec.json.encode(msgspec.structs.replace(request, score=score))
            if await self._store.swap(key, value, scored, KEPT_S):
                return self._count(request, score)
            value = await self._store.get(key)
            request = request if value is None else msgspec.json.decode(value, type=JudgedRequest)
        if request.score != score:
            raise RequestError("conflict", f"request {request_id} has another score already")
        return "again"

    def _count(self, request: JudgedRequest, score: float) -> Counted:
        there = self._aliases.get(request.name)
        if there is None or there.rollout is None or there.rollout.id != request.rollout:
            return "over"
        return self._outcomes.add_score(there, request.digest, request.at, score) or "over"

    async def _write(self) -> None:
        async with self._writing:
            while (found := self._requests.oldest()) is not None:
                key, request = found
                await self._store.set(key, msgspec.json.encode(request), KEPT_S)
                self._requests.written()
