"""Lines of a batch's output and error files, in the shape of OpenAI's batch API. Pure.

A record's id says which line of the input it answers: its number, and a mark of its content.
"""

import re
from collections.abc import Mapping
from hashlib import blake2b

import msgspec

from loraplex.router.api.wire import in_one_line

_ID_BEGIN = "batch_req_"
_ID = re.compile(rf"{_ID_BEGIN}([1-9][0-9]{{0,17}})_([0-9a-f]{{16}})")
# Every record begins like this.
RECORD_BEGIN = f'{{"id":"{_ID_BEGIN}'.encode()
_UNREADABLE = (msgspec.MsgspecError, RecursionError, UnicodeDecodeError)


class BatchResponse(msgspec.Struct, frozen=True):
    status_code: int
    request_id: str | None
    body: msgspec.Raw

    @property
    def is_success(self) -> bool:
        return 200 <= self.status_code < 300


class BatchFault(msgspec.Struct, frozen=True):
    """Why a line has no response."""

    code: str
    message: str


# A line whose batch ended before it could run: it has no answer yet.
NOT_RUN: Mapping[str, BatchFault] = {
    "cancelled": BatchFault("batch_cancelled", "the batch was cancelled before the line ran"),
    "expired": BatchFault(
        "batch_expired", "the line could not be run before the completion window expired"
    ),
    "failed": BatchFault("batch_failed", "the batch failed before the line ran"),
}


class BatchRecord(msgspec.Struct, frozen=True):
    id: str
    custom_id: str | None
    response: BatchResponse | None
    error: BatchFault | None

    @property
    def is_success(self) -> bool:
        return self.response is not None and self.response.is_success


Outcome = BatchResponse | BatchFault


def record_of(name: str, custom_id: str | None, outcome: Outcome) -> BatchRecord:
    """Makes the record of a line's outcome. name: the record's id."""
    if isinstance(outcome, BatchFault):
        return BatchRecord(name, custom_id, None, outcome)
    return BatchRecord(name, custom_id, outcome, None)


class _Answered(msgspec.Struct):
    id: str


_decode_answered = msgspec.json.Decoder(_Answered).decode


def mark_of(line: bytes) -> int:
    """64 bits of a line's content."""
    return int.from_bytes(blake2b(line, digest_size=8).digest())


def record_id(number: int, mark: int) -> str:
    return f"{_ID_BEGIN}{number}_{mark:016x}"


def line_of(name: str) -> tuple[int, int] | None:
    """The number and the mark in a record's id; None = it is none of `record_id`."""
    match = _ID.fullmatch(name)
    return None if match is None else (int(match[1]), int(match[2], 16))


def answered_line(record: bytes) -> tuple[int, int] | None:
    """The number and the mark of the line that a record answers; None = it is no record."""
    try:
        return line_of(_decode_answered(record).id)
    except _UNREADABLE:
        return None


def encode(record: BatchRecord) -> bytes:
    """Writes a record as one line, with its end."""
    return in_one_line(msgspec.json.encode(record)) + b"\n"


def response_of(status: int, request_id: str | None, content: bytes) -> Outcome:
    """The outcome in a server's answer. An error's body may be any text, a success's is JSON."""
    try:
        body = msgspec.json.format(content.decode(), indent=-1).encode()
    except _UNREADABLE:
        if 200 <= status < 300:
            return BatchFault("invalid_answer", f"the server answered {status}, and no JSON")
        body = msgspec.json.encode(content.decode("utf-8", "replace"))
    return BatchResponse(status, request_id, msgspec.Raw(body))
