"""SageMaker's two routes against the live server, asked as its runtime asks a container."""

from typing import Any

import httpx
import pytest

from tests.router.serving import events_of

ADAPTER = {"X-Amzn-SageMaker-Adapter-Identifier": "json"}
EVENTS = {"Accept": "text/event-stream"}
MESSAGES = [{"role": "user", "content": "Please cancel order #10442. Ines Novak"}]
# (body of /invocations, its text; the same on the route, its text)
ASKED: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    ("/", {"inputs": "Order"}, {"inputs": "Order", "parameters": {"adapter_id": "json"}}),
    (
        "/v1/completions",
        {"prompt": "Order", "temperature": 0},
        {"prompt": "Order", "temperature": 0, "model": "json"},
    ),
    (
        "/v1/chat/completions",
        {"messages": MESSAGES, "temperature": 0},
        {"messages": MESSAGES, "temperature": 0, "model": "json"},
    ),
]


def text_of(answer: Any) -> str:
    if isinstance(answer, list):
        return str(answer[0]["generated_text"])
    choice = answer["choices"][0]
    return str(choice["message"]["content"] if "message" in choice else choice["text"])


def piece_of(event: Any) -> str:
    if "token" in event:
        return str(event["token"]["text"])
    choice = event["choices"][0]
    return str(choice["delta"].get("content") or "" if "delta" in choice else choice["text"])


@pytest.mark.parametrize(("path", "asked", "same"), ASKED)
def test_invocations(
    http: httpx.Client, path: str, asked: dict[str, Any], same: dict[str, Any]
) -> None:
    expected = http.post(path, json=same)
    assert expected.status_code == 200, expected.text
    whole = http.post("/invocations", json=asked, headers=ADAPTER)
    assert whole.status_code == 200, whole.text
    digest = "x-loraplex-adapter-digest"
    assert whole.headers[digest] == expected.headers[digest]
    text = text_of(expected.json())
    assert text
    assert text_of(whole.json()) == text
    streamed = http.post("/invocations", json=asked, headers=ADAPTER | EVENTS)
    assert "".join(map(piece_of, events_of(streamed.text))) == text


def test_ping(http: httpx.Client) -> None:
    answer = http.get("/ping")
    assert (answer.status_code, answer.content) == (200, b"")
