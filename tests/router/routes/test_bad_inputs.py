"""Bad requests: a 4xx in JSON, in the shape of its route; the next good request is answered."""

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.router.fake_worker import BASE_NAME, FakeWorker, running_worker
from tests.router.serving import running_router

GENERATE, STREAM, ROOT = "/generate", "/generate_stream", "/"
COMPLETIONS, CHAT, TOKENIZE = "/v1/completions", "/v1/chat/completions", "/tokenize"
USER = [{"role": "user", "content": "hi"}]


def lorax(**parameters: Any) -> dict[str, Any]:
    return {"inputs": "x", "parameters": parameters}


def completions(**fields: Any) -> dict[str, Any]:
    return {"model": BASE_NAME, "prompt": "x", **fields}


def chat(**fields: Any) -> dict[str, Any]:
    return {"model": BASE_NAME, "messages": USER, **fields}


LORAX_BAD: list[Any] = [
    {},
    [],
    "text",
    {"inputs": ""},
    {"inputs": 3},
    {"inputs": None},
    {"inputs": "x", "parameters": []},
    lorax(max_new_tokens=0),
    lorax(max_new_tokens=-1),
    lorax(max_new_tokens=2**31),
    lorax(max_new_tokens=2**63),
    lorax(max_new_tokens=512),
    lorax(temperature=-1),
    lorax(temperature="hot"),
    lorax(top_p=0),
    lorax(top_p=2),
    lorax(top_k=-2),
    lorax(max_tokens=5),
    lorax(stop_sequences=["x"]),
    {"inputs": "x", "adapter_id": "pirate"},
    {"inputs": "x", "model": "pirate", "parameters": {"max_new_tokens": 5}},
    lorax(repetition_penalty=0),
    lorax(seed=-1),
    lorax(seed=2**64),
    lorax(stop="x"),
    lorax(stop=[""]),
    lorax(stop=["x"] * 17),
    lorax(best_of=9, do_sample=True),
    lorax(truncate=0),
    lorax(return_k_alternatives=21),
    lorax(adapter_id="../up"),
    lorax(adapter_id="a\r\nb"),
    lorax(adapter_id="x" * 70_000),
    lorax(adapter_id="file:/etc/passwd"),
    lorax(adapter_id="http://127.0.0.1/"),
    lorax(adapter_source="ftp", adapter_id="a"),
    lorax(merged_adapters={"ids": [], "weights": []}),
    lorax(merged_adapters={"ids": ["a"], "weights": [1e400]}),
    lorax(merged_adapters={"ids": ["a"] * 10_000, "weights": [1] * 10_000}),
    lorax(merged_adapters={"ids": ["a", "b"], "weights": [1, 1], "merge_strategy": "magic"}),
    {"inputs": "word " * 5000},
    b"",
    b"{",
    b"\xff",
    b"null",
    b'{"inputs": "x"} trailing',
    b'{"inputs": "\\ud800"}',
    b'{"inputs": "x", "inputs": "y"}',
    b'{"inputs": "x", "parameters": {"temperature": Infinity}}',
    b'{"inputs": "x", "parameters": {"temperature": 1e999}}',
    b"[" * 100_000,
    b'{"inputs":' * 10_000,
]
OPENAI_BAD: list[tuple[str, Any]] = [
    (COMPLETIONS, completions(n=0)),
    (COMPLETIONS, completions(n=9)),
    (COMPLETIONS, completions(n=2**70)),
    (COMPLETIONS, completions(max_tokens=-5)),
    (COMPLETIONS, completions(max_tokens=10**6)),
    (COMPLETIONS, completions(logit_bias={"300": 1})),
    (COMPLETIONS, completions(logit_bias={"-1": 1})),
    (COMPLETIONS, completions(stop_token_ids=[258])),
    (COMPLETIONS, completions(stop_token_ids=[-1])),
    (COMPLETIONS, completions(prompt=[258])),
    (COMPLETIONS, completions(prompt=[-1])),
    (COMPLETIONS, completions(prompt=[0.5])),
    (COMPLETIONS, completions(prompt=[])),
    (COMPLETIONS, completions(prompt="")),
    (COMPLETIONS, completions(prompt=["ok", ""])),
    (COMPLETIONS, completions(prompt="y" * 600)),
    (COMPLETIONS, completions(prompt=[1] * 512)),
    (COMPLETIONS, completions(prompt=["x"] * 10_000)),
    (COMPLETIONS, completions(min_tokens=9, max_tokens=4)),
    (COMPLETIONS, completions(model="bad name")),
    (COMPLETIONS, completions(logprobs=21)),
    (COMPLETIONS, {"model": 5, "prompt": "x"}),
    (COMPLETIONS, b"not json"),
    (CHAT, chat(messages=[])),
    (CHAT, chat(messages=[{"role": "user"}])),
    (CHAT, chat(messages=[{"role": "user", "content": 5}])),
    (CHAT, chat(messages="hi")),
    (CHAT, chat(messages=[{"role": "user", "content": "y" * 600}])),
    (CHAT, chat(max_completion_tokens=10**6)),
    (CHAT, chat(top_logprobs=3)),
    (CHAT, chat(metadata="x")),
    (CHAT, chat(temperature=-0.1)),
    (CHAT, chat(tools=[{"type": "function", "function": {"name": ""}}])),
    (CHAT, chat(response_format={"type": "json"})),
    (CHAT, b'{"messages": ["\\u0000"'),
    (CHAT, b"\x00"),
]
TOKENIZE_BAD: list[Any] = [
    {},
    {"inputs": 1},
    [],
    b"",
    b"\xff",
    {"inputs": "x", "add_special_tokens": 7},
]


class Server:
    """A router and a worker in an event loop of their own, for all cases."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._stop = asyncio.Event()
        self.runner = asyncio.Runner()
        self.client: httpx.AsyncClient
        started: asyncio.Future[None] = self.runner.get_loop().create_future()
        self._task = self.runner.get_loop().create_task(self._serve(started))
        self.runner.get_loop().run_until_complete(started)

    async def _serve(self, started: "asyncio.Future[None]") -> None:
        async with (
            running_worker(FakeWorker()) as worker,
            running_router(self._folder, worker) as router,
        ):
            self.client = router.client
            started.set_result(None)
            await self._stop.wait()

    def ask(self, method: str, path: str, body: Any = None) -> httpx.Response:
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        headers = {"content-type": "application/json"}
        asking = self.client.request(method, path, content=content, headers=headers)
        return self.runner.run(asking)

    def close(self) -> None:
        self._stop.set()
        self.runner.get_loop().run_until_complete(self._task)
        self.runner.close()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    server = Server(tmp_path_factory.mktemp("router"))
    yield server
    answer = server.ask("POST", GENERATE, {"inputs": "still there?"})
    assert answer.json() == {"generated_text": "base says hello 0"}
    server.close()


def check(answer: httpx.Response) -> None:
    assert 400 <= answer.status_code < 500, answer.text
    assert answer.headers["content-type"].startswith("application/json")
    assert answer.headers["x-request-id"]
    body = answer.json()
    if answer.request.url.path.startswith("/v1/"):
        assert {"message", "type", "param", "code"} <= set(body["error"])
        assert body["error"]["message"]
    else:
        assert isinstance(body["error"], str)
        assert body["error"]
        assert body["error_type"]
    assert "Traceback" not in answer.text
    assert ".py" not in answer.text


@pytest.mark.parametrize("path", [GENERATE, STREAM, ROOT])
def test_lorax(server: Server, path: str) -> None:
    for body in LORAX_BAD:
        answer = server.ask("POST", path, body)
        check(answer)
        assert answer.status_code == 422, answer.text


def test_openai(server: Server) -> None:
    for path, body in OPENAI_BAD:
        for stream in (False, True):
            sent = {**body, "stream": stream} if isinstance(body, dict) else body
            answer = server.ask("POST", path, sent)
            check(answer)
            assert answer.status_code == 400, (path, str(body)[:200], answer.text)


def test_tokenize(server: Server) -> None:
    for body in TOKENIZE_BAD:
        check(server.ask("POST", TOKENIZE, body))


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/nowhere", 404),
        ("GET", "/v1/", 404),
        ("GET", "/v1/nowhere", 404),
        ("GET", "/generate/", 404),
        ("POST", "/v1/completions/", 404),
        ("GET", "/v1/models/", 404),
        ("GET", "/v1/models/a/b/c", 404),
        ("GET", "/%2e%2e/etc/passwd", 404),
        ("GET", "/v1/models/%00%0d%0aset-cookie:x", 404),
        ("GET", "/" + "a" * 5000, 404),
        ("GET", "/generate", 405),
        ("DELETE", "/v1/chat/completions", 405),
        ("PUT", "/", 405),
        ("POST", "/health", 405),
        ("POST", "/metrics", 405),
        ("PATCH", "/tokenize", 405),
        ("OPTIONS", "/v1/completions", 405),
    ],
)
def test_paths_and_methods(server: Server, method: str, path: str, status: int) -> None:
    answer = server.ask(method, path)
    assert answer.status_code == status, answer.text
    check(answer)
    if status == 405:
        assert answer.headers["allow"]


def test_there_are_many() -> None:
    assert len(LORAX_BAD) * 3 + len(OPENAI_BAD) * 2 + len(TOKENIZE_BAD) > 200
