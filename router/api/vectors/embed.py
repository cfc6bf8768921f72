"""`/embed` in LoRAX's shape and in that of Text Embeddings Inference (TEI). Pure."""

from collections.abc import Sequence
from typing import Any, Literal

import msgspec

from loraplex.router.api.request.body import decode_plain, require, typed
from loraplex.router.api.request.fields import (
    AdapterFields,
    NonNegative,
    Off,
    Positive,
    adapter_named,
    prompts_of,
)
from loraplex.router.api.request.formatter import ApiLimits, ApiRequest
from loraplex.router.api.request.known_elsewhere import check_unknown_parts
from loraplex.router.api.vectors.fields import MAX_INPUTS, READ_ALONE, WholeFormatter
from loraplex.router.call import ChoiceResult, GenerationCall, PromptInfo, VectorCall

EmbedShape = Literal["lorax", "tei"]
# Fields that LoRAX's client always sends, be it as null: without them the answer is TEI's.
_OF_LORAX = ("parameters", "stream")
# Fields that LoRAX's body lacks: with one of them the answer is TEI's.
_OF_TEI = ("truncate", "truncation_direction", "prompt_name", "normalize", "dimensions")


class EmbedParameters(AdapterFields, frozen=True, kw_only=True):
    """Parameters of a request in LoRAX's shape: the adapter. adapter_id: alias or reference; null
    or "" = the base.
    """

    adapter_id: str | None = None


class EmbedBody(msgspec.Struct, frozen=True):
    """One text in LoRAX's shape, or TEI's: a text, texts, token ids or lists of them, alone or with
    any of the fields from truncate on.

    truncate: texts that are too long are cut, at their end unless truncation_direction says `Left`.
    normalize: true by default in TEI's shape. stream: of LoRAX's client; only false.
    """

    inputs: str | list[str | NonNegative | list[NonNegative]]
    parameters: EmbedParameters | None = None
    stream: Off = None
    truncate: bool | None = None
    truncation_direction: Literal["Left", "Right"] | None = None
    prompt_name: str | None = None
    normalize: bool | None = None
    dimensions: Positive | None = None


class LoraxEmbedding(msgspec.Struct, frozen=True):
    embeddings: Sequence[float]


def parse(body: bytes, limits: ApiLimits, bearer: str | None = None) -> ApiRequest:
    """Reads a request for vectors in LoRAX's or TEI's shape. Raises RequestError."""
    plain = decode_plain(body)
    check_unknown_parts(plain, EmbedBody.__struct_fields__, "")
    inside = plain.get("parameters")
    if isinstance(inside, dict):
        check_unknown_parts(inside, EmbedParameters.__struct_fields__, "parameters.")
    request = typed(plain, EmbedBody)
    require(not request.stream, "vectors are never streamed", "stream")
    shape = _shape_of(plain)
    given = request.parameters or EmbedParameters()
    needs = "needs `adapter_id` or `merged_adapters`"
    call = GenerationCall(
        api="embed",
        prompts=prompts_of(request.inputs, "inputs", MAX_INPUTS),
        messages=None,
        adapter=adapter_named(given, given.adapter_id, "adapter_id", limits, bearer, needs),
        sampling=READ_ALONE,
        max_tokens=0,
        truncate=-1 if request.truncate else None,
        truncate_keeps="last" if request.truncation_direction == "Left" else "first",
        vector=VectorCall(_normalises(request, shape), request.dimensions, request.prompt_name),
    )
    return ApiRequest(call, EmbedFormatter, shape)


def _shape_of(plain: dict[str, Any]) -> EmbedShape:
    is_tei = (
        not isinstance(plain["inputs"], str)
        or not any(name in plain for name in _OF_LORAX)
        or any(plain.get(name) is not None for name in _OF_TEI)
    )
    return "tei" if is_tei else "lorax"


def _normalises(request: EmbedBody, shape: EmbedShape) -> bool | None:
    return True if shape == "tei" and request.normalize is None else request.normalize


class EmbedFormatter(WholeFormatter):
    def whole(self, results: Sequence[ChoiceResult], prompts: Sequence[PromptInfo]) -> Any:
        vectors = [result.vector for result in results]
        return LoraxEmbedding(vectors[0]) if self._options == "lorax" else vectors
