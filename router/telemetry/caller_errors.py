"""Every error that a caller gets passes here: counted, traced, and the last ones kept."""

import time
from collections.abc import Callable

from starlette.requests import Request

from loraplex.adapters.common.newest import NewestKept
from loraplex.router.api.admin.fleet import ErrorObject
from loraplex.router.call import RequestError
from loraplex.router.telemetry.metrics import GENERATION_PATHS, RouterMetrics
from loraplex.router.telemetry.request import in_hand

MAX_ERRORS = 64
MAX_TEXT = 300


class CallerErrors:
    """Keeps the latest errors that callers caused. Bounded: the oldest give way. The same error
    again is not listed twice.

    clock: Unix seconds.
    """

    def __init__(self, metrics: RouterMetrics, clock: Callable[[], float] = time.time) -> None:
        self._metrics = metrics
        self._clock = clock
        self._records = NewestKept[tuple[str, str, str], ErrorObject](MAX_ERRORS)

    def note(self, request: Request, error: RequestError) -> None:
        """Notes an error; of no route or method only the count: strangers ask for many."""
        is_generation = request.method == "POST" and request.scope["path"] in GENERATION_PATHS
        kind = "generation" if is_generation else "other"
        self._metrics.request_errors.labels(error.cause, kind).inc()
        in_hand().error = error.cause
        if error.cause in ("route_not_found", "method_not_allowed"):
            return
        path, message = request.scope["path"][:MAX_TEXT], error.message[:MAX_TEXT]
        key = (path, error.cause, message)
        before = self._records.get(key)
        count = 1 if before is None else before.count + 1
        request_id = request.state.request_id
        self._records[key] = ErrorObject(
            self._clock(), count, path, error.cause, message, request_id
        )

    @property
    def newest_first(self) -> list[ErrorObject]:
        return list(reversed(self._records.values()))
