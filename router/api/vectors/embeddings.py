"""OpenAI's `/v1/embeddings` and vLLM's `/pooling`: bodies and answers. Pure."""

from collections.abc import Callable, Sequence
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from loraplex.router.api.request.body import require
from loraplex.router.api.request.fields import Positive
from loraplex.router.api.request.formatter import ApiLimits, ApiRequest
from loraplex.router.api.request.known_elsewhere import unsupported
from loraplex.router.api.vectors.entities import rows_of
from loraplex.router.api.vectors.fields import (
    Encoding,
    InputBody,
    VectorUsage,
    WholeFormatter,
    WrittenAs,
    input_call,
    read_body,
    usage_of,
)
from loraplex.router.call import ChoiceResult, PromptInfo, VectorCall

PromptText = Annotated[str, Meta(max_length=1 << 14)]


class EmbeddingsBody(InputBody, frozen=True, kw_only=True):
    """Body of a request to `/v1/embeddings`. From normalize on: extensions. normalize: another name
    of use_activation. prompt_name, prompt: what is put before each text, by name or as it is.
    """

    dimensions: Positive | None = None
    encoding_format: Encoding | None = None
    normalize: bool | None = None
    prompt_name: str | None = None
    prompt: PromptText | None = None


class EmbeddingObject(msgspec.Struct, frozen=True):
    """Vector of one text in an answer. embedding: base64 of little-endian float32, where that was
    asked for.
    """

    index: int
    embedding: Sequence[float] | str
    object: Literal["embedding"] = "embedding"


class EmbeddingList(msgspec.Struct, frozen=True):
    id: str
    created: int
    data: list[EmbeddingObject]
    model: str
    usage: VectorUsage
    object: Literal["list"] = "list"


def parse(plain: dict[str, Any], limits: ApiLimits, bearer: str | None = None) -> ApiRequest:
    """Reads a request to `/v1/embeddings`. Raises RequestError."""
    request = read_body(plain, EmbeddingsBody)
    check_prompt(request.prompt_name, request.prompt)
    normalises = request.use_activation if request.normalize is None else request.normalize
    agree = request.use_activation in (None, normalises)
    require(agree, "contradicts `normalize`", "use_activation")
    vector = VectorCall(normalises, request.dimensions, request.prompt_name, request.prompt)
    call = input_call("embeddings", request, vector, limits, bearer)
    options = WrittenAs(request.request_id, request.encoding_format or "float")
    return ApiRequest(call, EmbeddingsFormatter, options)


def check_prompt(name: str | None, text: str | None) -> None:
    """Checks that a prompt is given by name or as a text, not both. Raises RequestError."""
    require(name is None or text is None, "give it or `prompt_name`, not both", "prompt")


class EmbeddingsFormatter(WholeFormatter):
    prefix: str = "embd"
    one: Callable[..., Any] = EmbeddingObject
    several: Callable[..., Any] = EmbeddingList

    def whole(self, results: Sequence[ChoiceResult], prompts: Sequence[PromptInfo]) -> Any:
        head, options = self._head, self._options
        data = [self.one(r.prompt_index, self._numbers(r.vector)) for r in results]
        answer_id = options.id_of(self.prefix, head)
        return self.several(answer_id, head.created, data, head.model, usage_of(prompts))

    def _numbers(self, numbers: Sequence[float]) -> Any:
        return self._options.vector(numbers)


_UNSERVED = ("token_embed", "embed&token_classify", "plugin")


class PoolingBody(InputBody, frozen=True, kw_only=True):
    """Body of a request to `/pooling`. task: absent = classes where the base is a classifier, else
    vectors. A model gives classes of texts or of tokens, whatever of both is asked for.
    """

    task: Literal["embed", "classify", "token_classify"] | None = None
    dimensions: Positive | None = None
    encoding_format: Encoding | None = None


class PoolingObject(msgspec.Struct, frozen=True):
    """Numbers of one text in an answer. data: the vector, or a number for each class, where tokens
    have classes a list of these for each; base64 of little-endian float32, where that was asked
    for.
    """

    index: int
    data: Sequence[float | Sequence[float]] | str
    object: Literal["pooling"] = "pooling"


class PoolingList(msgspec.Struct, frozen=True):
    id: str
    created: int
    data: list[PoolingObject]
    model: str
    usage: VectorUsage
    object: Literal["list"] = "list"


def parse_pooling(
    plain: dict[str, Any], limits: ApiLimits, bearer: str | None = None
) -> ApiRequest:
    """Reads a request to `/pooling`. Raises RequestError."""
    if plain.get("task") in _UNSERVED:
        raise unsupported(
            "task",
            "vectors are of whole texts, by `embed`; tokens have classes, by `token_classify`",
        )
    request = read_body(plain, PoolingBody)
    if (request.task or ("classify" if "classes" in limits.gives else "embed")) != "embed":
        require(request.dimensions is None, "classes are as many as they are", "dimensions")
        vector = VectorCall(use="classes", is_raw=request.use_activation is False)
        call = input_call("classify", request, vector, limits, bearer)
    else:
        vector = VectorCall(request.use_activation, request.dimensions)
        call = input_call("embeddings", request, vector, limits, bearer)
    options = WrittenAs(request.request_id, request.encoding_format or "float")
    return ApiRequest(call, PoolingFormatter, options)


class PoolingFormatter(EmbeddingsFormatter):
    prefix, one, several = "pooling", PoolingObject, PoolingList

    def _numbers(self, numbers: Sequence[float]) -> Any:
        if not self._head.of_tokens or self._options.encoding == "base64":
            return self._options.vector(numbers)
        return rows_of(numbers, len(self._head.labels))
