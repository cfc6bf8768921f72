"""From a worker's numbers to those that a caller wants: vectors, probabilities, fits."""

from collections.abc import Sequence
from typing import Literal, Protocol

import msgspec
import numpy as np

from loraplex.router.call import ChoiceResult, RequestError, VectorCall
from loraplex.router.generation.vector_prompts import queries_of
from loraplex.server.protocol import ClassForm, ModelCard, TokenEvent, VectorForm, VectorParams

# As torch divides by no less.
_LEAST_LENGTH = 1e-12


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
