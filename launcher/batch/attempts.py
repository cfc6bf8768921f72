"""A line's way to the server, and as many more as its failures allow."""

import time
from dataclasses import dataclass

import httpx

from loraplex.launcher.batch.progress import Progress
from loraplex.launcher.refusals import error_text, retry_after_s
from loraplex.router.lines.errors import BatchError
from loraplex.router.lines.gate import Gate
from loraplex.router.lines.lines import BatchRequest
from loraplex.router.lines.pace import BUSY, TOO_LONG, after_failure, pause_s
from loraplex.router.lines.records import BatchFault, Outcome, response_of


@dataclass(frozen=True, slots=True)
class _Failure:
    """Another attempt may help. outcome: if it is the last. status: None = there was no answer."""

    outcome: Outcome
    why: str
    status: int | None = None
    asked_s: float | None = None


class LineAttempts:
    """What all lines have in common: the gate, and how many were answered."""

    def __init__(self, gate: Gate, retries: int, progress: Progress) -> None:
        self._gate = gate
        self._retries = retries
        self._progress = progress
        self._answers = 0

    async def answer(self, http: httpx.AsyncClient, request: BatchRequest) -> Outcome | None:
        """None = the batch stops before the line has an answer. Raises BatchError."""
        attempt, before = 0, self._answers
        while await self._gate.enter():
            attempt += 1
            got = await self._post(http, request)
            self._settle(got, attempt)
            if not isinstance(got, _Failure):
                return got
            further = self._answers > before
            verdict = after_failure(attempt, self._retries, got.status, further)
            if verdict == "give up":
                return got.outcome
            if verdict == "end":
                raise BatchError(f"{http.base_url} answers nobody any more: {got.why}")
            await self._gate.pause(pause_s(attempt, got.asked_s))
        return None

    def _settle(self, got: Outcome | _Failure, attempt: int) -> None:
        pace = self._gate.pace
        if not isinstance(got, _Failure):
            self._answers += 1
            self._progress.note = ""
            pace.answered()
        else:
            self._progress.note = f"waiting: {got.why}"
            if got.status is None:
                pace.lost()
            else:
                pace.busy(time.monotonic(), pause_s(attempt, got.asked_s))
        self._gate.wake()

    async def _post(self, http: httpx.AsyncClient, request: BatchRequest) -> Outcome | _Failure:
        headers = {"content-type": "application/json"}
        try:
            answer = await http.post(request.path, content=request.body, headers=headers)
        except httpx.ReadTimeout:
            why = "no answer in time (--timeout-s)"
            return _Failure(BatchFault("timeout", why), why, TOO_LONG)
        except httpx.RequestError as error:
            why = f"{type(error).__name__} {error}".strip()
            return _Failure(BatchFault("connection_failed", f"no answer came: {why}"), why)
        outcome = response_of(
            answer.status_code, answer.headers.get("x-request-id"), answer.content
        )
        if answer.status_code not in BUSY:
            return outcome
        asked = retry_after_s(answer.headers.get("retry-after", ""), time.time())
        why = f"{answer.status_code} {error_text(answer.content)}"
        return _Failure(outcome, why, answer.status_code, asked)
