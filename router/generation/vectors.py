"""Texts that are read for numbers: whether a model gives these, the prompts, and the numbers that
callers want."""

from collections.abc import Sequence
from typing import Literal, Protocol, TypeVar

import msgspec
import numpy as np

from loraplex.router.call import (
    ChoiceResult,
    GenerationCall,
    RequestError,
    VectorCall,
    adapter_field,
)
from loraplex.router.generation.prompts import Prompt, check_ids, check_size, input_field
from loraplex.router.names.served import ServedAdapter
from loraplex.router.text.model import TextModel
from loraplex.server.protocol import (
    ClassForm,
    Gift,
    ModelCard,
    TokenEvent,
    VectorForm,
    VectorParams,
)

T = TypeVar("T")
# What sentence-transformers calls the prompts of the two texts of a pair.
QUERY, DOCUMENT = "query", "document"

# As torch divides by no less.
_LEAST_LENGTH = 1e-12

_AT: dict[Gift, str] = {
    "text": "text at /v1/chat/completions",
    "vectors": "vectors at /v1/embeddings",
    "classes": "classes at /classify",
    "fits": "scores of documents at /v1/rerank",
}
# What an adapter with a score head makes a model give.
_OF_HEADS: tuple[Gift, ...] = ("classes", "fits")
_NO: dict[Gift, str] = {
    "text": "no text",
    "vectors": "no vectors",
    "classes": "no classes",
    "fits": "no scores of documents",
}


async def vector_prompts(
    call: GenerationCall, vector: VectorCall, model: TextModel
) -> list[Prompt]:
    """Makes the prompts of texts, in order. Raises RequestError (invalid, context_length)."""
    form = model.card.vectors
    before = "" if form is None else prompt_before(vector, form)
    most = model.card.max_context if form is None else form.max_tokens
    reader = TextReader(call, model, most)
    size = sum(len(prompt) + len(before) for prompt in call.prompts)

    def read() -> list[Prompt]:
        return [
            reader.prompt(prompt, before, reader.field(i)) for i, prompt in enumerate(call.prompts)
        ]

    return await model.turns.run(size, read)


async def class_prompts(call: GenerationCall, model: TextModel) -> list[Prompt]:
    """Makes the prompts of texts for a classifier. It raises as `vector_prompts` does."""
    reader = TextReader(call, model, model.card.max_context)
    size = sum(map(len, call.prompts))
    classes = model.card.classes
    of_tokens = classes is not None and classes.of_tokens

    def read() -> list[Prompt]:
        fields = [(text, reader.field(i)) for i, text in enumerate(call.prompts)]
        if of_tokens:
            return [reader.with_spans(text, field) for text, field in fields]
        return [unpadded(reader.prompt(text, "", field), model) for text, field in fields]

    return await model.turns.run(size, read)


async def paired_vector_prompts(
    call: GenerationCall, vector: VectorCall, form: VectorForm, model: TextModel
) -> list[Prompt]:
    """Prompts of queries (one, where all are the same), then of documents. Each is read alone."""
    reader = TextReader(call, model, form.max_tokens)
    queries = queries_of(vector)
    texts = [
        *((query, form.prompts.get(QUERY, ""), "query") for query in queries),
        *(
            (document, form.prompts.get(DOCUMENT, ""), reader.field(i))
            for i, document in enumerate(call.prompts)
        ),
    ]
    size = sum(len(text) + len(before) for text, before, _ in texts)
    return await model.turns.run(size, lambda: [reader.prompt(*text) for text in texts])


def queries_of(vector: VectorCall) -> Sequence[str]:
    """Lists the queries of a call: one where all are the same."""
    return vector.queries[:1] if len(set(vector.queries)) == 1 else vector.queries


def prompt_before(vector: VectorCall, form: VectorForm) -> str:
    """Finds the text that goes before each text of the request. Raises RequestError."""
    if vector.prompt is not None:
        return vector.prompt
    if vector.prompt_names:
        found = (form.prompts[name] for name in vector.prompt_names if name in form.prompts)
        return next(found, "")
    name = form.default_prompt if vector.prompt_name is None else vector.prompt_name
    if name is None:
        return ""
    if name not in form.prompts:
        known = ", ".join(map(repr, form.prompts)) or "none"
        message = f"`prompt_name`: the model has no prompt {name[:60]!r}; it has: {known}"
        raise RequestError("invalid", message, param="prompt_name")
    return form.prompts[name]


def unbound_prompts(call: GenerationCall, card: ModelCard) -> tuple[str, ...]:
    """Fields that named a prompt that the model's files have not."""
    names = () if call.vector is None else call.vector.prompt_names
    known = () if card.vectors is None else card.vectors.prompts
    return ("input_type",) if names and not any(name in known for name in names) else ()


def unpadded(prompt: Prompt, model: TextModel) -> Prompt:
    """Removes padding from a prompt's end: a classifier judges the last token before that."""
    classes = model.card.classes
    pad, ids = None if classes is None else classes.pad_token_id, prompt.ids
    end = len(ids)
    while end > 1 and ids[end - 1] == pad:
        end -= 1
    return prompt if end == len(ids) else msgspec.structs.replace(prompt, ids=ids[:end])


class TextReader:
    """Tokenises the texts of one call. most: tokens of a text."""

    def __init__(self, call: GenerationCall, model: TextModel, most: int) -> None:
        self._call, self._model = call, model
        self.most = most
        if call.truncate is not None and call.truncate >= 0:
            self.most = min(call.truncate, most)

    def field(self, index: int) -> str:
        """The name of a prompt's field, with its index where there are several."""
        call = self._call
        field = input_field(call) if call.messages is None else "messages"
        return field if len(self._call.prompts) == 1 else f"{field}[{index}]"

    def prompt(self, prompt: str | list[int], before: str, field: str) -> Prompt:
        """Makes a prompt of at most `most` tokens from a text or ids. Raises RequestError."""
        if not isinstance(prompt, str):
            check_ids(prompt, self._model, field)
            return self.checked("", self._cut(prompt, len(prompt), 0), field)
        text = before + prompt
        self.check_size(text, field)
        ids = self._model.encode(text, self._call.add_special_tokens)
        return self.checked(text, self._fitted(text, ids, ids), field)

    def with_spans(self, prompt: str | list[int], field: str) -> Prompt:
        """Makes a prompt as `prompt` does, with the characters of each token of a text."""
        if not isinstance(prompt, str):
            return self.prompt(prompt, "", field)
        self.check_size(prompt, field)
        found = list(self._model.spans(prompt, self._call.add_special_tokens))
        kept = self._fitted(prompt, found, [span.id for span in found])
        checked = self.checked(prompt, [span.id for span in kept], field)
        return msgspec.structs.replace(checked, spans=[(span.start, span.stop) for span in kept])

    def check_size(self, text: str, field: str) -> None:
        check_size(self._call, self._model, text, field)

    def checked(self, text: str, ids: list[int], field: str) -> Prompt:
        """Makes a prompt whose count of tokens is checked. Raises RequestError."""
        if not ids:
            raise RequestError("invalid", "expected a text of at least one token", param=field)
        if len(ids) > self.most:
            message = f"the model reads texts of at most {self.most} tokens; got {len(ids)}"
            raise RequestError("context_length", message, param=field)
        return Prompt(text, ids, ())

    def _fitted(self, text: str, tokens: list[T], ids: list[int]) -> list[T]:
        """Cuts a text's tokens to what the model reads, if the call says so. ids: theirs."""
        if self._call.truncate is None or len(ids) <= self.most:
            return tokens
        return self._cut(tokens, *self._inside(text, ids))

    def _inside(self, text: str, ids: list[int]) -> tuple[int, int]:
        """Finds where the text's own tokens end, and how many come before them: what a tokenizer
        puts around a text stays when the text is cut.
        """
        own = self._model.encode(text, add_special_tokens=False)
        places = range(len(ids) - len(own) + 1)
        before = next((i for i in places if ids[i : i + len(own)] == own), 0)
        return (before + len(own), before) if len(own) < len(ids) else (len(ids), 0)

    def _cut(self, ids: list[T], end: int, begin: int) -> list[T]:
        """Cuts ids to what the model reads, if the call says so, between `begin` and `end`."""
        if self._call.truncate is None or len(ids) <= self.most:
            return ids
        room = max(0, self.most - begin - (len(ids) - end))
        inside = ids[begin:end]
        kept = inside[:room] if self._call.truncate_keeps == "first" else inside[-room:]
        return [*ids[:begin], *(kept if room else ()), *ids[end:]][: self.most]


class VectorStream:
    """Takes the events of one sequence that is read for a vector. finish: set once it is over."""

    must_abort = False  # nothing runs on behind the vector

    def __init__(self, prompt_index: int) -> None:
        self._prompt_index = prompt_index
        self.finish: str | None = None
        self.numbers = b""

    def feed(self, event: TokenEvent) -> None:
        """Takes the vector from an event that ends its sequence. Raises RequestError."""
        if event.finish is None:
            return
        if event.vector is None:
            raise RequestError("unavailable", "the worker gave no vector; try again soon")
        self.finish, self.numbers = event.finish, event.vector

    def result(self) -> ChoiceResult:
        """Returns the result of the sequence without the vector, which is still the worker's."""
        return ChoiceResult(self._prompt_index, 0, "", (), "stop", 0)


class VectorReading(Protocol):
    """The numbers that a request wants from workers' vectors. params: the workers' orders."""

    @property
    def params(self) -> VectorParams: ...

    def numbers(self, vectors: Sequence[bytes]) -> list[tuple[float, ...]]:
        """Computes the numbers of each answer from the vectors of each sequence."""
        ...


class _Vectors(msgspec.Struct, frozen=True):
    form: VectorForm
    call: VectorCall

    @property
    def params(self) -> VectorParams:
        return VectorParams(pooling=self.form.pooling)

    def numbers(self, vectors: Sequence[bytes]) -> list[tuple[float, ...]]:
        return [tuple(self._vector(raw).tolist()) for raw in vectors]

    def _vector(self, raw: bytes) -> np.ndarray:
        vector = numbers_of(raw)[: self.call.dimensions]
        wish = self.call.normalises
        return _unit(vector) if (self.form.normalises if wish is None else wish) else vector


class _Angles(msgspec.Struct, frozen=True):
    """Cosines between the vectors of queries, which come first, and of documents. queries: how
    many: one, or as many as documents."""

    form: VectorForm
    queries: int

    @property
    def params(self) -> VectorParams:
        return VectorParams(pooling=self.form.pooling)

    def numbers(self, vectors: Sequence[bytes]) -> list[tuple[float, ...]]:
        units = np.stack([_unit(numbers_of(raw)) for raw in vectors]).astype(np.float64)
        cosines = (units[: self.queries] * units[self.queries :]).sum(axis=1)
        return [(float(cosine),) for cosine in cosines]


class _Classes(msgspec.Struct, frozen=True):
    """Scores of a classifier, as probabilities. labels: of each token, one token after the other;
    0 = a text has one score for each label."""

    activation: Literal["softmax", "sigmoid", "none"]
    labels: int
    params: VectorParams

    def numbers(self, vectors: Sequence[bytes]) -> list[tuple[float, ...]]:
        return [tuple(self._activated(numbers_of(raw)).tolist()) for raw in vectors]

    def _activated(self, scores: np.ndarray) -> np.ndarray:
        scores = scores.astype(np.float64)
        if self.activation == "softmax":
            of_each = scores.reshape(-1, self.labels or len(scores))
            powers = np.exp(of_each - of_each.max(axis=1, keepdims=True))
            found: np.ndarray = (powers / powers.sum(axis=1, keepdims=True)).flatten()
            return found
        return _sigmoid(scores) if self.activation == "sigmoid" else scores


class _Odds(msgspec.Struct, frozen=True):
    """The probability of the first of two tokens, from the logits of both."""

    params: VectorParams
    is_raw: bool

    def numbers(self, vectors: Sequence[bytes]) -> list[tuple[float, ...]]:
        logits = np.stack([numbers_of(raw) for raw in vectors]).astype(np.float64)
        odds = logits[:, 0] - logits[:, 1]
        return [(float(one),) for one in (odds if self.is_raw else _sigmoid(odds))]


def vector_reading(call: VectorCall, card: ModelCard) -> VectorReading | None:
    """How a call's numbers come from vectors; None: the model has none. Raises RequestError."""
    if call.use == "classes":
        return _class_reading(call, card)
    if call.use == "fit":
        return _fit_reading(call, card)
    if card.vectors is None:
        return None
    most = card.vectors.size
    if call.dimensions is not None and call.dimensions > most:
        message = f"`dimensions`: the model's vectors have {most}, got {call.dimensions}"
        raise RequestError("invalid", message, param="dimensions")
    return _Vectors(card.vectors, call)


def _fit_reading(call: VectorCall, card: ModelCard) -> VectorReading | None:
    if card.pairs is None:
        return None
    if card.pairs.by == "vectors":
        return None if card.vectors is None else _Angles(card.vectors, len(queries_of(call)))
    if card.pairs.by == "logits":
        return _Odds(VectorParams("logits", token_ids=card.pairs.token_ids), call.is_raw)
    return _class_reading(call, card)


def _class_reading(call: VectorCall, card: ModelCard) -> VectorReading | None:
    classes = card.classes
    if classes is None:
        return None
    pooling = "all" if classes.of_tokens else card.score_pooling
    labels = len(classes.labels) if classes.of_tokens else 0
    return _Classes(_activation(call, classes), labels, VectorParams("scores", pooling))


def _activation(call: VectorCall, classes: ClassForm) -> Literal["softmax", "sigmoid", "none"]:
    return "none" if call.is_raw else classes.activation


def numbers_of(raw: bytes) -> np.ndarray:
    """Reads the numbers of a worker's vector, float32 `[n]`."""
    return np.frombuffer(raw, "<f4")


def _unit(vector: np.ndarray) -> np.ndarray:
    length = max(float(np.linalg.norm(vector.astype(np.float64))), _LEAST_LENGTH)
    found: np.ndarray = (vector / length).astype(np.float32)
    return found


def _sigmoid(scores: np.ndarray) -> np.ndarray:
    found: np.ndarray = 0.5 * (1.0 + np.tanh(0.5 * scores))  # of any size
    return found


def check_early(call: GenerationCall, card: ModelCard) -> None:
    """Checks a call as `check_kind`, before its adapter is known: that may have a score head."""
    if call.adapter is None or _wanted(call) not in _OF_HEADS:
        check_kind(call, card, None)


def check_kind(call: GenerationCall, card: ModelCard, adapter: ServedAdapter | None) -> None:
    """Checks that the model gives the kind of answer that a call wants. card: of the model under
    the adapter. Raises RequestError (unsupported), with the routes that it does serve.
    """
    wanted = _wanted(call)
    if wanted in card.gives:
        return
    served = ", ".join(_AT[gift] for gift in card.gives)
    name = f"the model {card.names[0]}"
    if adapter is not None:
        head = "no" if adapter.manifest.classes is None else "a"
        name += f" with the adapter {adapter.adapter_id}, which has {head} score head,"
    message = f"{name} gives {_NO[wanted]}; it gives {served}"
    if wanted == "fits" and card.classes is not None:
        message += f"; such a score needs a classifier of one label, not {len(card.classes.labels)}"
    elif wanted == "fits":
        message += "; the worker's --rerank-tokens and --rerank-template say how it gives a score"
    raise RequestError("unsupported", message, param=adapter_field(call.api))


def _wanted(call: GenerationCall) -> Gift:
    if call.vector is None:
        return "text"
    wanted: dict[str, Gift] = {"vector": "vectors", "classes": "classes", "fit": "fits"}
    return wanted[call.vector.use]
