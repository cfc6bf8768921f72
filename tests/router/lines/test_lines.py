"""Lines of a batch's input: requests, adapters, and what is wrong."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loraplex.router.lines.lines import MAX_LINE_BYTES, PATHS, BadLine, BatchRequest, read_line
from tests.launcher.batch.batch_files import chat, line


def test_paths_are_those_of_whole_answers() -> None:
    assert {"/", "/generate", "/v1/completions", "/v1/chat/completions", "/v1/responses"} <= {
        *PATHS
    }
    assert not {"/generate_stream", "/v1/adapters", "/v1/keys", "/ping"} & {*PATHS}


def test_a_body_is_sent_as_it_stands() -> None:
    text = b'{ "model":"sql", "seed": 1.0e2, "x": 1, "x": 2 }'
    whole = b'{"custom_id":"a","method":"POST","url":"/v1/completions","body":%s,"more":1}' % text
    assert read_line(whole) == BatchRequest("a", "/v1/completions", text, "sql")


@pytest.mark.parametrize(
    ("url", "body", "adapter"),
    [
        ("/v1/completions", {"model": "sql"}, "sql"),
        ("/v1/completions", {"model": "llama", "lora_path": "sql"}, "sql"),
        ("/v1/completions", {"model": ""}, ""),
        ("/v1/completions", {"model": "tgi"}, ""),
        ("/v1/completions", {"model": 7}, ""),
        ("/generate", {"inputs": "x"}, ""),
        ("/generate", {"inputs": "x", "parameters": None}, ""),
        ("/generate", {"inputs": "x", "parameters": {"adapter_id": "sql"}}, "sql"),
        ("/generate", {"inputs": "x", "adapter_id": "sql"}, "sql"),
        (
            "/generate",
            {"parameters": {"merged_adapters": {"weights": [1, 2], "ids": ["a", "b"]}}},
            '{"ids":["a","b"],"weights":[1,2]}',
        ),
        (
            "/v1/chat/completions",
            {"model": "llama", "merged_adapters": {"ids": ["a"], "weights": [2]}},
            '{"ids":["a"],"weights":[2]}',
        ),
        ("/v1/messages", {"model": "sql"}, "sql"),
    ],
)
def test_the_adapter_that_a_line_names(url: str, body: Any, adapter: str) -> None:
    said = read_line(line("a", url, body))
    assert isinstance(said, BatchRequest)
    assert said.adapter == adapter


@pytest.mark.parametrize(
    ("text", "code", "custom_id"),
    [
        (b"nonsense", "invalid_json", None),
        (b"[1]", "invalid_json", None),
        (b'{"custom_id": "\xff"}', "invalid_json", None),
        (b"[" * 100_000, "invalid_json", None),
        (b"x" * (MAX_LINE_BYTES + 1), "line_too_long", None),
        (b"{}", "missing_custom_id", None),
        (chat(""), "missing_custom_id", None),
        (chat(7), "missing_custom_id", None),
        (line("a", "/generate", {}, method="GET"), "invalid_method", "a"),
        (line("a", "/generate", {}, method=None), "invalid_method", "a"),
        (line("a", "/v3/chat", {}), "invalid_url", "a"),
        (line("a", ["/generate"], {}), "invalid_url", "a"),
        (line("a", "/generate_stream", {}), "invalid_url", "a"),
        (line("a", "/generate", []), "invalid_body", "a"),
        (line("a", "/generate", None), "invalid_body", "a"),
        (b'{"custom_id":"a","method":"POST","url":"/generate"}', "invalid_body", "a"),
        (chat("a", stream=True), "stream_not_supported", "a"),
    ],
    ids=lambda value: repr(value)[:40],
)
def test_bad_lines(text: bytes, code: str, custom_id: str | None) -> None:
    said = read_line(text)
    assert isinstance(said, BadLine)
    assert (said.code, said.custom_id) == (code, custom_id)
    assert len(said.message) < 600


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner),
    max_leaves=8,
)
FIELDS = ("custom_id", "method", "url", "body", "model", "parameters", "adapter_id", "stream")


@given(
    st.dictionaries(st.sampled_from(FIELDS), JSON), st.dictionaries(st.sampled_from(FIELDS), JSON)
)
def test_any_json_is_a_request_or_a_bad_line(outer: dict[str, Any], body: dict[str, Any]) -> None:
    good = {"custom_id": "a", "method": "POST", "url": "/generate"}
    for said in (outer, good | {"body": body}, good | outer):
        assert isinstance(read_line(json.dumps(said).encode()), BatchRequest | BadLine)


@given(st.binary(max_size=60))
def test_any_bytes_are_read(text: bytes) -> None:
    assert isinstance(read_line(text), BatchRequest | BadLine)
