"""Announces a worker's address to routers, through a store that both can write to. Pure.

The record is signed with the secret that opens workers. So write access to the store alone cannot
make a router send that secret to a stranger.
"""

import hashlib
import hmac
from urllib.parse import urlsplit

import msgspec

GROUP = "workers"
# Its worker says every few seconds that it is still there.
LEASE_S = 10.0
MAX_RECORD_BYTES = 4096


class WorkerRecord(msgspec.Struct, frozen=True):
    """A worker's entry about itself in the shared store. url: ws:// or wss://, as routers reach it.
    epoch: of two with one id, the higher is real.
    """

    worker_id: str
    url: str
    epoch: int
    signature: str = ""


def signed(record: WorkerRecord, secret: str) -> bytes:
    """The bytes that the store keeps."""
    signature = _signature(record, secret)
    return msgspec.json.encode(msgspec.structs.replace(record, signature=signature))


def verified(data: bytes, secret: str) -> WorkerRecord | None:
    """Reads a record; None = no worker with this secret wrote it, or it has no address."""
    if len(data) > MAX_RECORD_BYTES:
        return None
    try:
        record = msgspec.json.decode(data, type=WorkerRecord)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None
    if not hmac.compare_digest(record.signature.encode(), _signature(record, secret).encode()):
        return None
    return record if is_worker_url(record.url) else None


def is_worker_url(url: str) -> bool:
    try:
        parts = urlsplit(url)
        host = (parts.hostname or "").encode("idna")
        known = parts.scheme in ("ws", "wss") and parts.path in ("", "/")
        return bool(host) and known and parts.username is None and parts.port != 0
    except ValueError:
        return False


def _signature(record: WorkerRecord, secret: str) -> str:
    text = msgspec.json.encode((record.worker_id, record.url, record.epoch))
    return hmac.new(secret.encode(), text, hashlib.sha256).hexdigest()
