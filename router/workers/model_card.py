"""A worker's model card: fetched over HTTP, checked against its digest, kept on disk.

It knows bytes and files; what a card means for text is the text modules' business.
"""

import contextlib
import hashlib
import os
import re
from pathlib import Path

import httpx
import msgspec

from loraplex.adapters.errors import CommandError
from loraplex.router.http.client import http_client
from loraplex.server.protocol import ModelCard

MAX_CARD_BYTES = 64 << 20
MAX_KEPT_CARDS = 16
_FETCH_TIMEOUT_S = 30.0
_DIGEST = re.compile(r"[0-9a-f]{64}\Z")
_decode = msgspec.json.Decoder(ModelCard).decode


class CardError(CommandError):
    """A model card cannot be had, or is not what its digest says."""


def digest_of(payload: bytes) -> str:
    """sha256 hex of the card's JSON bytes, as a worker's hello carries it."""
    return hashlib.sha256(payload).hexdigest()


def parse_card(payload: bytes, expected_digest: str | None = None) -> ModelCard:
    """The card in these JSON bytes. Raises CardError."""
    if expected_digest is not None and digest_of(payload) != expected_digest:
        raise CardError(f"the model card's bytes do not match its digest {expected_digest}")
    try:
        return _decode(payload)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise CardError(f"not a model card: {error}") from error


class CardStore:
    """Cards on disk by digest. A folder that cannot be read or written only costs a fetch."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder.expanduser() / "cards"

    def load(self, digest: str) -> ModelCard | None:
        path = self._path(digest)
        try:
            if path.stat().st_size > MAX_CARD_BYTES:
                return None
            return parse_card(path.read_bytes(), digest)
        except (OSError, CardError):
            return None

    def save(self, digest: str, payload: bytes) -> None:
        path = self._path(digest)
        staging = path.with_suffix(f".{os.getpid()}.tmp")
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            staging.write_bytes(payload)
            staging.replace(path)
            self._drop_oldest()
        except OSError:
            with contextlib.suppress(OSError):
                staging.unlink(missing_ok=True)

    def _path(self, digest: str) -> Path:
        if not _DIGEST.match(digest):
            raise CardError(f"not a digest: {digest[:80]!r}")
        return self._folder / f"{digest}.json"

    def _drop_oldest(self) -> None:
        cards = sorted(self._folder.glob("*.json"), key=lambda path: path.stat().st_mtime)
        for path in cards[:-MAX_KEPT_CARDS]:
            path.unlink(missing_ok=True)


async def fetch_card(url: str, secret: str) -> bytes:
    """The card's JSON bytes from a worker (`url`: http://host:port). Raises CardError."""
    headers = {"Authorization": f"Bearer {secret}"} if secret else {}
    payload = bytearray()
    try:
        async with (
            http_client(_FETCH_TIMEOUT_S) as client,
            client.stream("GET", f"{url}/card", headers=headers) as response,
        ):
            if response.status_code != 200:
                raise CardError(f"{url}/card answered {response.status_code}")
            async for chunk in response.aiter_bytes():
                payload += chunk
                if len(payload) > MAX_CARD_BYTES:
                    raise CardError(f"{url}/card: larger than {MAX_CARD_BYTES} bytes")
    except httpx.HTTPError as error:
        raise CardError(f"{url}/card: {error or type(error).__name__}") from error
    return bytes(payload)
