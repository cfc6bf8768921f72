"""Bad requests and bad adapters: the documented 4xx in JSON, and nothing else changes."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from tests.e2e.bad_bodies import CASES, GENERATE, Case
from tests.e2e.serving import Serving

CANARY = {"inputs": "Hello there", "parameters": {"adapter_id": "json", "max_new_tokens": 8}}


def canary(http: httpx.Client) -> str:
    answer = http.post(GENERATE, json=CANARY)
    assert answer.status_code == 200, answer.text
    text = answer.json()["generated_text"]
    assert isinstance(text, str)
    return text


@pytest.fixture(scope="module", autouse=True)
def nothing_else_changes(serving: Serving) -> Iterator[None]:
    """No process of the server is replaced, and another request's answer stays as it was."""

    def processes() -> set[int]:
        return {child.pid for child in psutil.Process(serving.process.pid).children(recursive=True)}

    with httpx.Client(base_url=serving.url, timeout=240) as client:
        before = canary(client), processes()
        yield
        assert (canary(client), processes()) == before


def assert_error(answer: httpx.Response, path: str, status: int) -> dict[str, Any]:
    assert answer.status_code == status, answer.text
    assert answer.headers["content-type"].startswith("application/json")
    assert answer.headers["x-request-id"]
    body: dict[str, Any] = answer.json()
    if path.startswith("/v1/"):
        assert body["error"]["message"]
        assert {"message", "type", "param", "code"} <= set(body["error"])
    else:
        assert body["error"]
        assert body["error_type"]
    assert "Traceback" not in answer.text
    return body


def test_there_are_at_least_a_hundred() -> None:
    assert len(CASES) >= 100
    assert len({name for name, *_ in CASES}) == len(CASES)


@pytest.mark.parametrize("case", CASES, ids=[name for name, *_ in CASES])
def test_bad_request(http: httpx.Client, case: Case) -> None:
    _, path, body, status = case
    headers = {"content-type": "application/json"}
    if isinstance(body, bytes):
        answer = http.post(path, content=body, headers=headers)
    elif "inf" in repr(body):  # what httpx's encoder refuses to send
        text = repr(body).replace("'", '"').replace("inf", "1e400")
        answer = http.post(path, content=text, headers=headers)
    else:
        answer = http.post(path, json=body)
    assert_error(answer, path, status)


@pytest.mark.parametrize("stream", [False, True])
def test_errors_before_the_first_token_keep_their_status(http: httpx.Client, stream: bool) -> None:
    body = {"model": "no-such-adapter", "prompt": "x", "stream": stream}
    assert_error(http.post("/v1/completions", json=body), "/v1/completions", 404)
    path = "/generate_stream" if stream else GENERATE
    body = {"inputs": "x", "parameters": {"adapter_id": "no-such-adapter"}}
    assert_error(http.post(path, json=body), path, 404)


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/nowhere", 404),
        ("GET", "/v1/nowhere", 404),
        ("DELETE", "/generate", 405),
        ("GET", "/v1/completions", 405),
        ("GET", "/v1/models/no-such-model", 404),
    ],
)
def test_bad_route(http: httpx.Client, method: str, path: str, status: int) -> None:
    assert_error(http.request(method, path), path, status)


def test_unsafe_local_adapter_is_never_opened(http: httpx.Client, adapter_root: Path) -> None:
    folder = adapter_root / "pickled"
    folder.mkdir()
    (folder / "adapter_config.json").write_text('{"peft_type": "LORA", "r": 8, "lora_alpha": 8}')
    (folder / "adapter_model.bin").write_bytes(b"\x80\x04never read")
    body = {"inputs": "x", "parameters": {"adapter_id": f"local:{folder}"}}
    error = assert_error(http.post(GENERATE, json=body), GENERATE, 422)
    assert error["error_type"] == "adapter_invalid"
    assert "safetensors" in error["error"]
