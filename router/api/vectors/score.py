"""`/score` and `/v1/score`, as vLLM has them: how well documents fit queries. Pure."""

from collections.abc import Sequence
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from loraplex.router.api.request.body import only_one_of, require
from loraplex.router.api.request.formatter import ApiLimits, ApiRequest
from loraplex.router.api.vectors.fields import ScoredBody, call_of, read_body
from loraplex.router.api.vectors.whole import (
    MAX_INPUTS,
    VectorUsage,
    WholeFormatter,
    WrittenAs,
    usage_of,
)
from loraplex.router.call import AnswerHead, ChoiceResult, PromptInfo, VectorCall

Texts = str | Annotated[list[str], Meta(min_length=1, max_length=MAX_INPUTS)]
# Newer and older names of the two sides.
_LEFT = ("queries", "text_1", "data_1")
_RIGHT = ("documents", "text_2", "data_2")
SIDES = (_LEFT, _RIGHT)


class ScoreBody(ScoredBody, frozen=True, kw_only=True):
    """One query for all documents, or one for each. text_1, text_2, data_1, data_2: older names of
    queries and documents. instruction: what the fit is about."""

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


def parse(plain: dict[str, Any], limits: ApiLimits, bearer: str | None = None) -> ApiRequest:
    """Raises RequestError."""
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
    """Raises RequestError."""
    given = getattr(request, only_one_of(plain, names))
    return (given,) if isinstance(given, str) else tuple(given)


class ScoreFormatter(WholeFormatter):
    def __init__(self, head: AnswerHead, options: WrittenAs) -> None:
        self._head, self._options = head, options

    def whole(self, results: Sequence[ChoiceResult], prompts: Sequence[PromptInfo]) -> Any:
        head = self._head
        data = [ScoreObject(result.prompt_index, result.vector[0]) for result in results]
        answer = ScoreList(
            self._options.id_of("score", head), head.created, head.model, data, usage_of(prompts)
        )
        return answer
