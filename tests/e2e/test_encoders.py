"""An encoder by HTTP gives what transformers, PEFT and its own tokenizer give: vectors, classes and
fits of pairs, with adapters by turns; it writes no text."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import torch
from peft import LoraConfig, PeftModel
from transformers import (
    AutoModel,
    AutoModelForSequenceClassification,
    BertConfig,
    BertModel,
    BertTokenizer,
)

from tests.e2e.serving import Serving, start_serving
from tests.server.model.hub_models import add_adapter, random_model

pytestmark = pytest.mark.filterwarnings("ignore")
TIMEOUT_S, TOLERANCE = 240, 1e-4
LABELS = ("good", "bad", "odd")
TEXTS = ["the cat sat on the mat", "A dog!", "the dog sat on the cat and the cat on the mat"]
SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
WORDS = (*SPECIAL, "the", "a", "cat", "dog", "sat", "on", "mat", "and", "!", ".")
ADAPTERS = {"plain": 0, "moods": len(LABELS), "fit": 1}  # labels of its head


class Oracle:
    """transformers and PEFT on the saved folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.tokenizer = BertTokenizer.from_pretrained(folder / "base")

    @torch.inference_mode()
    def run(self, adapter: str | None, *texts: str) -> Any:
        labels = ADAPTERS[adapter] if adapter else 0
        kind: Any = AutoModelForSequenceClassification if labels else AutoModel
        options = {"num_labels": labels} if labels else {}
        model: Any = kind.from_pretrained(self.folder / "base", dtype="float32", **options)
        if adapter is not None:
            model = PeftModel.from_pretrained(model, self.folder / adapter)
        return model.train(False)(**self.tokenizer(*texts, return_tensors="pt"))

    def vector(self, adapter: str | None, text: str) -> np.ndarray:
        mean: np.ndarray = self.run(adapter, text).last_hidden_state[0].double().mean(0).numpy()
        return mean / np.linalg.norm(mean)

    def scores(self, adapter: str, *texts: str) -> torch.Tensor:
        found: torch.Tensor = self.run(adapter, *texts).logits[0].double()
        return found


def save_all(folder: Path) -> None:
    sizes = {"hidden_size": 48, "num_attention_heads": 3, "num_hidden_layers": 2}
    config = {"vocab_size": len(WORDS), "intermediate_size": 80, "max_position_embeddings": 40}
    base = random_model(BertConfig, BertModel, 3, initializer_range=0.15, **sizes, **config)
    base.save_pretrained(folder / "base")
    (folder / "vocab.txt").write_text("\n".join(WORDS))
    BertTokenizer(str(folder / "vocab.txt")).save_pretrained(folder / "base")
    for seed, (name, labels) in enumerate(ADAPTERS.items()):
        save_adapter(folder, name, labels, seed)


def save_adapter(folder: Path, name: str, labels: int, seed: int) -> None:
    torch.manual_seed(seed)
    kind: Any = AutoModelForSequenceClassification if labels else AutoModel
    options = {"num_labels": labels} if labels else {}
    model = kind.from_pretrained(folder / "base", dtype="float32", **options)
    task = {"task_type": "SEQ_CLS"} if labels else {}
    targets = ["query", "value", "intermediate.dense"]
    made = add_adapter(model, name, LoraConfig(r=4, target_modules=targets, **task), seed)
    made.save_pretrained(str(folder), selected_adapters=[name])
    if labels > 1:
        names = {"id2label": dict(enumerate(LABELS)), "model_type": "bert"}
        (folder / name / "config.json").write_text(json.dumps(names))


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Serving, Oracle]]:
    folder = tmp_path_factory.mktemp("encoder")
    save_all(folder)
    serving = start_serving(
        *(str(folder / "base"), "--device", "cpu", "--dtype", "float32", "--adapter-slots", "2"),
        *("--adapter-root", str(folder), "--cache-dir", str(folder / "cache")),
        *(part for name in ADAPTERS for part in ("--adapter", f"{name}=local:{folder / name}")),
        log=folder / "log",
    )
    yield serving, Oracle(folder)
    serving.process.terminate()
    assert serving.process.wait(timeout=TIMEOUT_S) == 0


def post(serving: Serving, path: str, status: int = 200, **body: Any) -> Any:
    answer = httpx.post(f"{serving.url}{path}", json=body, timeout=TIMEOUT_S)
    assert answer.status_code == status, answer.text
    return answer.json()


def test_vectors(served: tuple[Serving, Oracle]) -> None:
    serving, oracle = served
    for name in ("base", "plain"):
        body = {"model": name} if name != "base" else {}
        found = post(serving, "/v1/embeddings", input=TEXTS, **body)["data"]
        for text, one in zip(TEXTS, found, strict=True):
            expected = oracle.vector(None if name == "base" else name, text)
            assert np.abs(np.array(one["embedding"]) - expected).max() < TOLERANCE


def test_classes(served: tuple[Serving, Oracle]) -> None:
    serving, oracle = served
    found = post(serving, "/classify", model="moods", input=TEXTS)["data"]
    for text, one in zip(TEXTS, found, strict=True):
        expected = oracle.scores("moods", text).softmax(-1).numpy()
        assert np.abs(np.array(one["probs"]) - expected).max() < TOLERANCE
        assert one["label"] == LABELS[int(expected.argmax())]


def test_fits_of_pairs(served: tuple[Serving, Oracle]) -> None:
    """Tokens of documents have the type of a second text."""
    serving, oracle = served
    found = post(serving, "/v1/rerank", model="fit", query=TEXTS[1], documents=TEXTS)["results"]
    assert len(found) == len(TEXTS)
    for one in found:
        expected = oracle.scores("fit", TEXTS[1], TEXTS[one["index"]]).sigmoid().item()
        assert abs(one["relevance_score"] - expected) < TOLERANCE


def test_what_is_refused(served: tuple[Serving, Oracle]) -> None:
    serving, _ = served
    for path, body in (
        ("/v1/completions", {"prompt": "the cat"}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "the cat"}]}),
        ("/classify", {"input": "the cat"}),
    ):
        message = post(serving, path, 400, **body)["error"]["message"]
        assert "gives no" in message
        assert "/v1/embeddings" in message
    message = post(serving, "/v1/embeddings", 400, input="the cat " * 30)["error"]["message"]
    assert "at most 40 tokens" in message
