"""Facts about the request in hand, for its log line and its trace; by task, not by argument.

Names are OpenTelemetry's for generative AI where it has one, and `loraplex.*` otherwise.
"""

from collections.abc import Mapping
from contextvars import ContextVar
from typing import Protocol

Value = str | int | float | tuple[str, ...]
Notes = Mapping[str, Value]


class Trace(Protocol):
    """A request's spans. Times are the event loop's."""

    @property
    def trace_id(self) -> str | None:
        """The trace's id for exemplars; None unless the trace is recorded."""
        ...

    @property
    def traceparent(self) -> str | None:
        """W3C's header, for the caller."""
        ...

    def stage(self, name: str, began: float, ended: float, notes: Notes) -> None:
        """Adds a part of the request that is over."""
        ...

    def end(self, name: str, notes: Notes, error: str | None) -> None: ...


class NoTrace:
    """The trace of a router that traces nothing."""

    trace_id: str | None = None
    traceparent: str | None = None

    def stage(self, name: str, began: float, ended: float, notes: Notes) -> None: ...

    def end(self, name: str, notes: Notes, error: str | None) -> None: ...


class RequestInHand:
    """A request, with what its log line and trace say. notes: gathered on the way. error: the cause
    of its end, if it failed.

    began: monotonic seconds. keeps_prompts: the operator wants them in the log.
    """

    __slots__ = ("began", "error", "keeps_prompts", "notes", "request_id", "trace")

    def __init__(
        self, request_id: str, trace: Trace, began: float = 0.0, keeps_prompts: bool = False
    ) -> None:
        self.request_id = request_id
        self.trace = trace
        self.began = began
        self.keeps_prompts = keeps_prompts
        self.notes: dict[str, Value] = {}
        self.error: str | None = None

    @property
    def exemplar(self) -> dict[str, str] | None:
        trace_id = self.trace.trace_id
        return None if trace_id is None else {"trace_id": trace_id}

    @property
    def name(self) -> str:
        """The name of the span: operation and model, once they are known."""
        words = (self.notes.get("gen_ai.operation.name"), self.notes.get("gen_ai.request.model"))
        known = [str(word) for word in words if word is not None]
        return " ".join(known) or str(self.notes.get("http.route", "request"))


_IN_HAND: ContextVar[RequestInHand] = ContextVar("request in hand")


def begin(request: RequestInHand) -> None:
    """Sets the request in hand, from now on, in this task and those that it starts."""
    _IN_HAND.set(request)


def in_hand() -> RequestInHand:
    """The request that this task works for; one that nobody sees, outside of any."""
    return _IN_HAND.get(None) or RequestInHand("", NoTrace())


def request_id() -> str | None:
    """The id of the request in hand, for log lines."""
    found = _IN_HAND.get(None)
    return None if found is None else found.request_id
