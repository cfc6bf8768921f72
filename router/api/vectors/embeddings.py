"""OpenAI's `/v1/embeddings`: request bodies and answers. Pure."""

import base64
import struct
from collections.abc import Sequence
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from router.api.request.body import decode_plain, require
from router.api.request.fields import NonNegative, Positive
from router.api.request.formatter import ApiLimits, ApiRequest
from router.api.request.prompts import prompts_of
from router.api.vectors.fields import ReadBody, call_of, read_body
from router.api.vectors.whole import (
    MAX_INPUTS,
    VectorUsage,
    WholeFormatter,
    usage_of,
)
from router.call import AnswerHead, ChoiceResult, PromptInfo, VectorCall

Encoding = Literal["float", "base64"]
PromptText = Annotated[str, Meta(max_length=1 << 14)]


class EmbeddingsBody(ReadBody, frozen=True, kw_only=True):
    """input: a text, a list of texts, token ids, or a list of lists of token ids.

    From normalize on: extensions. prompt_name, prompt: what is put before each text, by name or as
    it is.
    """

    input: str | list[str | NonNegative | list[NonNegative]]
    model: str
    dimensions: Positive | None = None
    encoding_format: Encoding | None = None
    normalize: bool | None = None
    prompt_name: str | None = None
    prompt: PromptText | None = None


class EmbeddingObject(msgspec.Struct, frozen=True):
    """embedding: base64 of little-endian float32, where that was asked for."""

    index: int
    embedding: Sequence[float] | str
    object: Literal["embedding"] = "embedding"


class EmbeddingList(msgspec.Struct, frozen=True):
    data: list[EmbeddingObject]
    model: str
    usage: VectorUsage
    object: Literal["list"] = "list"


def parse(body: bytes, limits: ApiLimits, bearer: str | None = None) -> ApiRequest:
    """Raises RequestError."""
    plain = decode_plain(body)
    request = read_body(plain, EmbeddingsBody)
    check_prompt(request.prompt_name, request.prompt)
    prompts = prompts_of(request.input, "input", MAX_INPUTS)
    vector = VectorCall(request.normalize, request.dimensions, request.prompt_name, request.prompt)
    call = call_of("embeddings", request, prompts, vector, limits, bearer)
    return ApiRequest(call, EmbeddingsFormatter, request.encoding_format or "float")


def check_prompt(name: str | None, text: str | None) -> None:
    """Raises RequestError."""
    require(name is None or text is None, "give it or `prompt_name`, not both", "prompt")


class EmbeddingsFormatter(WholeFormatter):
    def __init__(self, head: AnswerHead, encoding: Encoding) -> None:
        self._head, self._encoding = head, encoding

    def whole(
        self, results: Sequence[ChoiceResult], prompts: Sequence[PromptInfo]
    ) -> EmbeddingList:
        data = [EmbeddingObject(r.prompt_index, self._written(r.vector)) for r in results]
        return EmbeddingList(data, self._head.model, usage_of(prompts))

    def _written(self, vector: tuple[float, ...]) -> tuple[float, ...] | str:
        if self._encoding == "float":
            return vector
        return base64.b64encode(struct.pack(f"<{len(vector)}f", *vector)).decode()
