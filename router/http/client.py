"""An HTTP client for uvloop that uses only the operator's options: no proxy, no netrc."""

import ssl
from collections.abc import Mapping

import httpx

from loraplex.adapters.common.authorities import trusted_context

_LIMITS = httpx.Limits(max_connections=100, max_keepalive_connections=20)


def http_client(
    timeout_s: float,
    base_url: str = "",
    headers: Mapping[str, str] | None = None,
    limits: httpx.Limits = _LIMITS,
    trusted: ssl.SSLContext | None = None,
) -> httpx.AsyncClient:
    """Makes an HTTP client that ignores proxies of the environment. timeout_s: of each phase
    (connecting, reading, ...). trusted: `trusted_context`, for many clients.
    """
    return httpx.AsyncClient(
        base_url=base_url,
        headers=headers,
        timeout=timeout_s,
        transport=_Transport(trusted or trusted_context(), limits=limits),
        trust_env=False,
    )


class _Transport(httpx.AsyncHTTPTransport):
    """httpx's own, but a connection that ends as soon as it is made is a ConnectError. uvloop then
    reports no socket, which anyio turns into an AttributeError."""

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        try:
            return await super().handle_async_request(request)
        except AttributeError as error:
            message = "the connection ended as soon as it was made"
            raise httpx.ConnectError(message, request=request) from error
