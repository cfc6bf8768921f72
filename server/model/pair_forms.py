"""How a model scores a query and a document: its files' word, and the operator's. No torch."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

from loraplex.server.config import ConfigError
from loraplex.server.model.checkpoint.sentence_files import SentenceFiles
from loraplex.server.model.spec import ModelSpec
from loraplex.server.protocol import PairForm

# What Qwen3-Reranker was trained to read and to say.
_QWEN3_NAME = "qwen3-reranker"
_QWEN3_TOKENS = ("yes", "no")
_QWEN3_INSTRUCTION = "Given a web search query, retrieve relevant passages that answer the query"
_QWEN3_TEMPLATE = (
    "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and"
    ' the Instruct provided. Note that the answer can only be "yes" or "no".<|im_end|>\n'
    "<|im_start|>user\n<Instruct>: {instruction}\n<Query>: {query}\n<Document>: {document}"
    "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
)
_MOST_CHARS = 1 << 14


class PairWishes(NamedTuple):
    """What the operator says; "" = as the model's files and name say. tokens: two texts with a
    comma between."""

    tokens: str = ""
    template: str = ""
    instruction: str = ""


NO_PAIR_WISHES = PairWishes()


def pair_form(
    model: ModelSpec,
    names: Sequence[str],
    files: SentenceFiles | None,
    wishes: PairWishes,
    token_id: Callable[[str], int | None],
) -> PairForm | None:
    """token_id: of a token's text. None: it gives no such score. Raises ConfigError."""
    is_qwen3 = any(name.rpartition("/")[2].lower().startswith(_QWEN3_NAME) for name in names)
    template = wishes.template or (_QWEN3_TEMPLATE if is_qwen3 else "")
    instruction = wishes.instruction or (_QWEN3_INSTRUCTION if is_qwen3 else "")
    _check(template, wishes)
    if model.classes is not None:
        if wishes.tokens:
            raise ConfigError("--rerank-tokens: the model is a classifier, whose head gives scores")
        is_one = len(model.classes.labels) == 1
        return PairForm("scores", (), template, instruction) if is_one else None
    if files is not None and files.pooling is not None and not wishes.tokens:
        return PairForm("vectors")
    told = wishes.tokens or (",".join(_QWEN3_TOKENS) if is_qwen3 else "")
    ids = _ids(told, token_id) if told else (files.yes_no if files is not None else ())
    if not ids:
        return PairForm("vectors")
    if not model.writes:
        raise ConfigError("--rerank-tokens: the model has no head for text, so no token has logits")
    if not template:
        if wishes.tokens:
            raise ConfigError("--rerank-tokens: say with --rerank-template what the model reads")
        return None
    return PairForm("logits", ids, template, instruction)


def _check(template: str, wishes: PairWishes) -> None:
    """Raises ConfigError."""
    if not template:
        if wishes.instruction:
            raise ConfigError("--rerank-instruction: no template takes it; see --rerank-template")
        return
    if template.count("{query}") != 1 or template.count("{document}") != 1:
        raise ConfigError("--rerank-template: expected {query} and {document} in it, once each")
    if len(template) > _MOST_CHARS:
        raise ConfigError(f"--rerank-template: at most {_MOST_CHARS} characters")


def _ids(tokens: str, token_id: Callable[[str], int | None]) -> tuple[int, ...]:
    """Raises ConfigError."""
    texts = tokens.split(",")
    ids = [found for text in texts if (found := token_id(text)) is not None]
    if len(texts) != 2 or len(set(ids)) != 2:
        raise ConfigError(
            f"--rerank-tokens: expected two tokens of the model, as yes,no; got {tokens[:60]!r}"
        )
    return tuple(ids)
