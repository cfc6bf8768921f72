"""Fetches pictures from hosts that the operator listed, by processes without credentials."""

import ssl
from collections.abc import Sequence
from urllib.parse import urlsplit

import msgspec

from loraplex.adapters.common.web_hosts import PORT, listed_host
from loraplex.adapters.helpers.helper import Helper, HelperStopped, HelperUnavailable
from loraplex.adapters.helpers.pool import HelperPool
from loraplex.router.call import RequestError
from loraplex.router.pictures.fetch_job import FETCH_S, FetchBegin, FetchJob, FetchOutcome
from loraplex.router.text.turn_taking import FETCHES
from loraplex.server.protocol import MAX_PICTURE_BYTES

OPTION = "--picture-host"
_MODULE = "loraplex.router.pictures.fetching"
_AROUND_BYTES = 4096
_MAX_URL = 8192


class PictureFetcher:
    """Fetches from hosts of `--picture-host`, for callers whose turn it is. Processes start when
    first needed. Raises AdapterError for an item that is no host."""

    def __init__(self, hosts: Sequence[str]) -> None:
        self._hosts = dict(listed_host(host, OPTION) for host in hosts)
        paths = ssl.get_default_verify_paths()
        begin = msgspec.msgpack.encode(FetchBegin(paths.cafile, paths.capath))
        most = MAX_PICTURE_BYTES + _AROUND_BYTES
        self._pool = HelperPool(
            [Helper(_MODULE, begin, 2 * FETCH_S, most) for _ in range(FETCHES)], "picture-fetch"
        )

    async def fetch(self, url: str, where: str) -> bytes:
        """The bytes at an address. where: its place in the body. Raises RequestError
        (invalid_image, unavailable)."""
        try:
            job = self._job(url)
        except ValueError as error:
            raise RequestError("invalid_image", f"`{where}`: {error}", param=where) from None
        try:
            reply = await self._pool.ask(msgspec.msgpack.encode(job))
            outcome = msgspec.msgpack.decode(reply, type=FetchOutcome)
        except HelperStopped:
            outcome = FetchOutcome(fault="the host's answer takes too much time to read")
        except (HelperUnavailable, ValueError) as error:
            message = f"`{where}`: images cannot be fetched now"
            raise RequestError("unavailable", message, param=where) from error
        if outcome.fault is not None:
            message = f"`{where}`: {outcome.fault}"
            raise RequestError("invalid_image", message, param=where)
        return outcome.data

    async def close(self) -> None:
        """Ends the processes."""
        await self._pool.close()

    def _job(self, url: str) -> FetchJob:
        """Reads an address. Raises ValueError for one that is not fetched."""
        if not self._hosts:
            raise ValueError(f"images are not fetched here ({OPTION}): send a data URL")
        if len(url) > _MAX_URL:
            raise ValueError(f"an address has at most {_MAX_URL} characters")
        parts = urlsplit(url)
        if parts.scheme != "https" or parts.username is not None or not url.isascii():
            raise ValueError("expected a data URL, or https://HOST/PATH in ASCII")
        host, port = parts.hostname or "", parts.port or PORT
        may_be_private = self._hosts.get((host, port))
        if may_be_private is None:
            raise ValueError(f"images are not fetched from this host ({OPTION})")
        path = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
        return FetchJob(host, port, path, may_be_private)
