"""vLLM's `/pooling`: vectors or classes of texts, by one shape. Pure."""

from collections.abc import Sequence
from typing import Any, Literal

import msgspec

from loraplex.router.api.request.body import require
from loraplex.router.api.request.fields import Positive
from loraplex.router.api.request.formatter import ApiLimits, ApiRequest
from loraplex.router.api.request.known_elsewhere import unsupported
from loraplex.router.api.vectors.embeddings import EmbeddingsFormatter
from loraplex.router.api.vectors.fields import InputBody, input_call, read_body
from loraplex.router.api.vectors.whole import Encoding, VectorUsage, WrittenAs
from loraplex.router.call import VectorCall

_UNSERVED = ("token_embed", "token_classify", "embed&token_classify", "plugin")


class PoolingBody(InputBody, frozen=True, kw_only=True):
    """task: absent = classes where the base is a classifier, else vectors."""

    task: Literal["embed", "classify"] | None = None
    dimensions: Positive | None = None
    encoding_format: Encoding | None = None


class PoolingObject(msgspec.Struct, frozen=True):
    """data: the vector, or a number for each class; base64 of little-endian float32, where that was
    asked for."""

    index: int
    data: Sequence[float] | str
    object: Literal["pooling"] = "pooling"


class PoolingList(msgspec.Struct, frozen=True):
    id: str
    created: int
    data: list[PoolingObject]
    model: str
    usage: VectorUsage
    object: Literal["list"] = "list"


def parse(plain: dict[str, Any], limits: ApiLimits, bearer: str | None = None) -> ApiRequest:
    """Raises RequestError."""
    if plain.get("task") in _UNSERVED:
        raise unsupported("task", "numbers are of whole texts, by `embed` or `classify`")
    request = read_body(plain, PoolingBody)
    if (request.task or ("classify" if "classes" in limits.gives else "embed")) == "classify":
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
