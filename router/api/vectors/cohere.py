"""Cohere's `/v2/embed`: vectors of texts, in several kinds of numbers. Pure."""

from collections.abc import Mapping, Sequence
from itertools import starmap
from typing import Annotated, Any, ClassVar, Literal

import msgspec
import numpy as np
from msgspec import Meta

from loraplex.router.api.request.body import only_one_of, require
from loraplex.router.api.request.chat_messages import ContentPart, text_part
from loraplex.router.api.request.fields import Positive
from loraplex.router.api.request.formatter import ApiLimits, ApiRequest
from loraplex.router.api.request.known_elsewhere import Elsewhere, check_refused
from loraplex.router.api.vectors.fields import (
    MAX_INPUTS,
    ReadBody,
    WholeFormatter,
    WrittenAs,
    call_of,
    packed,
    read_body,
    usage_of,
)
from loraplex.router.call import ChoiceResult, PromptInfo, VectorCall

EmbeddingType = Literal["float", "int8", "uint8", "binary", "ubinary", "base64"]
SHAPES = ("texts", "inputs")
# Names that the model's files may have for the prompt of a kind of texts, the likeliest first.
_PROMPTS = {
    "search_query": ("search_query", "query"),
    "search_document": ("search_document", "document", "passage"),
}
REFUSED = {
    "images": Elsewhere(([],), "text alone is read"),
    "truncate_prompt_tokens": Elsewhere((), "use `max_tokens`"),
    "truncation_side": Elsewhere((), "use `truncate`"),
}


_TEXTS = Meta(extra_json_schema={"minItems": 1, "maxItems": MAX_INPUTS})


class EmbedInput(msgspec.Struct, frozen=True):
    """One input of several parts. content: texts, which are read as one, with a line
    end between.
    """

    content: Annotated[list[ContentPart], Meta(extra_json_schema={"minItems": 1})]


class CohereEmbedBody(ReadBody, frozen=True, kw_only=True):
    """Body of a request to Cohere's embed route. texts, inputs: one of both.

    input_type: names a prompt of the model's files. truncate: which end of a text that is too long
    is cut off; `NONE` = it is refused. max_tokens: of each text.
    """

    refused: ClassVar[Mapping[str, Elsewhere]] = REFUSED

    texts: Annotated[list[str], _TEXTS] | None = None
    inputs: Annotated[list[EmbedInput], _TEXTS] | None = None
    images: list[str] | None = None
    input_type: str | None = None
    embedding_types: list[EmbeddingType] | None = None
    output_dimension: Positive | None = None
    max_tokens: Positive | None = None
    truncate: Literal["NONE", "START", "END"] | None = None


class CohereEmbeddings(msgspec.Struct, frozen=True):
    """Answer of Cohere's embed route. embeddings: by type, a vector for each text. texts: as they
    were sent.
    """

    id: str
    embeddings: dict[EmbeddingType, list[Sequence[float] | str]]
    texts: list[str]
    meta: dict[str, dict[str, Any]]
    response_type: Literal["embeddings_by_type"] = "embeddings_by_type"


class EmbedOptions(msgspec.Struct, frozen=True):
    types: tuple[EmbeddingType, ...]
    texts: tuple[str, ...]


def parse(plain: dict[str, Any], limits: ApiLimits, bearer: str | None = None) -> ApiRequest:
    """Reads a request for vectors in Cohere's shape. Raises RequestError."""
    check_refused(plain, REFUSED)
    request = read_body(plain, CohereEmbedBody)
    field = only_one_of(plain, SHAPES)
    texts = tuple(request.texts or starmap(_text, enumerate(request.inputs or ())))
    most = f"expected 1 to {MAX_INPUTS}, got {len(texts)}"
    require(0 < len(texts) <= MAX_INPUTS, most, field)
    cuts = request.truncate != "NONE"
    require(cuts or request.max_tokens is None, "needs `truncate` START or END", "max_tokens")
    kind = request.input_type
    vector = VectorCall(
        dimensions=request.output_dimension,
        prompt_names=() if kind is None else _PROMPTS.get(kind, (kind,)),
    )
    asked = msgspec.structs.replace(
        request,
        truncate_prompt_tokens=(request.max_tokens or -1) if cuts else None,
        truncation_side="left" if request.truncate == "START" else None,
    )
    call = call_of("cohere_embed", asked, texts, vector, limits, bearer)
    options = EmbedOptions(
        tuple(request.embedding_types or ("float",)), texts if field == "texts" else ()
    )
    return ApiRequest(call, CohereEmbedFormatter, options)


def _text(index: int, given: EmbedInput) -> str:
    where = f"inputs[{index}].content"
    require(given.content, "expected at least one part", where)
    parts = [text_part(part, f"{where}[{i}]") for i, part in enumerate(given.content)]
    return "\n".join(part["text"] for part in parts)


class CohereEmbedFormatter(WholeFormatter):
    def whole(self, results: Sequence[ChoiceResult], prompts: Sequence[PromptInfo]) -> Any:
        tokens = {"input_tokens": usage_of(prompts).prompt_tokens}
        return CohereEmbeddings(
            WrittenAs().id_of("embd", self._head),
            {kind: [written(r.vector, kind) for r in results] for kind in self._options.types},
            list(self._options.texts),
            {"api_version": {"version": "2"}, "billed_units": tokens, "tokens": tokens},
        )


def written(vector: Sequence[float], kind: EmbeddingType) -> Sequence[float] | str:
    """Writes a vector in the type that was asked for. int8: 127 times the vector at length 1;
    uint8: 128 more. ubinary: a bit for each number, set where that is positive, the first
    highest; binary: 128 less.
    """
    if kind == "float":
        return vector
    if kind == "base64":
        return packed(vector)
    numbers = np.asarray(vector, np.float64)
    if kind in ("binary", "ubinary"):
        found = np.packbits(numbers > 0).astype(int) - (128 if kind == "binary" else 0)
    else:
        found = np.rint(127 * numbers / (np.linalg.norm(numbers) or 1.0)).astype(int)
        found += 128 if kind == "uint8" else 0
    whole: list[int] = found.tolist()
    return whole
