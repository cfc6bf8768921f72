"""The head of an upload: the form of its body, its place and its digest."""

import base64
import binascii
import re

import msgspec
from starlette.datastructures import Headers

from loraplex.router.api.request.body import require
from loraplex.router.call import RequestError
from loraplex.router.http.body import check_plain
from loraplex.router.names.owned_name import OwnedName

_TAR = ("application/x-tar", "application/tar")
_BYTES = ("", "application/octet-stream", "application/vnd.safetensors", *_TAR)
_RANGE = re.compile(r"bytes (?:(\d{1,15})-(\d{1,15})|\*)/(\d{1,15})")
_SHA256 = re.compile(r"(?:^|,)\s*sha-256=:([A-Za-z0-9+/=]{44}):")


class BodyRange(msgspec.Struct, frozen=True):
    """The part of a body that a request carries. start: None = it asks how much has come. stop:
    behind its last byte. total: bytes of the whole.
    """

    start: int | None
    stop: int
    total: int


class UploadHead(msgspec.Struct, frozen=True):
    """An upload's head. form: its content type, if it is a form. part: None = the request is the
    whole. sha256: hex of the whole, if it is said; parts always say it.
    """

    form: str | None
    part: BodyRange | None
    sha256: str | None

    def key(self, name: OwnedName) -> str | None:
        """Names the upload that this is a part of; None = it is no part."""
        return None if self.part is None else f"{name} {self.part.total} {self.sha256}"


def read_head(headers: Headers, max_bytes: int) -> UploadHead:
    """Reads an upload's head. Raises RequestError (media_type, invalid, too_large)."""
    content_type = headers.get("content-type", "")
    kind = content_type.partition(";")[0].strip().lower()
    if kind not in (*_BYTES, "multipart/form-data"):
        expected = "application/x-tar, multipart/form-data or application/octet-stream"
        raise RequestError("media_type", f"expected content-type {expected}, got {kind[:100]!r}")
    check_plain(headers, max_bytes)
    part = _part(headers.get("content-range"))
    if part is not None and part.total > max_bytes:
        raise RequestError("too_large", f"an upload may have at most {max_bytes} bytes")
    said = headers.get("repr-digest") or (headers.get("content-digest") if part is None else None)
    form = content_type if kind == "multipart/form-data" else None
    head = UploadHead(form, part, _sha256(said))
    # Versions of an adapter have one length: only the digest tells which of them a part is of.
    message = "a part needs the `Repr-Digest: sha-256=:BASE64:` of the whole"
    require(part is None or head.sha256 is not None, message, "content-range")
    return head


def _part(said: str | None) -> BodyRange | None:
    if said is None:
        return None
    match = _RANGE.fullmatch(said.strip())
    message = "expected `bytes FIRST-LAST/TOTAL`, or `bytes */TOTAL`"
    if match is None:
        raise RequestError("invalid", f"content-range: {message}")
    total = int(match[3])
    if match[1] is None:
        return BodyRange(None, 0, total)
    start, stop = int(match[1]), int(match[2]) + 1
    require(start < stop <= total, message, "content-range")
    return BodyRange(start, stop, total)


def _sha256(said: str | None) -> str | None:
    """Hex of the sha-256 in a digest field (RFC 9530); None where the field has none."""
    match = _SHA256.search(said or "")
    try:
        return None if match is None else base64.b64decode(match[1], validate=True).hex()
    except binascii.Error:
        raise RequestError("invalid", "the digest field is not base64") from None
