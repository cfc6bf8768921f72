"""Runs one router process: an HTTP server, from its first line to a clean stop."""

import logging
import socket
import threading
from functools import partial

from prometheus_client import CollectorRegistry

from loraplex.adapters.common.pauses import shorten_pauses
from loraplex.adapters.sources.enabled import open_hub
from loraplex.router.build import build_service
from loraplex.router.config import RouterConfig, RouterConfigError
from loraplex.router.helper_check import check_helpers
from loraplex.router.http.listeners import (
    LISTENING,
    allow_connections,
    listen,
    listen_unix,
    share,
    url_of,
)
from loraplex.router.routes.app import build_app
from loraplex.router.routes.http_server import RouterServer

log = logging.getLogger(__name__)


def run(config: RouterConfig) -> None:
    """Serves until SIGTERM or SIGINT, then lets running answers finish for `drain_timeout_s`.

    Of several `router_processes` this is one; its `metrics_port` is its own. Raises
    RouterConfigError for a bad option, or an address that cannot be had.
    """
    is_alone = config.router_processes == 1
    allow_connections(config.max_connections)
    service = build_service(config, CollectorRegistry(), open_hub())
    listener = _listener(config, is_alone)
    own = [_metrics_listener(config)] if config.metrics_port else []
    scheme = "http" if config.tls_cert is None else "https"
    listening = f"{LISTENING} {url_of(listener, scheme)}"
    is_json = config.log_format == "json"
    announce = partial(log.info if is_json else partial(print, flush=True), listening)
    if is_alone:
        # The socket accepts from here on: what comes early waits until the application is up.
        announce()
    # Beside others it gets its share of connections when it can answer, not before.
    server = RouterServer(build_app(service), service, (lambda: None) if is_alone else announce)
    shorten_pauses()
    checking = (service.metrics.helper_broken,)
    threading.Thread(target=check_helpers, args=checking, name="helpers", daemon=True).start()
    server.run(sockets=[listener, *own])
    if not server.started:
        raise SystemExit(3)
    if service.background.failed.is_set():
        raise SystemExit(1)


def _listener(config: RouterConfig, is_alone: bool) -> socket.socket:
    """Opens the socket on which the router listens. Raises RouterConfigError."""
    try:
        if config.uds is not None:
            return listen_unix(config.uds)
        if is_alone:
            return listen(config.host, config.port)
        return share(config.host, config.port)
    except OSError as error:
        where = config.uds or f"{config.host}:{config.port}"
        raise RouterConfigError(f"{where}: {error.strerror or error}") from error


def _metrics_listener(config: RouterConfig) -> socket.socket:
    """Opens the socket for metrics. Raises RouterConfigError."""
    try:
        return listen(config.host, config.metrics_port)
    except OSError as error:
        where = f"{config.host}:{config.metrics_port}"
        raise RouterConfigError(f"--metrics-port: {where}: {error.strerror}") from error
