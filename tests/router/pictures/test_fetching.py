"""Pictures by their addresses: which hosts are asked, and what of their answers is taken."""

import ssl
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from loraplex.adapters.errors import AdapterError
from loraplex.router.call import RequestError
from loraplex.router.pictures import fetching
from loraplex.router.pictures.fetch_job import FetchJob
from loraplex.router.pictures.fetcher import PictureFetcher
from loraplex.router.pictures.fetching import fetched
from loraplex.server.protocol import MAX_PICTURE_BYTES
from tests.adapters.stub_files import Fault, FileServer, running_files
from tests.router.pictures.seeing import SMALL

CERTIFICATE = Path(__file__).parents[2] / "adapters/self_signed.pem"
TRUSTED = ssl.create_default_context(cafile=str(CERTIFICATE))


@pytest.fixture
def web() -> Iterator[FileServer]:
    with running_files(CERTIFICATE) as server:
        server.files |= {"p/a.png": SMALL, "p/empty": b"", "p/large": bytes(MAX_PICTURE_BYTES + 1)}
        yield server


async def refused(fetcher: PictureFetcher, url: str) -> str:
    with pytest.raises(RequestError) as error:
        await fetcher.fetch(url, "here")
    assert error.value.cause == "invalid_image"
    assert error.value.param == "here"
    return error.value.message


async def test_a_listed_host_is_asked_without_credentials(
    web: FileServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SSL_CERT_FILE", str(CERTIFICATE))
    monkeypatch.setenv("HTTPS_PROXY", "http://127.0.0.1:9")
    fetcher = PictureFetcher([f"localhost:{web.port}", "localhost"])
    base = f"https://localhost:{web.port}/p"
    assert await fetcher.fetch(f"{base}/a.png?x=1", "here") == SMALL
    assert not {"authorization", "cookie"} & {name.lower() for name in web.headers[0]}
    web.faults = {
        "moved": Fault("status", 302, headers=(("Location", "https://localhost/"),)),
        "gone": Fault("status", 404),
        "cut": Fault("cut", after=10),
    }
    web.files |= {"p/cut": SMALL}
    for name, words in (
        ("moved", "redirect"),
        ("gone", "HTTP 404"),
        ("none", "HTTP 404"),
        ("large", "bytes"),
        ("cut", "breaks off"),
    ):
        assert words in await refused(fetcher, f"{base}/{name}")
    # Without a port in the option the address must be public.
    assert "private address" in await refused(fetcher, "https://localhost/a.png")
    await fetcher.close()


@pytest.mark.parametrize(
    "url",
    [
        "http://images.test/a.png",
        "https://other.test/a.png",
        "https://images.test:8443/a.png",
        "https://images.test.evil.test/a.png",
        "https://images.test@evil.test/a.png",
        "https://user:word@images.test/a.png",
        "https://127.0.0.1/a.png",
        "https://[::1]/a.png",
        "https://169.254.169.254/latest/meta-data",
        "https://2130706433/a.png",
        "https://images.test\\@evil.test/",
        "https://ïmages.test/a.png",
        "https:///a.png",
        "https://images.test:99999/a.png",
        "file:///etc/passwd",
        "ftp://images.test/a.png",
        "gopher://images.test/",
        "//images.test/a.png",
        "/etc/passwd",
        "",
        "https://images.test/" + "a" * 9000,
    ],
)
async def test_no_other_address_reaches_a_process(url: str) -> None:
    fetcher = PictureFetcher(["images.test"])
    await refused(fetcher, url)
    await fetcher.close()


ADDRESSES = [
    *("127.0.0.1", "10.0.0.1", "172.16.0.1", "192.168.1.1", "169.254.169.254", "100.64.0.1"),
    *("0.0.0.0", "255.255.255.255", "224.0.0.1", "192.0.2.1", "198.18.0.1", "240.0.0.1"),
    *("::1", "::", "fe80::1", "fe80::1%eth0", "fc00::1", "ff02::1", "2001:db8::1"),
    *("::ffff:127.0.0.1", "::ffff:10.0.0.1", "64:ff9b::7f00:1", "2002:7f00:1::"),
    *("64:ff9b:1::7f00:1", "::7f00:1", "::ffff:0:7f00:1", "fec0::1", "2001:0:7f00:1::1"),
]


@pytest.mark.parametrize("address", ADDRESSES)
def test_no_private_address_is_connected_to(address: str) -> None:
    job = FetchJob("images.test", 443, "/", may_be_private=False)
    found = fetched(job, TRUSTED, lambda host, port: ["8.8.8.8", address])
    assert found.fault == "the image's host has a private address"


def test_the_address_that_was_judged_is_the_one_that_is_asked(web: FileServer) -> None:
    asked = []

    def lookup(host: str, port: int) -> list[str]:
        asked.append(host)
        return ["127.0.0.1"]

    job = FetchJob("adapters.test", web.port, "/p/a.png", may_be_private=True)
    assert fetched(job, TRUSTED, lookup).data == SMALL
    assert asked == ["adapters.test"]
    stranger = FetchJob("stranger.test", web.port, "/p/a.png", may_be_private=True)
    assert fetched(stranger, TRUSTED, lookup).fault is not None


def test_a_host_that_says_nothing_has_its_time(
    web: FileServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From the look-up on, whatever it waits for."""
    over = threading.Event()
    web.before_get = lambda name: over.wait()
    monkeypatch.setattr(fetching, "FETCH_S", 0.2)
    job = FetchJob("adapters.test", web.port, "/p/a.png", may_be_private=True)
    found = fetched(job, TRUSTED, lambda host, port: ["127.0.0.1"])
    over.set()
    assert found.fault == "the image does not come within 0.2 s"


def test_an_item_that_is_no_host_stops_the_start() -> None:
    with pytest.raises(AdapterError, match="--picture-host 'https://a.test'"):
        PictureFetcher(["https://a.test"])
