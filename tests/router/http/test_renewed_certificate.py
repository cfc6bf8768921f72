"""A certificate is renewed while the router serves: nobody restarts it for that."""

import asyncio
import logging
import shutil
import ssl
from pathlib import Path

import pytest

from loraplex.router.http import tls
from tests.router.serving import Running, poll, running_router, trusting

HERE = Path(__file__).parents[1]
FIRST = HERE.parent / "adapters" / "self_signed.pem"
RENEWED = HERE / "pem" / "renewed.pem"


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tls, "FILE_POLL_S", 0.01)


async def served(router: Running) -> bytes:
    """The certificate of a new connection, in DER."""
    port = router.client.base_url.port
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    _, writer = await asyncio.open_connection("127.0.0.1", port, ssl=context)
    found = writer.get_extra_info("ssl_object").getpeercert(binary_form=True)
    writer.close()
    await writer.wait_closed()
    assert isinstance(found, bytes)
    return found


def der(pem: Path) -> bytes:
    text = pem.read_text()
    end = "-----END CERTIFICATE-----"
    return ssl.PEM_cert_to_DER_cert(text[text.index("-----BEGIN CERT") : text.index(end)] + end)


def put(source: Path, target: Path) -> None:
    """As a renewal does: the old file or the new one is there at any time."""
    beside = target.with_suffix(".new")
    shutil.copy(source, beside)
    beside.rename(target)


async def test_new_connections_get_what_a_renewal_wrote(tmp_path: Path) -> None:
    file = tmp_path / "tls.pem"
    put(FIRST, file)
    async with running_router(tmp_path, tls_cert=file, tls_key=file) as router:
        assert await served(router) == der(FIRST)
        assert (await router.client.get("/health/live")).status_code == 200
        put(RENEWED, file)

        async def renewed() -> bool:
            return await served(router) == der(RENEWED)

        await poll(renewed)
        # The connection from before goes on; a new one trusts what is served now.
        assert (await router.client.get("/health/live")).status_code == 200
        reader, writer = await asyncio.open_connection(
            "127.0.0.1", router.client.base_url.port, ssl=trusting(RENEWED)
        )
        writer.write(b"GET /health/live HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n")
        assert (await reader.read()).startswith(b"HTTP/1.1 200")
        writer.close()


async def test_what_cannot_be_used_changes_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Such as a chain whose key comes a moment later."""
    cert, key = tmp_path / "cert.pem", tmp_path / "key.pem"
    put(FIRST, cert)
    put(FIRST, key)
    caplog.set_level(logging.ERROR, "loraplex.router.http.tls")
    async with running_router(tmp_path, tls_cert=cert, tls_key=key) as router:
        put(RENEWED, cert)

        async def reported() -> bool:
            return "stays as it was" in caplog.text

        await poll(reported)
        assert f"--tls-key {key}: it is not the key of the certificate" in caplog.text
        assert await served(router) == der(FIRST)
        put(RENEWED, key)

        async def renewed() -> bool:
            return await served(router) == der(RENEWED)

        await poll(renewed)
    assert caplog.text.count("stays as it was") == 1
