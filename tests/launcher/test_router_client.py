"""How commands reach a router over TLS."""

import asyncio
from pathlib import Path

import httpx
import pytest

from loraplex.launcher.router_client import Failed, connect, send
from loraplex.router.http.client import http_client
from tests.router.serving import Running, running_router

PEM = Path(__file__).parents[1] / "adapters" / "self_signed.pem"


def listed(url: str) -> object:
    with connect(url, "") as http:
        return send(http, "GET", "/v1/adapters", None)["data"]


def url_of(router: Running) -> str:
    """By the name in its certificate."""
    return f"https://localhost:{router.client.base_url.port}"


async def test_whom_openssl_trusts_is_trusted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SSL_CERT_FILE", str(PEM))
    async with running_router(tmp_path, tls_cert=PEM, tls_key=PEM) as router:
        assert await asyncio.to_thread(listed, url_of(router)) == []
        async with http_client(20.0, url_of(router)) as client:
            assert (await client.get("/health/live")).status_code == 200


async def test_and_nobody_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SSL_CERT_FILE", raising=False)
    async with running_router(tmp_path, tls_cert=PEM, tls_key=PEM) as router:
        with pytest.raises(Failed, match="CERTIFICATE_VERIFY_FAILED"):
            await asyncio.to_thread(listed, url_of(router))
        async with http_client(20.0, url_of(router)) as client:
            with pytest.raises(httpx.ConnectError, match="CERTIFICATE_VERIFY_FAILED"):
                await client.get("/health/live")
