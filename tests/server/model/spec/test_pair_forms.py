"""How a model scores a document: by its head, two tokens or vectors, as files, name and operator
say."""

from typing import Any

import pytest

from loraplex.server.config import ConfigError
from loraplex.server.model.families.registry import read_model
from loraplex.server.model.spec.vector_forms import PairWishes, SentenceFiles, pair_form
from loraplex.server.protocol import PairForm
from tests.server.model.checkpoint.test_sentence_files import QWEN

TOKENS = {"yes": 7, "no": 8, "1": 9}
ONE = {**QWEN, "architectures": ["Qwen2ForSequenceClassification"], "num_labels": 1}
POOLED = SentenceFiles("last", True, None, {}, None)
LOGITS = SentenceFiles(None, False, None, {}, None, (4, 5))
TEMPLATE = "{query} {document}?"


def form(
    config: dict[str, Any] = QWEN,
    name: str = "base",
    files: SentenceFiles | None = None,
    **wishes: str,
) -> PairForm | None:
    model = read_model(config, for_vectors=files is not None and files.pooling is not None)
    return pair_form(model, (name,), files, PairWishes(**wishes), TOKENS.get)


def test_what_the_model_is() -> None:
    assert form() == PairForm("vectors")
    assert form(files=POOLED) == PairForm("vectors")
    assert form(ONE) == PairForm("scores")
    assert form({**ONE, "num_labels": 2}) is None
    assert form(ONE, template=TEMPLATE) == PairForm("scores", (), TEMPLATE)


def test_qwens_rerankers_by_name() -> None:
    found = form(name="Qwen/Qwen3-Reranker-0.6B")
    assert found is not None
    assert (found.by, found.token_ids) == ("logits", (7, 8))
    assert found.instruction.startswith("Given a web search query")
    assert found.template.endswith("<think>\n\n</think>\n\n")
    converted = form(ONE, name="someone/Qwen3-Reranker-4B-seq-cls")
    assert converted is not None
    assert (converted.by, converted.template) == ("scores", found.template)
    own = form(name="qwen3-reranker", tokens="1,no", template=TEMPLATE, instruction="")
    assert own == PairForm("logits", (9, 8), TEMPLATE, found.instruction)


def test_files_of_a_reranker() -> None:
    assert form(files=LOGITS) is None  # what it reads is not known
    assert form(files=LOGITS, template=TEMPLATE) == PairForm("logits", (4, 5), TEMPLATE)


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        ({"tokens": "yes,no"}, "say with --rerank-template"),
        ({"tokens": "yes", "template": TEMPLATE}, "expected two tokens"),
        ({"tokens": "yes,maybe", "template": TEMPLATE}, "expected two tokens"),
        ({"tokens": "yes,yes", "template": TEMPLATE}, "expected two tokens"),
        ({"template": "{query}"}, "--rerank-template: expected"),
        ({"template": TEMPLATE + "{query}"}, "--rerank-template: expected"),
        ({"instruction": "x"}, "--rerank-instruction"),
        ({"config": ONE, "tokens": "yes,no"}, "--rerank-tokens: the model is a classifier"),
        (
            {"files": POOLED, "tokens": "yes,no", "template": TEMPLATE},
            "--rerank-tokens: the model has no head",
        ),
    ],
)
def test_wishes_that_cannot_be(asked: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        form(**asked)
