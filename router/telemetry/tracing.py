"""Whether this router traces, and with what."""

import time
from collections.abc import Mapping
from typing import Protocol
from urllib.parse import urlsplit

from loraplex.adapters.common import extras
from loraplex.router.config import RouterConfig
from loraplex.router.telemetry.request import NoTrace, Trace


class Tracing(Protocol):
    def begin(self, headers: Mapping[str, str]) -> Trace: ...

    def close(self) -> None:
        """Sends what is left. May block for seconds."""
        ...


class NoTracing:
    def __init__(self) -> None:
        self._trace = NoTrace()

    def begin(self, headers: Mapping[str, str]) -> Trace:
        return self._trace

    def close(self) -> None: ...


def make_tracing(config: RouterConfig) -> Tracing:
    """Makes the tracing that the options ask for. Raises ValueError, as `check_tracing` does."""
    if not config.otlp_endpoint:
        return NoTracing()
    check_tracing(config)
    from loraplex.router.telemetry.otel import OtelTracing

    return OtelTracing(config.otlp_endpoint, time.monotonic)


def check_tracing(config: RouterConfig) -> None:
    """Checks the options. Raises ValueError: no such endpoint, or the extra is missing."""
    endpoint = config.otlp_endpoint
    if not endpoint:
        return
    parts = urlsplit(endpoint)
    if parts.scheme not in ("http", "https") or not parts.hostname or parts.port == 0:
        raise ValueError(f"expected http://host:port or https://host:port, got {endpoint!r}")
    if parts.password is not None:
        raise ValueError("a URL shows in the list of processes: use OTEL_EXPORTER_OTLP_HEADERS")
    try:
        # Only where it is wanted: it takes its time to load.
        import loraplex.router.telemetry.otel  # noqa: F401
    except ModuleNotFoundError as error:
        raise ValueError(extras.sentence(error, "traces")) from error
