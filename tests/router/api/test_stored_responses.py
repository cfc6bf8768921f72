"""Stored answers: items as they are listed, pages of them, and what a stream ends with."""

import json
from typing import Any

import pytest

from loraplex.router.api.files_and_batches import ListQuery
from loraplex.router.api.responses.stored import (
    StoredResponse,
    answer_in,
    own_items,
    page_of_items,
    unpack,
    unstored,
)
from loraplex.router.call import RequestError

USER = {"role": "user", "content": "a"}
LISTED = {
    "id": "msg_n_i0",
    "type": "message",
    "status": "completed",
    "role": "user",
    "content": [{"type": "input_text", "text": "a"}],
}


@pytest.mark.parametrize(
    ("given", "listed"),
    [
        ("a", [LISTED]),
        ([USER], [LISTED]),
        (
            [{**USER, "id": "mine", "status": "incomplete"}],
            [{"id": "mine", "status": "incomplete"}],
        ),
        ([{**USER, "id": None}], [{"id": "msg_n_i0"}]),
        ([{**USER, "role": "assistant"}], [{"content": [{"type": "output_text", "text": "a"}]}]),
        ([{**USER, "content": [{"type": "input_text", "text": "b"}]}], [{"type": "message"}]),
        (
            [{"type": "function_call_output", "call_id": "c", "output": "1"}, USER],
            [{"id": "fc_n_i0", "output": "1"}, {"id": "msg_n_i1"}],
        ),
        ([{"type": "reasoning", "summary": []}], [{"id": "rs_n_i0"}]),
    ],
)
def test_items_are_listed_whole(given: Any, listed: list[dict[str, Any]]) -> None:
    found = own_items(json.dumps({"input": given}).encode(), "n")
    assert [one | more for one, more in zip(found, listed, strict=True)] == found


@pytest.mark.parametrize(
    ("query", "ids", "has_more"),
    [
        (ListQuery(2), "dc", True),
        (ListQuery(2, after="c"), "ba", False),
        (ListQuery(9, order="asc"), "abcd", False),
        (ListQuery(2, after="b", order="asc"), "cd", False),
        (ListQuery(1, after="a", order="asc"), "b", True),
        (ListQuery(1, after="a"), "", False),
    ],
)
def test_pages(query: ListQuery, ids: str, has_more: bool) -> None:
    page = page_of_items([{"id": name} for name in "abcd"], query)
    assert ("".join(item["id"] for item in page.data), page.has_more) == (ids, has_more)
    assert (page.first_id, page.last_id) == ((ids[0], ids[-1]) if ids else (None, None))


def test_a_page_after_nothing() -> None:
    with pytest.raises(RequestError, match="`after`"):
        page_of_items([{"id": "a"}], ListQuery(1, after="x"))


def test_what_is_packed_is_unpacked() -> None:
    stored = StoredResponse({"id": "r", "output": []}, [{"id": "a", "content": "ä" * 1000}])
    assert unpack(stored.pack()) == stored
    assert len(stored.pack()) < 200


@pytest.mark.parametrize("kind", ["completed", "incomplete", "failed"])
def test_a_stream_ends_with_its_answer(kind: str) -> None:
    text = "\ndata: {}\nevent: response.failed"
    before = f"event: response.x\ndata: {json.dumps({'delta': text})}\n\n".encode()
    data = json.dumps({"response": {"id": text}})
    last = f"event: response.{kind}\ndata: {data}\n\n".encode()
    assert answer_in(before) is None
    assert answer_in(before + last) == {"id": text}


def test_only_the_field_says_that_nothing_is_stored() -> None:
    said = {"tools": [{"store": True}], "output": '"store":true', "store": True, "top_logprobs": 0}
    data = json.dumps(said, separators=(",", ":")).encode()
    assert json.loads(unstored(data)) == {**said, "store": False}
