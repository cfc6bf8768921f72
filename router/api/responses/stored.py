"""Stored answers of `/v1/responses`: what is kept, continued and listed. Pure."""

import zlib
from collections.abc import Sequence
from typing import Any, Literal

import msgspec

from loraplex.router.api.files_and_batches import ListQuery
from loraplex.router.api.request.body import require
from loraplex.router.api.responses.items import ResponseFailure, ResponseStatus

MAX_ITEMS_LISTED = 1000
USUAL_ITEMS_LISTED = 20
_PREFIXES = {"message": "msg", "reasoning": "rs"}


class DeletedResponse(msgspec.Struct, frozen=True):
    id: str
    object: Literal["response.deleted"] = "response.deleted"
    deleted: Literal[True] = True


class InputItemList(msgspec.Struct, frozen=True):
    """Items that an answer was made from. first_id, last_id: of `data`; null when it is empty."""

    data: list[dict[str, Any]]
    first_id: str | None
    last_id: str | None
    has_more: bool
    object: Literal["list"] = "list"


class StoredResponse(msgspec.Struct, frozen=True):
    """An answer as it is stored. answer: the response object. items: all that it was made from, so
    that it needs no earlier answer. alive_until: Unix seconds; if it is not over then, its
    router is dead; 0 = it is over.
    """

    answer: dict[str, Any]
    items: list[dict[str, Any]]
    alive_until: float = 0.0

    def over(self, status: ResponseStatus, message: str | None = None) -> "StoredResponse":
        """Returns it with its last status. message: why it failed."""
        error = None if message is None else msgspec.to_builtins(ResponseFailure(message))
        return StoredResponse(self.answer | {"status": status, "error": error}, self.items)

    def answered(self, status: int, content: bytes) -> "StoredResponse":
        """Returns how a request ended. content: a response object, or OpenAI's error for a status
        other than 200."""
        found = msgspec.json.decode(content or b'{"error": {"message": "internal error"}}')
        if status != 200:
            return self.over("failed", found["error"]["message"])
        created = {"created_at": self.answer["created_at"]}
        return StoredResponse(found | created, self.items)

    def pack(self) -> bytes:
        """Packs the answer, compressed: each holds its whole conversation."""
        return zlib.compress(msgspec.json.encode(self), 1)


def unpack(blob: bytes) -> StoredResponse:
    return msgspec.json.decode(zlib.decompress(blob), type=StoredResponse)


def own_items(body: bytes, name: str) -> list[dict[str, Any]]:
    """Lists a request's own items, as they are shown. body: one that was parsed. name: for ids."""
    given = msgspec.json.decode(body)["input"]
    items = [{"role": "user", "content": given}] if isinstance(given, str) else given
    return [_listed(item, f"{name}_i{i}") for i, item in enumerate(items)]


def _listed(item: dict[str, Any], name: str) -> dict[str, Any]:
    kind, content = item.get("type") or "message", item.get("content")
    listed = {"status": "completed", **item, "type": kind}
    listed["id"] = item.get("id") or f"{_PREFIXES.get(kind, 'fc')}_{name}"
    if isinstance(content, str):
        part = "output_text" if item.get("role") == "assistant" else "input_text"
        listed["content"] = [{"type": part, "text": content}]
    return listed


def page_of_items(items: Sequence[dict[str, Any]], query: ListQuery) -> InputItemList:
    """Returns a page of an answer's input items. Raises RequestError for an unknown `after`."""
    ordered = list(items) if query.order == "asc" else [*reversed(items)]
    if query.after:
        ids = [item["id"] for item in ordered]
        require(query.after in ids, "no such item", "after")
        ordered = ordered[ids.index(query.after) + 1 :]
    page = ordered[: query.limit]
    first, last = (page[0]["id"], page[-1]["id"]) if page else (None, None)
    return InputItemList(page, first, last, has_more=len(ordered) > query.limit)


def answer_in(piece: bytes) -> dict[str, Any] | None:
    """Read the answer with which a stream ends; None = this piece is not its last event."""
    before, _, data = piece.rpartition(b"\ndata: ")
    is_last = before.endswith((b".completed", b".incomplete", b".failed"))
    found: dict[str, Any] | None = msgspec.json.decode(data)["response"] if is_last else None
    return found


def unstored(data: bytes) -> bytes:
    """Marks an answer, or a stream's last event, that could not be stored. Texts have no such
    quotes, and objects of the caller's stand before the field.
    """
    before, _, after = data.rpartition(b'"store":true')
    return b'%b"store":false%b' % (before, after)
