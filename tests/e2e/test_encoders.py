"""An encoder by HTTP gives what transformers, PEFT and its own tokenizer give: vectors, classes,
classes of tokens, entities and fits of pairs, with adapters by turns; it writes no text."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import torch
from peft import LoraConfig, PeftModel
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModel,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    BertConfig,
    BertModel,
    BertTokenizer,
    pipeline,
)

from tests.e2e.serving import Serving, running_folder
from tests.server.model.hub_models import add_adapter, random_model

pytestmark = pytest.mark.filterwarnings("ignore")
TIMEOUT_S, TOLERANCE = 240, 1e-4
LABELS = ("good", "bad", "odd")
TEXTS = ["the cat sat on the mat", "A dog!", "the dog sat on the cat and the cat on the mat"]
SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
WORDS = (*SPECIAL, "the", "a", "cat", "dog", "sat", "on", "mat", "and", "!", ".")
TAGS = ("O", "B-PET", "I-PET", "B-THING", "I-THING")
# Labels of its head.
ADAPTERS = {"plain": 0, "moods": len(LABELS), "fit": 1, "tags": len(TAGS)}
SIZE = 20  # of vectors


class Oracle:
    """transformers and PEFT on the saved folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.tokenizer = BertTokenizer.from_pretrained(folder / "base")

    def model(self, adapter: str | None) -> Any:
        model = load(self.folder, adapter)
        if adapter is not None:
            model = PeftModel.from_pretrained(model, self.folder / adapter)
        return model.train(False)

    @torch.inference_mode()
    def run(self, adapter: str | None, *texts: str) -> Any:
        return self.model(adapter)(**self.tokenizer(*texts, return_tensors="pt"))

    def vector(self, adapter: str | None, text: str) -> np.ndarray:
        """As sentence-transformers computes it by the module files."""
        first = self.run(adapter, text).last_hidden_state[0, 0]
        dense = load_file(self.folder / "base" / "2_Dense" / "model.safetensors")
        found: np.ndarray = (dense["linear.weight"] @ first + dense["linear.bias"]).tanh().numpy()
        unit: np.ndarray = found / np.linalg.norm(found)
        return unit

    def entities(self, text: str) -> list[dict[str, Any]]:
        model = self.model("tags").merge_and_unload()
        model.config.id2label = dict(enumerate(TAGS))
        options = {"aggregation_strategy": "simple", "tokenizer": self.tokenizer}
        found: Any = pipeline("token-classification", model=model, **options)(text)
        return [{**one, "word": text[one["start"] : one["end"]]} for one in found]

    def scores(self, adapter: str, *texts: str) -> torch.Tensor:
        found: torch.Tensor = self.run(adapter, *texts).logits[0].double()
        return found


def save_all(folder: Path) -> None:
    sizes = {"hidden_size": 48, "num_attention_heads": 3, "num_hidden_layers": 2}
    config: dict[str, Any] = {
        "vocab_size": len(WORDS),
        "intermediate_size": 80,
        "max_position_embeddings": 40,
    }
    base = random_model(BertConfig, BertModel, 3, initializer_range=0.15, **sizes, **config)
    base.save_pretrained(folder / "base")
    (folder / "vocab.txt").write_text("\n".join(WORDS))
    BertTokenizer(str(folder / "vocab.txt")).save_pretrained(folder / "base")
    save_modules(folder / "base", sizes)
    for seed, name in enumerate(ADAPTERS):
        save_adapter(folder, name, seed)


def save_modules(folder: Path, sizes: dict[str, Any]) -> None:
    """Files of sentence-transformers: the first token, a product, and length 1."""
    kinds = ("Transformer", "Pooling", "Dense", "Normalize")
    modules = [
        {
            "idx": i,
            "path": f"{i}_{kind}" if i else "",
            "type": f"sentence_transformers.models.{kind}",
        }
        for i, kind in enumerate(kinds)
    ]
    (folder / "modules.json").write_text(json.dumps(modules))
    shape = {"in_features": sizes["hidden_size"], "out_features": SIZE, "bias": True}
    dense = {**shape, "activation_function": "torch.nn.modules.activation.Tanh"}
    for name, config in (("1_Pooling", {"pooling_mode_cls_token": True}), ("2_Dense", dense)):
        (folder / name).mkdir()
        (folder / name / "config.json").write_text(json.dumps(config))
    torch.manual_seed(9)
    linear = torch.nn.Linear(sizes["hidden_size"], SIZE)
    tensors = {f"linear.{name}": tensor.detach() for name, tensor in linear.named_parameters()}
    save_file(tensors, folder / "2_Dense" / "model.safetensors")


def load(folder: Path, adapter: str | None) -> Any:
    """The base with the head that an adapter was trained with."""
    labels = ADAPTERS[adapter] if adapter else 0
    kind: Any = AutoModelForSequenceClassification if labels else AutoModel
    kind = AutoModelForTokenClassification if adapter == "tags" else kind
    options = {"num_labels": labels} if labels else {}
    return kind.from_pretrained(folder / "base", dtype="float32", **options)


def save_adapter(folder: Path, name: str, seed: int) -> None:
    torch.manual_seed(seed)
    labels = ADAPTERS[name]
    task = {"task_type": "TOKEN_CLS" if name == "tags" else "SEQ_CLS"} if labels else {}
    targets = ["query", "value", "intermediate.dense"]
    lora = LoraConfig(r=4, target_modules=targets, **task)
    made = add_adapter(load(folder, name), name, lora, seed)
    with torch.no_grad():
        for parameter_name, parameter in made.named_parameters():
            if "modules_to_save" in parameter_name:
                parameter.copy_(torch.randn_like(parameter) * 0.3)
    made.save_pretrained(str(folder), selected_adapters=[name])
    if labels > 1:
        named = TAGS if name == "tags" else LABELS
        names = {"id2label": dict(enumerate(named)), "model_type": "bert"}
        (folder / name / "config.json").write_text(json.dumps(names))


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Serving, Oracle]]:
    folder = tmp_path_factory.mktemp("encoder")
    save_all(folder)
    with running_folder(folder, ADAPTERS, "--adapter-slots", "2") as serving:
        yield serving, Oracle(folder)


def post(serving: Serving, path: str, body: dict[str, Any], status: int = 200) -> Any:
    answer = httpx.post(f"{serving.url}{path}", json=body, timeout=TIMEOUT_S)
    assert answer.status_code == status, answer.text
    return answer.json()


def test_vectors(served: tuple[Serving, Oracle]) -> None:
    serving, oracle = served
    for name in ("base", "plain"):
        body = {"model": name} if name != "base" else {}
        found = post(serving, "/v1/embeddings", {"input": TEXTS, **body})["data"]
        for text, one in zip(TEXTS, found, strict=True):
            expected = oracle.vector(None if name == "base" else name, text)
            assert np.abs(np.array(one["embedding"]) - expected).max() < TOLERANCE


def test_classes(served: tuple[Serving, Oracle]) -> None:
    serving, oracle = served
    found = post(serving, "/classify", {"model": "moods", "input": TEXTS})["data"]
    for text, one in zip(TEXTS, found, strict=True):
        expected = oracle.scores("moods", text).softmax(-1).numpy()
        assert np.abs(np.array(one["probs"]) - expected).max() < TOLERANCE
        assert one["label"] == LABELS[int(expected.argmax())]


def test_classes_of_tokens(served: tuple[Serving, Oracle]) -> None:
    """In LoRAX's shape entities, in vLLM's numbers of each token, special ones included."""
    serving, oracle = served
    lorax = {"parameters": {"adapter_id": "tags"}}
    found = [post(serving, "/classify", {"inputs": text, **lorax}) for text in TEXTS]
    assert found == post(serving, "/classify_batch", {"inputs": TEXTS, **lorax})
    assert any(found)
    for text, ours in zip(TEXTS, found, strict=True):
        theirs = oracle.entities(text)
        for one in (*ours, *theirs):
            one["score"] = pytest.approx(one["score"], abs=TOLERANCE)
        assert ours == theirs
    expected = oracle.scores("tags", TEXTS[0]).softmax(-1).numpy()
    (one,) = post(serving, "/classify", {"model": "tags", "input": TEXTS[0]})["data"]
    assert np.abs(np.array(one["probs"]) - expected).max() < TOLERANCE
    assert one["label"] == [TAGS[i] for i in expected.argmax(-1)]
    body = {"model": "tags", "input": TEXTS[0], "task": "token_classify"}
    assert post(serving, "/pooling", body)["data"][0]["data"] == one["probs"]


def test_fits_of_pairs(served: tuple[Serving, Oracle]) -> None:
    """Tokens of documents have the type of a second text."""
    serving, oracle = served
    body = {"model": "fit", "query": TEXTS[1], "documents": TEXTS}
    found = post(serving, "/v1/rerank", body)["results"]
    assert len(found) == len(TEXTS)
    for one in found:
        expected = oracle.scores("fit", TEXTS[1], TEXTS[one["index"]]).sigmoid().item()
        assert abs(one["relevance_score"] - expected) < TOLERANCE


def test_what_is_refused(served: tuple[Serving, Oracle]) -> None:
    serving, _ = served
    refused: list[tuple[str, dict[str, Any]]] = [
        ("/v1/completions", {"prompt": "the cat"}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "the cat"}]}),
        ("/classify", {"input": "the cat"}),
    ]
    for path, body in refused:
        message = post(serving, path, body, 400)["error"]["message"]
        assert "gives no" in message
        assert "/v1/embeddings" in message
    message = post(serving, "/v1/embeddings", {"input": "the cat " * 30}, 400)["error"]["message"]
    assert "at most 40 tokens" in message
