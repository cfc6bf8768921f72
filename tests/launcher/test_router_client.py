"""How commands reach a router over TLS, and push over connections that break."""

import asyncio
import base64
import contextlib
from pathlib import Path

import httpx
import numpy as np
import pytest
from safetensors.numpy import save

from loraplex.adapters.uploads.archive import adapter_files, archive_pieces
from loraplex.launcher.router_client import Failed, connect, push, send
from loraplex.router.http.client import http_client
from tests.adapters.uploads.bodies import CONFIG
from tests.router.fake_worker import FakeWorker, running_worker
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


class _Breaking:
    """Passes connections on to a router, and breaks the first ones off after so many bytes."""

    def __init__(self, port: int, after: list[int]) -> None:
        self._port = port
        self._after = after
        self.sent: list[int] = []

    async def serve(self) -> asyncio.Server:
        return await asyncio.start_server(self._pass_on, "127.0.0.1", 0)

    async def _pass_on(self, client: asyncio.StreamReader, back: asyncio.StreamWriter) -> None:
        most = self._after.pop(0) if self._after else None
        answer, router = await asyncio.open_connection("127.0.0.1", self._port)
        answering = asyncio.create_task(_copy(answer, back, None))
        self.sent.append(await _copy(client, router, most))
        router.close()
        back.close()
        await answering


async def _copy(
    source: asyncio.StreamReader, target: asyncio.StreamWriter, most: int | None
) -> int:
    """Copies up to `most` bytes; their number."""
    count = 0
    with contextlib.suppress(ConnectionError):
        while (most is None or count < most) and (piece := await source.read(1 << 16)):
            piece = piece if most is None else piece[: most - count]
            target.write(piece)
            await target.drain()
            count += len(piece)
    return count


async def test_a_push_goes_on_where_its_connection_broke(tmp_path: Path) -> None:
    """Also where parts of another version, of the same length, are at the router."""
    folder = tmp_path / "adapter"
    folder.mkdir()
    (folder / "adapter_config.json").write_bytes(CONFIG)
    (folder / "adapter_model.safetensors").write_bytes(
        save({"a.lora_A.weight": np.ones((2, 200_000), np.float32)})
    )
    async with (
        running_worker(FakeWorker()) as worker,
        running_router(tmp_path, worker, admin_key="admin") as router,
    ):
        whole = b"".join(archive_pieces(adapter_files(folder)))
        stale = {
            "content-range": f"bytes 0-1048575/{len(whole)}",
            "repr-digest": f"sha-256=:{base64.b64encode(bytes(32)).decode()}:",
        }
        path, admin = "/v1/adapters/policy", {"authorization": "Bearer admin"}
        left = await router.client.put(path, content=bytes(1 << 20), headers=stale | admin)
        assert left.json() == {"received": 1 << 20}
        port = router.client.base_url.port
        assert port is not None
        cut = 900_000
        breaking = _Breaking(port, [cut, cut])
        async with await breaking.serve() as proxy:
            url = f"http://127.0.0.1:{proxy.sockets[0].getsockname()[1]}"
            with connect(url, "admin") as http:
                pushed = await asyncio.to_thread(push, http, path, folder)
        direct = await router.client.put(path, content=whole, headers=admin)
        assert pushed["upload"] == direct.json()["upload"]
        # The first connection carried the whole, of which nothing is kept; the next one a part.
        assert sum(breaking.sent) < cut + len(whole) + 10_000, "only what was missing comes again"


def test_an_address_may_have_the_api_s_path() -> None:
    with connect("http://127.0.0.1:8080/v1/", "") as http:
        assert http.base_url == "http://127.0.0.1:8080"
