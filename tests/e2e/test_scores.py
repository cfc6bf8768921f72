"""Classes and fits by HTTP are those of transformers and PEFT: by a model's head, by two of its
tokens, and by adapters with heads of their own, which take turns on the device beside answers."""

import json
import os
import subprocess
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import numpy as np
import pytest
import torch
from peft import LoraConfig, PeftModel
from tokenizers import Tokenizer
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
)

from tests.e2e.serving import ROOT, Serving, running_folder
from tests.e2e.test_clients import CLIENTS_PYTHON
from tests.e2e.vector_models import save_classifier, save_writer
from tests.grids import beyond
from tests.server.model.hub_models import add_adapter

pytestmark = pytest.mark.filterwarnings("ignore")
TOLERANCE = 1e-4
TIMEOUT_S = 240
SLOTS = 2
TEXTS = ["hi", "a text of some length " * 6, "Ünïcödé"]
TEMPLATE = "Q {query} I {instruction} D {document} fits?"
RERANKING = (
    "--rerank-tokens",
    "a,b",
    "--rerank-template",
    TEMPLATE,
    "--rerank-instruction",
    "find",
)
LABELS = ("good", "bad", "odd")
# Labels; names where a config.json lies beside the adapter.
ON_WRITER: dict[str, Sequence[str]] = {
    "moods": LABELS,
    "unnamed": ("LABEL_0", "LABEL_1"),
    "fit": ("LABEL_0",),
}
ON_CLASSIFIER: dict[str, Sequence[str]] = {"own": LABELS, "renamed": ("yes", "no", "none")}
NAMED = ("moods", "renamed", "tags")
TAGS = ("O", "B-word", "I-word")


class Classes(NamedTuple):
    """A server, and the folder of its base and adapters."""

    serving: Serving
    folder: Path

    def oracle(self, name: str) -> Any:
        return PeftModel.from_pretrained(load(self.folder, adapters(self)[name]), self.path(name))

    def path(self, name: str) -> str:
        return str(self.folder / name)


def adapters(classes: Classes) -> dict[str, Sequence[str]]:
    on_writer = (classes.folder / "moods").exists()
    return ON_WRITER | {"tags": TAGS} if on_writer else ON_CLASSIFIER


def load(folder: Path, labels: Sequence[str]) -> Any:
    make: Any = AutoModelForSequenceClassification
    make = AutoModelForTokenClassification if labels == TAGS else make
    return make.from_pretrained(folder / "base", num_labels=len(labels), dtype="float32")


def save_head(folder: Path, name: str, labels: Sequence[str], seed: int) -> None:
    torch.manual_seed(seed)
    task = "TOKEN_CLS" if labels == TAGS else "SEQ_CLS"
    lora = LoraConfig(r=4, target_modules=["q_proj", "down_proj"], task_type=task)
    made = add_adapter(load(folder, labels), name, lora, seed)
    with torch.no_grad():
        for parameter_name, parameter in made.named_parameters():
            if "score.modules_to_save" in parameter_name:
                parameter.copy_(torch.randn_like(parameter) * 0.3)
    made.save_pretrained(str(folder), selected_adapters=[name])
    if name in NAMED:
        config = {"id2label": dict(enumerate(labels)), "model_type": "qwen3"}
        (folder / name / "config.json").write_text(json.dumps(config))


def served(folder: Path, names: Sequence[str], *options: str) -> Iterator[Classes]:
    limits = ("--adapter-slots", str(SLOTS), "--max-step-tokens", "64")
    with running_folder(folder, names, *limits, *options) as serving:
        yield Classes(serving, folder)


@pytest.fixture(scope="module")
def writer(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Classes]:
    """A model for text; its adapter `one` has no head."""
    folder = tmp_path_factory.mktemp("writer")
    save_writer(folder)
    for seed, (name, labels) in enumerate(ON_WRITER.items()):
        save_head(folder, name, labels, seed)
    save_head(folder, "tags", TAGS, 9)
    yield from served(folder, [*ON_WRITER, "one", "tags"], *RERANKING)


@pytest.fixture(scope="module")
def classifier(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Classes]:
    folder = tmp_path_factory.mktemp("classifier")
    save_classifier(folder, id2label=dict(enumerate(LABELS)))
    for seed, (name, labels) in enumerate(ON_CLASSIFIER.items()):
        save_head(folder, name, labels, seed)
    yield from served(folder, [*ON_CLASSIFIER])


@pytest.fixture(scope="module")
def judge(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Classes]:
    """A classifier of one label."""
    folder = tmp_path_factory.mktemp("judge")
    save_classifier(folder, num_labels=1)
    yield from served(folder, [])


def post(classes: Classes, path: str, **body: Any) -> Any:
    answer = httpx.post(f"{classes.serving.url}{path}", json=body, timeout=TIMEOUT_S)
    assert answer.status_code == 200, answer.text
    return answer.json()


def refused(classes: Classes, path: str, **body: Any) -> str:
    answer = httpx.post(f"{classes.serving.url}{path}", json=body, timeout=TIMEOUT_S)
    assert answer.status_code in (400, 422), answer.text
    return answer.text


def tokens(folder: Path, *texts: str, special: bool = True) -> torch.Tensor:
    """Of a text, or of a pair."""
    tokenizer = Tokenizer.from_file(str(folder / "base" / "tokenizer.json"))
    encoded = tokenizer.encode(texts[0], *texts[1:], add_special_tokens=special)  # type: ignore[misc,arg-type]
    return torch.tensor([encoded.ids])


@torch.inference_mode()
def scores(classes: Classes, name: str, ids: torch.Tensor) -> torch.Tensor:
    oracle = classes.oracle(name)
    oracle.train(False)
    found: torch.Tensor = oracle(input_ids=ids).logits[0]
    return found


def classify(classes: Classes, name: str) -> tuple[Any, Any]:
    """The answers in vLLM's shape and in LoRAX's."""
    body = post(classes, "/classify", model=name, input=TEXTS)
    return body, post(classes, "/classify", inputs=TEXTS[0], parameters={"adapter_id": name})


def assert_classes(classes: Classes, name: str, answers: tuple[Any, Any]) -> None:
    labels, (body, lorax) = adapters(classes)[name], answers
    assert body["model"] == name
    for text, one in zip(TEXTS, body["data"], strict=True):
        found = scores(classes, name, tokens(classes.folder, text))
        wanted = (found.sigmoid() if len(labels) == 1 else found.softmax(-1)).numpy()
        assert np.abs(np.array(one["probs"]) - wanted).max() < TOLERANCE, (name, text)
        assert one["label"] == labels[int(wanted.argmax())]
    assert sorted(one["label"] for one in lorax) == sorted(labels)


def test_classes_of_tokens_on_a_model_for_text(writer: Classes) -> None:
    """In vLLM's shape numbers of each token, also over several steps; in LoRAX's entities."""
    assert tokens(writer.folder, TEXTS[1]).numel() > 64
    body = post(writer, "/classify", model="tags", input=TEXTS)
    for text, one in zip(TEXTS, body["data"], strict=True):
        wanted = scores(writer, "tags", tokens(writer.folder, text)).softmax(-1).numpy()
        assert np.abs(np.array(one["probs"]) - wanted).max() < TOLERANCE
        assert one["label"] == [TAGS[i] for i in wanted.argmax(-1)]
    found = post(writer, "/classify", inputs=TEXTS[1], parameters={"adapter_id": "tags"})
    assert {one["entity_group"] for one in found} == {"word"}
    assert all(TEXTS[1][one["start"] : one["end"]] == one["word"] for one in found)


def test_on_a_model_for_text(writer: Classes) -> None:
    """In turns with each other and with answers: more adapters than slots."""
    before = post(writer, "/v1/completions", model="one", prompt="x", max_tokens=6, temperature=0)
    for _ in range(2):
        with ThreadPoolExecutor(4) as pool:
            asked = {name: pool.submit(classify, writer, name) for name in ON_WRITER}
            body: dict[str, Any] = {"prompt": "x", "max_tokens": 6, "temperature": 0}
            text = pool.submit(post, writer, "/v1/completions", model="one", **body)
        # Here, since transformers loads models in one thread alone.
        for name, answers in asked.items():
            assert_classes(writer, name, answers.result())
        assert text.result()["choices"][0]["text"] == before["choices"][0]["text"]


def asked_by_template(writer: Classes) -> list[torch.Tensor]:
    """Tokens of the texts as documents."""
    whole = [f"Q what I find D {text} fits?" for text in TEXTS]
    return [tokens(writer.folder, text, special=False) for text in whole]


def test_one_label_judges_pairs(writer: Classes) -> None:
    wanted = [scores(writer, "fit", ids).sigmoid().item() for ids in asked_by_template(writer)]
    body = post(writer, "/v1/rerank", model="fit", query="what", documents=TEXTS)
    found = {one["index"]: one["relevance_score"] for one in body["results"]}
    assert [found[i] for i in range(3)] == pytest.approx(wanted, abs=TOLERANCE)
    body = post(writer, "/v1/score", model="fit", queries="what", documents=TEXTS)
    assert [one["score"] for one in body["data"]] == pytest.approx(wanted, abs=TOLERANCE)
    words = refused(writer, "/v1/rerank", model="moods", query="what", documents=TEXTS)
    assert "needs a classifier of one label, not 3" in words


@pytest.mark.exhaustive
def test_on_a_classifier(classifier: Classes) -> None:
    """A head of the adapter's own goes before the base's."""
    for name in [*ON_CLASSIFIER, *ON_CLASSIFIER]:
        assert_classes(classifier, name, classify(classifier, name))
    base = post(classifier, "/classify", input=TEXTS)
    own = post(classifier, "/classify", model="own", input=TEXTS)
    gaps = [
        abs(one["probs"][0] - other["probs"][0])
        for one, other in zip(base["data"], own["data"], strict=True)
    ]
    assert max(gaps) > 100 * TOLERANCE


def test_what_a_head_does_not_give_is_refused(writer: Classes) -> None:
    words = refused(writer, "/v1/completions", model="moods", prompt="x", max_tokens=2)
    assert "with the adapter moods, which has a score head, gives no text" in words
    words = refused(writer, "/v1/embeddings", model="moods", input="x")
    assert "gives no vectors; it gives classes at /classify" in words
    words = refused(writer, "/classify", model="one", input="x")
    assert "with the adapter one, which has no score head, gives no classes" in words
    words = refused(writer, "/classify", model="moods", input="x", adapter_scale=0.5)
    assert "such heads are not merged" in words


# Of a base alone


@torch.inference_mode()
def logits(folder: Path, *texts: str) -> torch.Tensor:
    """As transformers finds the token that counts."""
    model = AutoModelForSequenceClassification.from_pretrained(folder / "base", dtype="float32")
    found: torch.Tensor = model(input_ids=tokens(folder, *texts)).logits[0]
    return found


@pytest.mark.exhaustive
def test_classes_of_a_base(classifier: Classes) -> None:
    body = post(classifier, "/classify", input=TEXTS)
    for text, one in zip(TEXTS, body["data"], strict=True):
        expected = logits(classifier.folder, text).softmax(-1).numpy()
        assert np.abs(np.array(one["probs"]) - expected).max() < TOLERANCE
        assert one["label"] == LABELS[expected.argmax()]
    words = refused(classifier, "/v1/embeddings", model="base", input="x")
    assert "gives no vectors; it gives classes at /classify" in words


@pytest.mark.exhaustive
def test_a_classifier_judges_pairs(judge: Classes) -> None:
    body = post(judge, "/v1/rerank", query="what", documents=TEXTS)
    expected = [logits(judge.folder, "what", text).sigmoid().item() for text in TEXTS]
    scores = {one["index"]: one["relevance_score"] for one in body["results"]}
    assert [scores[i] for i in range(3)] == pytest.approx(expected, abs=TOLERANCE)
    assert [one["index"] for one in body["results"]] == sorted(range(3), key=lambda i: -expected[i])


@pytest.mark.parametrize("model", ["base", "one"])
def test_two_tokens_judge(writer: Classes, model: str) -> None:
    """Beside chats of the same model, whose adapter changes the score."""
    folder = writer.folder
    body = post(writer, "/v1/score", model=model, queries="what", documents=TEXTS)
    base = AutoModelForCausalLM.from_pretrained(folder / "base", dtype="float32")
    oracle = PeftModel.from_pretrained(base, folder / "one")
    oracle.train(False)
    yes, no = (int(tokens(folder, text, special=False)[0, 0]) for text in "ab")
    for ids, one in zip(asked_by_template(writer), body["data"], strict=True):
        with torch.inference_mode():
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
@pytest.mark.parametrize("script", beyond(0, ["for_classifiers", "for_rerankers"]))
def test_clients(request: pytest.FixtureRequest, script: str) -> None:
    served = "judge" if script == "for_rerankers" else "classifier"
    url = request.getfixturevalue(served).serving.url
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
