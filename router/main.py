"""Runs one router process: an HTTP server, from its first line to a clean stop."""

from prometheus_client import CollectorRegistry

from adapters.sources.hub import HubSource
from router.app import build_app
from router.config import RouterConfig
from router.http_server import RouterServer, check_tls, listen
from router.service import ConfigError, build_service


def run(config: RouterConfig) -> None:
    """Serves until SIGTERM or SIGINT, then lets running answers finish for `drain_timeout_s`.

    Ends the process with one sentence for a bad option, or an address that cannot be had.
    """
    if not config.workers and not config.redis:
        raise SystemExit("loraplex: no workers: name some with --worker, or find them by --redis")
    try:
        check_tls(config)
        service = build_service(config, CollectorRegistry(), HubSource())
        listener = listen(config.host, config.port, config.reuse_port)
    except ConfigError as error:
        raise SystemExit(f"loraplex: {error}") from error
    except OSError as error:
        raise SystemExit(f"loraplex: {config.host}:{config.port}: {error.strerror}") from error
    server = RouterServer(build_app(service), service)
    host, port = listener.getsockname()[:2]
    shown = f"[{host}]" if ":" in host else host
    # The socket accepts from here on: what comes early waits until the application is up.
    scheme = "http" if config.tls_cert is None else "https"
    print(f"router: listening on {scheme}://{shown}:{port}", flush=True)
    server.run(sockets=[listener])
    if not server.started:
        raise SystemExit(3)
