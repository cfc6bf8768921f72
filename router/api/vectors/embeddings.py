"""OpenAI's `/v1/embeddings`: request bodies and answers. Pure."""

import base64
import struct
from collections.abc import Sequence
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from router.api.openai.common import HARMLESS, Truncation, adapter_by
from router.api.request.body import decode_plain, require, typed
from router.api.request.fields import CacheSalt, NonNegative, Positive, Priority
from router.api.request.formatter import ApiLimits, ApiRequest
from router.api.request.generation_fields import AdapterFields, salt_of
from router.api.request.known_elsewhere import check_unknown
from router.api.request.prompts import prompts_of
from router.api.vectors.whole import (
    MAX_INPUTS,
    READ_ALONE,
    VectorUsage,
    WholeFormatter,
    encoded,
    encoded_list,
    usage_of,
)
from router.call import AnswerHead, ChoiceResult, GenerationCall, PromptInfo, VectorCall

Encoding = Literal["float", "base64"]
PromptText = Annotated[str, Meta(max_length=1 << 14)]


class EmbeddingsBody(AdapterFields, frozen=True, kw_only=True):
    """input: a text, a list of texts, token ids, or a list of lists of token ids. model: an
    adapter's alias or reference, or the base's name.

    From normalize on: extensions. prompt_name, prompt: what is put before each text, by name or as
    it is. truncate_prompt_tokens: texts are cut to so many tokens, -1 = to as many as fit.
    """

    input: str | list[str | NonNegative | list[NonNegative]]
    model: str
    dimensions: Positive | None = None
    encoding_format: Encoding | None = None
    user: str | None = None
    normalize: bool | None = None
    prompt_name: str | None = None
    prompt: PromptText | None = None
    truncate_prompt_tokens: Truncation | None = None
    truncation_side: Literal["left", "right"] | None = None
    add_special_tokens: bool | None = None
    lora_path: str | None = None
    priority: Priority | None = None
    cache_salt: CacheSalt | None = None


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
    check_unknown(plain, EmbeddingsBody.__struct_fields__, HARMLESS)
    request = typed(plain, EmbeddingsBody)
    cut = request.truncate_prompt_tokens
    require(cut != 0, "expected at least 1, or -1 for all that fit", "truncate_prompt_tokens")
    require(
        cut is not None or request.truncation_side is None,
        "needs `truncate_prompt_tokens`",
        "truncation_side",
    )
    check_prompt(request.prompt_name, request.prompt)
    call = GenerationCall(
        api="embeddings",
        prompts=prompts_of(request.input, "input", MAX_INPUTS),
        messages=None,
        adapter=adapter_by(request, request.model, request.lora_path, limits, bearer),
        sampling=READ_ALONE,
        max_tokens=0,
        user=request.user,
        add_special_tokens=request.add_special_tokens is not False,
        truncate=cut,
        truncate_keeps="last" if request.truncation_side == "left" else "first",
        priority=request.priority or 0,
        cache_salt=salt_of(request.cache_salt),
        vector=VectorCall(
            request.normalize, request.dimensions, request.prompt_name, request.prompt
        ),
    )
    return ApiRequest(call, EmbeddingsFormatter, request.encoding_format or "float")


def check_prompt(name: str | None, text: str | None) -> None:
    """Raises RequestError."""
    require(name is None or text is None, "give it or `prompt_name`, not both", "prompt")


class EmbeddingsFormatter(WholeFormatter):
    def __init__(self, head: AnswerHead, encoding: Encoding) -> None:
        self._head, self._encoding = head, encoding

    def whole(self, results: Sequence[ChoiceResult], prompts: Sequence[PromptInfo]) -> bytes:
        data = [EmbeddingObject(r.prompt_index, self._written(r.vector)) for r in results]
        answer = EmbeddingList([], self._head.model, usage_of(prompts))
        return encoded(answer, data=encoded_list(data))

    def _written(self, vector: tuple[float, ...]) -> tuple[float, ...] | str:
        if self._encoding == "float":
            return vector
        return base64.b64encode(struct.pack(f"<{len(vector)}f", *vector)).decode()
