"""From a worker's numbers to those that a caller wants: cut, and of length 1."""

from collections.abc import Sequence

import msgspec
import numpy as np

from router.call import ChoiceResult, RequestError, VectorCall
from server.protocol import TokenEvent, VectorForm, VectorParams


class VectorStream:
    """Takes the events of one sequence that is read for a vector. finish: set once it is over."""

    must_abort = False  # nothing runs on behind the vector

    def __init__(self, prompt_index: int) -> None:
        self._prompt_index = prompt_index
        self.finish: str | None = None
        self.numbers = b""

    def feed(self, event: TokenEvent) -> None:
        """Raises RequestError."""
        if event.finish is None:
            return
        if event.vector is None:
            raise RequestError("unavailable", "the worker gave no vector; try again soon")
        self.finish, self.numbers = event.finish, event.vector

    def result(self) -> ChoiceResult:
        """Without the vector, which is still the worker's."""
        return ChoiceResult(self._prompt_index, 0, "", (), "stop", 0)


class VectorReading(msgspec.Struct, frozen=True):
    """What a request wants of the model's vectors."""

    form: VectorForm
    call: VectorCall

    @property
    def params(self) -> VectorParams:
        return VectorParams(pooling=self.form.pooling)

    def numbers(self, vectors: Sequence[bytes]) -> list[tuple[float, ...]]:
        """Of each sequence."""
        return [tuple(self._vector(raw).tolist()) for raw in vectors]

    def _vector(self, raw: bytes) -> np.ndarray:
        vector = np.frombuffer(raw, "<f4")[: self.call.dimensions]
        wish = self.call.normalises
        if self.form.normalises if wish is None else wish:
            length = np.linalg.norm(vector.astype(np.float64))
            vector = (vector / max(float(length), 1e-12)).astype(np.float32)
        return vector


def vector_reading(call: VectorCall, form: VectorForm) -> VectorReading:
    """Raises RequestError."""
    most = form.size
    if call.dimensions is not None and call.dimensions > most:
        message = f"`dimensions`: the model's vectors have {most}, got {call.dimensions}"
        raise RequestError("invalid", message, param="dimensions")
    return VectorReading(form, call)
