"""Classes and scores of served models: those of transformers and PEFT, for unmodified clients."""

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import torch
from peft import PeftModel
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from tests.e2e.serving import ROOT, Serving, start_serving
from tests.e2e.test_clients import CLIENTS_PYTHON
from tests.e2e.vector_models import save_classifier, save_writer

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")
TOLERANCE = 1e-4
TEXTS = ["hi", "a text of some length " * 6, "Ünïcödé"]
TEMPLATE = "Q {query} I {instruction} D {document} fits?"
TIMEOUT_S = 240


def served(folder: Path, *options: str) -> Iterator[Serving]:
    server = start_serving(
        *(str(folder / "base"), "--device", "cpu", "--dtype", "float32"),
        *("--max-step-tokens", "64", "--cache-dir", str(folder / "cache"), *options),
        log=folder / "log",
    )
    yield server
    server.process.terminate()
    assert server.process.wait(timeout=240) == 0


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    found = {name: tmp_path_factory.mktemp(name) for name in ("classes", "fits", "writes")}
    save_classifier(found["classes"], id2label={0: "good", 1: "bad", 2: "odd"})
    save_classifier(found["fits"], num_labels=1)
    save_writer(found["writes"])
    return found


@pytest.fixture(scope="module")
def classifier(folders: dict[str, Path]) -> Iterator[Serving]:
    yield from served(folders["classes"])


@pytest.fixture(scope="module")
def judge(folders: dict[str, Path]) -> Iterator[Serving]:
    """A classifier of one label."""
    yield from served(folders["fits"])


@pytest.fixture(scope="module")
def writer(folders: dict[str, Path]) -> Iterator[Serving]:
    folder = folders["writes"]
    yield from served(
        folder,
        *("--rerank-tokens", "a,b", "--rerank-template", TEMPLATE, "--rerank-instruction", "find"),
        *("--adapter-root", str(folder), "--adapter", f"one=local:{folder / 'one'}"),
    )


def post(serving: Serving, path: str, **body: Any) -> Any:
    answer = httpx.post(f"{serving.url}{path}", json=body, timeout=TIMEOUT_S)
    assert answer.status_code == 200, answer.text
    return answer.json()


def tokens(folder: Path, *texts: str, special: bool = True) -> torch.Tensor:
    """Of a text, or of a pair."""
    tokenizer = Tokenizer.from_file(str(folder / "base" / "tokenizer.json"))
    encoded = tokenizer.encode(texts[0], *texts[1:], add_special_tokens=special)  # type: ignore[misc,arg-type]
    return torch.tensor([encoded.ids])


@torch.inference_mode()
def logits(folder: Path, *texts: str) -> torch.Tensor:
    """As transformers finds the token that counts."""
    model = AutoModelForSequenceClassification.from_pretrained(folder / "base", dtype="float32")
    found: torch.Tensor = model(input_ids=tokens(folder, *texts)).logits[0]
    return found


def test_classes(classifier: Serving, folders: dict[str, Path]) -> None:
    body = post(classifier, "/classify", input=TEXTS)
    for text, one in zip(TEXTS, body["data"], strict=True):
        expected = logits(folders["classes"], text).softmax(-1).numpy()
        assert np.abs(np.array(one["probs"]) - expected).max() < TOLERANCE
        assert one["label"] == ("good", "bad", "odd")[expected.argmax()]
    refused = httpx.post(f"{classifier.url}/v1/embeddings", json={"model": "base", "input": "x"})
    assert refused.status_code == 400
    assert "gives no vectors; it gives classes at /classify" in refused.text


def test_a_classifier_judges_pairs(judge: Serving, folders: dict[str, Path]) -> None:
    body = post(judge, "/v1/rerank", query="what", documents=TEXTS)
    expected = [logits(folders["fits"], "what", text).sigmoid().item() for text in TEXTS]
    scores = {one["index"]: one["relevance_score"] for one in body["results"]}
    assert [scores[i] for i in range(3)] == pytest.approx(expected, abs=TOLERANCE)
    assert [one["index"] for one in body["results"]] == sorted(range(3), key=lambda i: -expected[i])


@pytest.mark.parametrize("model", ["base", "one"])
def test_two_tokens_judge(writer: Serving, folders: dict[str, Path], model: str) -> None:
    """Beside chats of the same model, whose adapter changes the score."""
    folder = folders["writes"]
    body = post(writer, "/v1/score", model=model, queries="what", documents=TEXTS)
    base = AutoModelForCausalLM.from_pretrained(folder / "base", dtype="float32")
    oracle = PeftModel.from_pretrained(base, folder / "one")
    oracle.train(False)
    yes, no = (int(tokens(folder, text, special=False)[0, 0]) for text in "ab")
    for text, one in zip(TEXTS, body["data"], strict=True):
        whole = f"Q what I find D {text} fits?"
        with torch.inference_mode():
            ids = tokens(folder, whole, special=False)
            if model == "one":
                last = oracle(input_ids=ids).logits[0, -1]
            else:
                with oracle.disable_adapter():
                    last = oracle(input_ids=ids).logits[0, -1]
        assert one["score"] == pytest.approx((last[yes] - last[no]).sigmoid().item(), abs=TOLERANCE)
    text = post(writer, "/v1/completions", model=model, prompt="x", max_tokens=4, temperature=0)
    assert text["usage"]["completion_tokens"] >= 1
    assert len(post(writer, "/v1/embeddings", model=model, input="x")["data"]) == 1


@pytest.mark.clients
@pytest.mark.skipif(
    not CLIENTS_PYTHON.exists(), reason="`make test` makes the environment for these clients"
)
@pytest.mark.parametrize("script", ["for_rerankers", "for_classifiers"])
def test_clients(judge: Serving, classifier: Serving, script: str) -> None:
    url = judge.url if script == "for_rerankers" else classifier.url
    done = subprocess.run(
        [str(CLIENTS_PYTHON), "-m", f"tests.e2e.clients.{script}", url],
        cwd=ROOT,
        env=os.environ | {"PYTHONWARNINGS": "ignore"},
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.splitlines()[-1] == "all checks passed"
