"""Lines of the output files: OpenAI's shape, and which line of the input they answer."""

import json

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from loraplex.router.lines.records import (
    RECORD_BEGIN,
    BatchFault,
    BatchResponse,
    answered_line,
    encode,
    mark_of,
    record_id,
    record_of,
    response_of,
)


def test_openais_shape() -> None:
    response = response_of(200, "r1", b'{"choices" : [],\n "usage": 1.50}')
    assert encode(record_of(record_id(3, 255), "a", response)) == (
        b'{"id":"batch_req_3_00000000000000ff","custom_id":"a","response":'
        b'{"status_code":200,"request_id":"r1","body":{"choices":[],"usage":1.50}},"error":null}\n'
    )
    fault = BatchFault("invalid_json", "why")
    assert json.loads(encode(record_of(record_id(3, 255), None, fault))) == {
        "id": "batch_req_3_00000000000000ff",
        "custom_id": None,
        "response": None,
        "error": {"code": "invalid_json", "message": "why"},
    }


@pytest.mark.parametrize(
    ("status", "content", "body"),
    [
        (400, b'{"error": {"message": "x"}}', {"error": {"message": "x"}}),
        (502, b"<html>\nBad gateway", "<html>\nBad gateway"),
        (500, b"\xff", "�"),
        (500, b"", ""),
    ],
)
def test_bodies_of_errors(status: int, content: bytes, body: object) -> None:
    response = response_of(status, None, content)
    assert isinstance(response, BatchResponse)
    assert (response.is_success, json.loads(bytes(response.body))) == (False, body)


@pytest.mark.parametrize("content", [b"", b"data: x", b'"\xff"'])
def test_a_success_that_is_no_json_is_none(content: bytes) -> None:
    said = response_of(200, None, content)
    assert isinstance(said, BatchFault)
    assert said.code == "invalid_answer"


@given(st.integers(1, 10**17), st.binary(), st.text() | st.none(), st.binary())
@example(1, b"", "a\u2028b\u2029c\x85d\x1ce", '"\u2028 \x85"'.encode())
def test_a_record_is_one_line_that_says_what_it_answers(
    number: int, line: bytes, custom_id: str | None, content: bytes
) -> None:
    for status in (200, 500):
        name = record_id(number, mark_of(line))
        text = encode(record_of(name, custom_id, response_of(status, None, content)))
        assert text.startswith(RECORD_BEGIN)
        assert text.count(b"\n") == len(text.decode().splitlines()) == 1
        assert answered_line(text) == (number, mark_of(line))


@given(st.binary(max_size=40))
def test_what_is_no_record(text: bytes) -> None:
    assert answered_line(text) is None
