"""How well documents fit queries: `/score` (vLLM), `/rerank` (Cohere, Jina, vLLM, TEI), and how
likely tokens follow items (`/score` in SGLang's shape). Pure."""

import math
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

import msgspec
from msgspec import UNSET, Meta, UnsetType

from loraplex.router.api.openai import completions
from loraplex.router.api.openai.completions import CompletionsBody
from loraplex.router.api.request.body import only_one_of, require, typed
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
from loraplex.router.call import (
    ChoiceResult,
    PromptInfo,
    RequestError,
    TopToken,
    VectorCall,
)

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


def parse_rerank(
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


Texts = str | Annotated[list[str], Meta(min_length=1, max_length=MAX_INPUTS)]
# Newer and older names of the two sides.
_LEFT = ("queries", "text_1", "data_1")
_RIGHT = ("documents", "text_2", "data_2")
SIDES = (_LEFT, _RIGHT)


class ScoreBody(ScoredBody, frozen=True, kw_only=True):
    """Body of a request to score pairs of texts. One query for all documents, or one for each.
    text_1, text_2, data_1, data_2: older names of queries and documents. instruction: what the
    fit is about.
    """

    queries: Texts | None = None
    documents: Texts | None = None
    text_1: Texts | None = None
    text_2: Texts | None = None
    data_1: Texts | None = None
    data_2: Texts | None = None
    instruction: str | None = None


class ScoreObject(msgspec.Struct, frozen=True):
    index: int
    score: float
    object: Literal["score"] = "score"


class ScoreList(msgspec.Struct, frozen=True):
    id: str
    created: int
    model: str
    data: list[ScoreObject]
    usage: VectorUsage
    object: Literal["list"] = "list"


def parse_score(plain: dict[str, Any], limits: ApiLimits, bearer: str | None = None) -> ApiRequest:
    """Reads a request to score pairs of texts. Raises RequestError."""
    request = read_body(plain, ScoreBody)
    queries, documents = _texts(plain, request, _LEFT), _texts(plain, request, _RIGHT)
    count = len(documents)
    if len(queries) == 1:
        queries *= count
    field = only_one_of(plain, _LEFT)
    require(len(queries) == count, f"expected one, or {count}, as many as of the others", field)
    vector = VectorCall(
        use="fit",
        queries=queries,
        instruction=request.instruction,
        is_raw=request.is_raw,
    )
    call = call_of("score", request, documents, vector, limits, bearer)
    return ApiRequest(call, ScoreFormatter, WrittenAs(request.request_id))


def _texts(plain: dict[str, Any], request: ScoreBody, names: tuple[str, ...]) -> tuple[str, ...]:
    """Returns the texts of one side of the pairs. Raises RequestError."""
    given = getattr(request, only_one_of(plain, names))
    return (given,) if isinstance(given, str) else tuple(given)


class ScoreFormatter(WholeFormatter):
    def whole(self, results: Sequence[ChoiceResult], prompts: Sequence[PromptInfo]) -> Any:
        head = self._head
        data = [ScoreObject(result.prompt_index, result.vector[0]) for result in results]
        return ScoreList(
            self._options.id_of("score", head), head.created, head.model, data, usage_of(prompts)
        )


_NAMES = {"prompt": "items", "logprob_token_ids": "label_token_ids"}


class LabelScoreBody(ReadBody, frozen=True, kw_only=True):
    """Body of a request to score items by the probability of given tokens. query, items: texts, or
    token ids. item_first: an item stands before the query.

    apply_softmax: the scores of an item add up to 1, drawn apart by a low temperature; else each is
    the token's probability among all.
    """

    query: str | list[NonNegative]
    items: str | Annotated[list[str | list[NonNegative]], Meta(min_length=1)]
    label_token_ids: Annotated[list[NonNegative], Meta(min_length=1)]
    apply_softmax: bool | None = None
    temperature: Annotated[float, Meta(gt=0)] | None = None
    item_first: bool | None = None


class LabelScores(msgspec.Struct, frozen=True):
    """Answer that scores items. scores: of each item, one for each token that was asked for."""

    scores: list[list[float]]
    model: str
    usage: VectorUsage
    object: Literal["scoring"] = "scoring"


def parse_labels(plain: dict[str, Any], limits: ApiLimits, bearer: str | None) -> ApiRequest:
    """Reads a request to score items by the probability of given tokens. Raises RequestError."""
    request = read_body(plain, LabelScoreBody)
    temperature = request.temperature
    require(temperature is None or request.apply_softmax, "needs `apply_softmax`", "temperature")
    shared = {name: getattr(request, name) for name in _SHARED}
    body = CompletionsBody(
        prompt=_prompts(request),
        max_tokens=1,
        temperature=0.0,
        logprobs=0,
        logprob_token_ids=request.label_token_ids,
        **shared,
    )
    try:
        call = completions.request_of(body, limits, bearer).call
    except RequestError as error:
        raise error.spelled(_NAMES) from None
    softened = (temperature or 1.0) if request.apply_softmax else None
    return ApiRequest(call, LabelScoreFormatter, softened)


_SHARED = tuple(
    name for name in ReadBody.__struct_fields__ if name in CompletionsBody.__struct_fields__
)


def _prompts(request: LabelScoreBody) -> list[Any]:
    """Joins the query with each item to one prompt. Raises RequestError."""
    query, prompts = request.query, list[Any]()
    for i, item in enumerate([request.items] if isinstance(request.items, str) else request.items):
        is_alike = isinstance(item, str) == isinstance(query, str)
        require(is_alike, "expected a text beside a text, ids beside ids", f"items[{i}]")
        first, second = (item, query) if request.item_first else (query, item)
        prompts.append(first + second)  # type: ignore[operator]
    return prompts


class LabelScoreFormatter(WholeFormatter):
    """Scores of items by given tokens. options: the softmax's temperature; None = no softmax."""

    def whole(self, results: Sequence[ChoiceResult], prompts: Sequence[PromptInfo]) -> Any:
        scores = [self._scores(result.tokens[0].listed) for result in results]
        return LabelScores(scores, self._head.model, usage_of(prompts))

    def _scores(self, labels: Sequence[TopToken]) -> list[float]:
        if self._options is None:
            return [math.exp(label.logprob) for label in labels]
        most = max(label.logprob for label in labels)
        parts = [math.exp((label.logprob - most) / self._options) for label in labels]
        return [part / sum(parts) for part in parts]
