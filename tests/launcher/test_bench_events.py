"""Bytes of an answer to events, and events to counts, times and faults."""

import json
import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loraplex.launcher.bench.load.serve import EventReader, StreamedAnswer
from loraplex.launcher.bench.load.target import WORDS, Target, body_of, text_of
from loraplex.launcher.bench.load.workload import Call
from loraplex.launcher.router_client import bearer


def read(stream: bytes) -> list[bytes]:
    return EventReader().feed(stream)


@pytest.mark.parametrize(
    ("stream", "events"),
    [
        (b"data: a\n\ndata: b\n\n", [b"a", b"b"]),
        (b"data: a\r\n\r\ndata: b\r\n\r\n", [b"a", b"b"]),
        (b"data: a\r\rdata: b\r\r", [b"a", b"b"]),
        (b"event: token\ndata: a\n\n", [b"a"]),
        (b": keep-alive\ndata: a\n\n", [b"a"]),
        (b"id: 7\nretry: 10\ndata: a\nevent: x\n\n", [b"a"]),
        (b": keep-alive\n\n: again\n\n", []),
        (b"data:a\n\ndata:  a\n\n", [b"a", b" a"]),
        (b"data: a\ndata: b\n\n", [b"a\nb"]),
        (b"\xef\xbb\xbfdata: a\n\n", [b"a"]),
        (b"database: a\nDATA: b\n data: c\n\n", []),
        (b"data: a\n", []),
        (b"data: a", []),
        (b"data\n\ndata:\n\n", []),
    ],
)
def test_events(stream: bytes, events: list[bytes]) -> None:
    assert read(stream) == events


_LINES = st.sampled_from(
    [b"", b"", b"data: a", b"data:b", b"data", b": c", b"event: d", b"x", b"data: \xc3\xa9"]
)
_ENDS = st.sampled_from([b"\n", b"\r\n", b"\r"])


@given(st.lists(st.tuples(_LINES, _ENDS), max_size=20), st.data())
def test_events_are_the_same_however_the_bytes_come(
    lines: list[tuple[bytes, bytes]], data: st.DataObject
) -> None:
    stream = b"".join(line + end for line, end in lines)
    reader, found = EventReader(), []
    left = stream
    while left:
        size = data.draw(st.integers(1, len(left)))
        found += reader.feed(left[:size])
        left = left[size:]
    assert found == read(stream)
    # A line that is empty and ends in CR is one line with the LF of the next empty one.
    text = re.sub(rb"\r\n|\r", b"\n", stream)
    blocks = [block.split(b"\n") for block in text.split(b"\n\n")[:-1]]
    plain = [[line for line in block if line.startswith(b"data:")] for block in blocks]
    expected = [b"\n".join(re.sub(rb"^data: ?", b"", line) for line in block) for block in plain]
    if b"data" not in text.split(b"\n"):
        assert found == [event for event in expected if event]


@given(st.binary(max_size=200))
def test_any_bytes_are_read(stream: bytes) -> None:
    for event in read(stream):
        StreamedAnswer().take(event, 0.0)


# ---- answers


def answer(*events: Any) -> StreamedAnswer:
    """events: JSON, at seconds 0, 1, 2, …"""
    found = StreamedAnswer()
    for at, event in enumerate(events):
        found.take(event if isinstance(event, bytes) else json.dumps(event).encode(), float(at))
    return found


def text(words: str, **more: Any) -> dict[str, Any]:
    return {"choices": [{"index": 0, "text": words, **more}], "usage": None}


def delta(**fields: Any) -> dict[str, Any]:
    return {"choices": [{"index": 0, "delta": fields, "finish_reason": None}]}


def token(words: str, **more: Any) -> dict[str, Any]:
    return {"token": {"id": 1, "text": words, "logprob": -0.5, "special": False}, **more}


USAGE = {"choices": [], "usage": {"prompt_tokens": 7, "completion_tokens": 5, "total_tokens": 12}}


def test_an_answer_of_completions() -> None:
    found = answer(text("a b"), text("c d"), text("", finish_reason="length"), USAGE, b"[DONE]")
    assert (found.token_s, found.prompt_tokens, found.output_tokens) == ([0.0, 1.0], 7, 5)
    assert (found.has_ended, found.filled, found.fault) == (True, True, None)


def test_an_answer_of_a_chat() -> None:
    """The role comes before the first token, the reason after the last; thoughts are tokens."""
    role, thought, said = delta(role="assistant", content=""), delta(reasoning_content="a"), "b"
    found = answer(role, thought, delta(content=said), delta(), USAGE)
    assert (found.token_s, found.output_tokens, found.has_ended) == ([1.0, 2.0], 5, False)
    assert answer(role, thought).has_text
    assert not answer(role).has_text


def test_an_answer_of_lorax() -> None:
    """Each event is a token, whether it has a text yet or not."""
    details = {"finish_reason": "length", "prompt_tokens": 4, "generated_tokens": 3, "seed": None}
    found = answer(token("a"), token(""), token("b", generated_text="ab", details=details))
    assert (found.token_s, found.prompt_tokens, found.output_tokens) == ([0.0, 1.0, 2.0], 4, 3)
    assert (found.has_ended, found.filled) == (True, True)


def test_without_usage_nothing_is_reported() -> None:
    found = answer(text("a"), {"choices": [], "usage": {"total_tokens": 3}}, text("b"), {})
    assert (found.token_s, found.prompt_tokens, found.output_tokens) == ([0.0, 2.0], None, None)
    assert found.fault is None


def test_an_answer_without_a_text_has_its_events() -> None:
    assert answer(text(""), text(""), USAGE).token_s == [0.0, 1.0]


@pytest.mark.parametrize(
    "event",
    [
        *(b"hello", b"[1,2]", b"7", b'"x"', b"{", b"\xff", b'{"choices": 3}', b'{"usage": [1]}'),
        *(b'{"choices": [{"text": 3}]}', b'{"usage": {"prompt_tokens": "x"}}', b"[" * 100_000),
        *(b'{"usage": {"completion_tokens": -1}}', b'{"error": ' + b"[" * 100_000),
    ],
)
def test_what_cannot_be_read_is_a_fault_of_this_answer(event: bytes) -> None:
    found = answer(text("a"), event, text("b"))
    assert found.fault is not None
    kind, why = found.fault
    assert kind == "malformed event"
    assert len(why) < 1000
    assert found.token_s == [0.0, 2.0]


@pytest.mark.parametrize(
    "event",
    [
        {"error": {"message": "too many", "type": "x"}},
        {"error": "too many", "error_type": "overloaded"},
        {"object": "error", "message": "too many", "code": 400},
    ],
)
def test_errors_within_a_stream(event: dict[str, Any]) -> None:
    assert answer(text("a"), event).fault == ("error event", "too many")


# ---- requests

CALL = Call(0, 0.0, "sql", [100, 101, 100 + len(WORDS)], 9)


def sent(**target: Any) -> dict[str, Any]:
    body: dict[str, Any] = json.loads(body_of(Target("http://a", "base", **target), CALL))
    return body


def test_bodies() -> None:
    common = {"model": "sql", "max_tokens": 9, "temperature": 0, "stream": True}
    common |= {"stream_options": {"include_usage": True}, "ignore_eos": True}
    assert sent() == common | {"prompt": CALL.prompt}
    words = text_of(CALL.prompt)
    assert sent(api="chat") == common | {"messages": [{"role": "user", "content": words}]}
    parameters = {"max_new_tokens": 9, "ignore_eos_token": True, "details": True}
    assert sent(api="lorax") == {"inputs": words, "parameters": parameters | {"adapter_id": "sql"}}


def test_fields_are_added_and_left_out() -> None:
    extra = {"ignore_eos": None, "min_tokens": 3, "temperature": 1}
    body = sent(extra=extra)
    assert "ignore_eos" not in body
    assert (body["min_tokens"], body["temperature"]) == (3, 1)
    parameters = sent(api="lorax", extra={"adapter_source": "local"})["parameters"]
    assert parameters["adapter_source"] == "local"


def test_the_base_has_a_name_for_openai_and_none_for_lorax() -> None:
    call = Call(0, 0.0, None, [100], 9)
    assert json.loads(body_of(Target("http://a", "llama"), call))["model"] == "llama"
    assert (
        "adapter_id"
        not in json.loads(body_of(Target("http://a", "x", "lorax"), call))["parameters"]
    )


@given(st.lists(st.integers(100, 999), min_size=1, max_size=50))
def test_a_text_has_a_word_a_token(ids: list[int]) -> None:
    assert len(text_of(ids).split(" ")) == len(ids)
    assert set(text_of(ids).split(" ")) <= set(WORDS)


def test_words_are_each_their_own() -> None:
    assert len(set(WORDS)) == len(WORDS) > 200


def test_a_key_is_a_header() -> None:
    assert bearer("k") == {"Authorization": "Bearer k"}
    assert bearer("") == {}
    assert "secret" not in repr(Target("http://a", "base", api_key="secret", admin_key="secret"))
