"""Failures of a generation after the queue, and the error that the caller gets. Pure."""

from collections.abc import Iterator
from contextlib import contextmanager

from loraplex.adapters.errors import AdapterError
from loraplex.router.api.errors import from_adapter_error, from_engine_error
from loraplex.router.call import Api, RequestError, adapter_field
from loraplex.router.policy.queue.queue_limits import QueueFull
from loraplex.server.protocol import ErrorCode


class NoWorker(Exception):
    """No worker can take work now. retry_after_s: a hint for the caller."""

    def __init__(self, message: str, retry_after_s: float) -> None:
        super().__init__(message)
        self.message = message
        self.retry_after_s = retry_after_s


class DeadlinePassed(Exception):
    """The request's time was over before its answer was complete."""


class SequenceFailed(Exception):
    """A worker ended the sequence in an error, or no worker could go on with it. param: the place
    in the body that is at fault, where it is known.
    """

    def __init__(self, code: ErrorCode, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.code: ErrorCode = code
        self.message = message
        self.param = param


class RequestQuarantined(Exception):
    """The request, or one like it, killed the workers that it ran on: it is not tried again."""


class Stopping(Exception):
    """The router is being stopped, and the time for running answers is over."""


class ReaderTooSlow(Exception):
    """The client reads more slowly than tokens arrive, by more than the buffer holds."""


class Aborted(Exception):
    """The caller wants no more of the answer."""


FAILURES = (
    *(QueueFull, NoWorker, DeadlinePassed, TimeoutError, AdapterError),
    *(SequenceFailed, RequestQuarantined, ReaderTooSlow, Stopping),
)


# Of these no adapter is the cause; of the codes the request is.
_EXCUSED = (QueueFull, NoWorker, ReaderTooSlow, Stopping)
_CALLERS: frozenset[ErrorCode] = frozenset(
    ("invalid_request", "invalid_image", "bad_grammar", "context_length")
)


def is_excused(error: Exception) -> bool:
    """Whether a request would have failed with any adapter."""
    if isinstance(error, SequenceFailed):
        return error.code in _CALLERS
    return isinstance(error, _EXCUSED)


@contextmanager
def as_request_errors(api: Api) -> Iterator[None]:
    """Turns failures of the queue, workers and adapters into RequestError, and raises that."""
    try:
        yield
    except FAILURES as error:
        raise request_error(error, api) from error


def request_error(error: Exception, api: Api) -> RequestError:
    """The caller's error for a failure anywhere between the queue and a worker."""
    if isinstance(error, AdapterError):
        return from_adapter_error(error, adapter_field(api))
    if isinstance(error, SequenceFailed):
        return from_engine_error(error.code, error.message, error.param)
    if isinstance(error, QueueFull):
        return RequestError("overloaded", error.message, retry_after_s=error.retry_after_s)
    if isinstance(error, NoWorker):
        return RequestError("unavailable", error.message, retry_after_s=error.retry_after_s)
    if isinstance(error, RequestQuarantined):
        return RequestError(
            "quarantined",
            "every worker that ran this request died of it, so it is not run again; change the "
            "request, or report it to the operator",
        )
    if isinstance(error, Stopping):
        return RequestError("unavailable", "the router is being stopped; try again")
    if isinstance(error, ReaderTooSlow):
        return RequestError("incomplete", "the answer was not read fast enough and was given up")
    return RequestError("deadline", "the request's time was over before its answer was complete")
