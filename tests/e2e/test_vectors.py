"""Vectors of a served embedding model: those of transformers and PEFT, for unmodified clients."""

import asyncio
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import openai
import pytest

from tests.e2e.serving import ROOT, Serving, start_serving
from tests.e2e.test_clients import CLIENTS_PYTHON
from tests.e2e.vector_models import QUERY, SIZE, Oracle, save_embedder
from tests.grids import beyond

# PEFT asks what transformers renamed.
pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")
TOLERANCE = 1e-4
TEXTS = ["hi", "a text of some length, to be read in pieces " * 4, "Ünïcödé", "x" * 90]
TIMEOUT_S = 240
# They send what the openai package sends.
ON_OPENAI = ("for_haystack", "for_wrappers")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("embedder")
    save_embedder(folder)
    return folder


@pytest.fixture(scope="module")
def embedder(folder: Path) -> Iterator[Serving]:
    server = start_serving(
        *(str(folder / "base"), "--device", "cpu", "--dtype", "float32"),
        *("--adapter-root", str(folder), "--adapter", f"one=local:{folder / 'one'}"),
        *("--max-step-tokens", "64", "--cache-dir", str(folder / "cache")),
        log=folder / "log",
    )
    yield server
    server.process.terminate()
    assert server.process.wait(timeout=240) == 0


@pytest.fixture(scope="module")
def oracle(folder: Path) -> Oracle:
    return Oracle(folder)


@pytest.fixture
def client(embedder: Serving) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{embedder.url}/v1", api_key="unused", max_retries=0)


def near(found: Any, expected: Any) -> bool:
    return bool(np.abs(np.asarray(found) - expected).max() < TOLERANCE)


@pytest.mark.parametrize("model", ["base", "one"])
@pytest.mark.parametrize("asked", [{}, {"encoding_format": "float"}])
def test_vectors_are_the_librarys(
    client: openai.OpenAI, oracle: Oracle, model: str, asked: dict[str, Any]
) -> None:
    """Where nothing is asked the client wants base64."""
    answer = client.embeddings.create(model=model, input=TEXTS, **asked)
    assert answer.usage.prompt_tokens == sum(len(oracle.ids(text)) for text in TEXTS)
    for text, one in zip(TEXTS, answer.data, strict=True):
        assert len(one.embedding) == SIZE
        assert near(one.embedding, oracle.vector(text, adapted=model == "one"))
    ids = client.embeddings.create(model=model, input=oracle.ids("hi"))
    assert near(ids.data[0].embedding, answer.data[0].embedding)
    few = client.embeddings.create(model=model, input="hi", dimensions=7)
    expected = oracle.vector("hi", adapted=model == "one", dimensions=7)
    assert near(few.data[0].embedding, expected)


def test_prompts_of_the_files(client: openai.OpenAI, oracle: Oracle) -> None:
    answer = client.embeddings.create(model="base", input="hi", extra_body={"prompt_name": "query"})
    assert near(answer.data[0].embedding, oracle.vector(f"{QUERY}hi"))


def test_a_model_for_vectors_writes_no_text(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="gives no text"):
        client.completions.create(model="one", prompt="x")
    with pytest.raises(openai.BadRequestError, match="vectors at /v1/embeddings"):
        client.chat.completions.create(model="base", messages=[{"role": "user", "content": "x"}])


def test_hundreds_at_once(client: openai.OpenAI, oracle: Oracle) -> None:
    """More than run together, base and adapter mixed, with a prefix that all share."""
    texts = [f"{TEXTS[1]} {i}" for i in range(150)]

    async def ask() -> list[Any]:
        async with openai.AsyncOpenAI(base_url=client.base_url, api_key="unused") as many:
            asked = [many.embeddings.create(model=m, input=texts) for m in ("base", "one")]
            return list(await asyncio.gather(*asked))

    for answer, adapted in zip(asyncio.run(ask()), (False, True), strict=True):
        assert [one.index for one in answer.data] == list(range(150))
        for i in (0, 71, 149):
            expected = oracle.vector(texts[i], adapted=adapted)
            assert near(answer.data[i].embedding, expected)


def test_metrics_and_headers(embedder: Serving) -> None:
    with httpx.Client(base_url=embedder.url, timeout=TIMEOUT_S) as http:
        answer = http.post("/v1/embeddings", json={"model": "one", "input": "hi"})
        assert answer.headers["x-loraplex-start"] in ("warm", "cold")
        text = http.get("/metrics").text
        assert 'loraplex_requests_total{route="/v1/embeddings",status="200"}' in text
        assert "loraplex_vectors_total" in text


@pytest.mark.clients
@pytest.mark.skipif(
    not CLIENTS_PYTHON.exists(), reason="`make test` makes the environment for these clients"
)
@pytest.mark.parametrize("script", beyond(1, ["for_cohere", "for_vectors", *ON_OPENAI]))
def test_clients(embedder: Serving, script: str) -> None:
    done = subprocess.run(
        [str(CLIENTS_PYTHON), "-m", f"tests.e2e.clients.{script}", embedder.url],
        cwd=ROOT,
        env=os.environ | {"PYTHONWARNINGS": "ignore"},
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.splitlines()[-1] == "all checks passed"
