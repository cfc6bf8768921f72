"""`/rerank`, `/v1/rerank` and `/v2/rerank` in the shapes of Cohere, Jina, vLLM and TEI. Pure."""

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

import msgspec
from msgspec import UNSET, Meta, UnsetType

from loraplex.router.api.request.body import only_one_of, typed
from loraplex.router.api.request.fields import NonNegative
from loraplex.router.api.request.formatter import ApiLimits, ApiRequest
from loraplex.router.api.request.known_elsewhere import check_unknown_parts, unsupported
from loraplex.router.api.vectors.fields import (
    MAX_INPUTS,
    ReadBody,
    ScoredBody,
    VectorUsage,
    WholeFormatter,
    WrittenAs,
    call_of,
    read_body,
    usage_of,
)
from loraplex.router.call import ChoiceResult, PromptInfo, VectorCall

RerankShape = Literal["documents", "texts"]
_SHAPES: tuple[RerankShape, ...] = ("documents", "texts")
# Cohere's second version shows no documents unless they are asked for; the others do.
RerankVersion = Literal[1, 2]


class RerankDocument(msgspec.Struct, frozen=True):
    text: str


class RerankBody(ScoredBody, frozen=True, kw_only=True):
    """Body of a request to rank documents by their fit to a query. documents: texts, or objects
    with a `text`. top_n: so many of the best alone; 0 = all.

    return_documents: true unless the route is Cohere's second. max_tokens_per_doc: documents are
    cut to so many tokens; 0 = none is. instruction: what the fit is about.
    """

    query: str
    documents: Annotated[list[str | RerankDocument], Meta(min_length=1, max_length=MAX_INPUTS)]
    top_n: NonNegative | None = None
    return_documents: bool | None = None
    max_tokens_per_doc: NonNegative | None = None
    instruction: str | None = None
    rank_fields: Annotated[
        list[str] | None, Meta(extra_json_schema={"enum": [None, [], ["text"]]})
    ] = None


class TeiRerankBody(msgspec.Struct, frozen=True):
    """Body of TEI's request to rank texts. model: extension; an adapter's alias or reference, or
    the base's name.
    """

    query: str
    texts: Annotated[list[str], Meta(min_length=1, max_length=MAX_INPUTS)]
    raw_scores: bool | None = None
    return_text: bool | None = None
    truncate: bool | None = None
    truncation_direction: Literal["Left", "Right"] | None = None
    model: str | None = None


class RerankResult(msgspec.Struct, frozen=True):
    index: int
    relevance_score: float
    document: RerankDocument | UnsetType = UNSET


class RerankTokens(msgspec.Struct, frozen=True):
    input_tokens: int


class RerankVersionMeta(msgspec.Struct, frozen=True):
    version: str


class RerankMeta(msgspec.Struct, frozen=True):
    api_version: RerankVersionMeta
    tokens: RerankTokens


class RerankAnswer(msgspec.Struct, frozen=True):
    """Answer that ranks documents. results: the best first. usage: as Jina and vLLM count; meta: as
    Cohere does.
    """

    id: str
    model: str
    results: list[RerankResult]
    usage: VectorUsage
    meta: RerankMeta


class TeiRank(msgspec.Struct, frozen=True):
    index: int
    score: float
    text: str | UnsetType = UNSET


class RerankOptions(msgspec.Struct, frozen=True):
    """Options of a ranking. documents: that it shows; () = none. top: how many; None = all."""

    written: WrittenAs
    version: RerankVersion
    documents: tuple[str, ...]
    top: int | None


def shape_of(plain: Mapping[str, Any]) -> RerankShape:
    """Finds which of the known shapes a body has. Raises RequestError unless it is of one shape."""
    return only_one_of(plain, _SHAPES)


def parse_plain(
    plain: dict[str, Any], limits: ApiLimits, bearer: str | None, version: RerankVersion
) -> ApiRequest:
    """Reads a request to rank documents, in either API's shape. Raises RequestError."""
    if shape_of(plain) == "texts":
        return _of_tei(plain, limits, bearer)
    request = read_body(plain, RerankBody)
    if request.rank_fields not in (None, [], ["text"]):
        raise unsupported("rank_fields", "a document is its `text`")
    texts = tuple(d if isinstance(d, str) else d.text for d in request.documents)
    vector = VectorCall(
        use="fit",
        queries=(request.query,) * len(texts),
        instruction=request.instruction,
        max_document_tokens=request.max_tokens_per_doc or None,
        is_raw=request.is_raw,
    )
    shows = version == 1 if request.return_documents is None else request.return_documents
    options = RerankOptions(
        WrittenAs(request.request_id), version, texts if shows else (), request.top_n or None
    )
    call = call_of("rerank", request, texts, vector, limits, bearer)
    return ApiRequest(call, RerankFormatter, options)


def _of_tei(plain: dict[str, Any], limits: ApiLimits, bearer: str | None) -> ApiRequest:
    check_unknown_parts(plain, TeiRerankBody.__struct_fields__, "")
    request = typed(plain, TeiRerankBody)
    texts = tuple(request.texts)
    side = {"Left": "left", "Right": "right"}.get(request.truncation_direction or "")
    read = ReadBody(
        model=request.model,
        truncate_prompt_tokens=-1 if request.truncate else None,
        truncation_side=side if request.truncate else None,  # type: ignore[arg-type]
    )
    vector = VectorCall(
        use="fit", queries=(request.query,) * len(texts), is_raw=bool(request.raw_scores)
    )
    call = call_of("rerank", read, texts, vector, limits, bearer)
    return ApiRequest(call, TeiRerankFormatter, texts if request.return_text else ())


class RerankFormatter(WholeFormatter):
    def whole(self, results: Sequence[ChoiceResult], prompts: Sequence[PromptInfo]) -> Any:
        options, usage = self._options, usage_of(prompts)
        ranked = [
            RerankResult(
                index,
                score,
                RerankDocument(options.documents[index]) if options.documents else UNSET,
            )
            for index, score in _ranked(results)[: options.top]
        ]
        meta = RerankMeta(
            RerankVersionMeta(str(options.version)), RerankTokens(usage.prompt_tokens)
        )
        return RerankAnswer(
            options.written.id_of("rerank", self._head), self._head.model, ranked, usage, meta
        )


class TeiRerankFormatter(WholeFormatter):
    def whole(self, results: Sequence[ChoiceResult], prompts: Sequence[PromptInfo]) -> Any:
        return [
            TeiRank(index, score, self._options[index] if self._options else UNSET)
            for index, score in _ranked(results)
        ]


def _ranked(results: Sequence[ChoiceResult]) -> list[tuple[int, float]]:
    """Ranks documents by their scores, the best first; of equals the earlier."""
    scores = [(result.prompt_index, result.vector[0]) for result in results]
    return sorted(scores, key=lambda one: (-one[1], one[0]))
