"""`/v1/score` in SGLang's shape: how likely tokens follow a query and each of its items. Pure."""

import math
from collections.abc import Sequence
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from loraplex.router.api.openai import completions
from loraplex.router.api.openai.completions import CompletionsBody
from loraplex.router.api.request.body import require
from loraplex.router.api.request.fields import NonNegative
from loraplex.router.api.request.formatter import ApiLimits, ApiRequest
from loraplex.router.api.vectors.fields import ReadBody, read_body
from loraplex.router.api.vectors.whole import VectorUsage, WholeFormatter, usage_of
from loraplex.router.call import AnswerHead, ChoiceResult, PromptInfo, RequestError, TopToken

_NAMES = {"prompt": "items", "logprob_token_ids": "label_token_ids"}


class LabelScoreBody(ReadBody, frozen=True, kw_only=True):
    """query, items: texts, or token ids. item_first: an item stands before the query.

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
    """scores: of each item, one for each token that was asked for."""

    scores: list[list[float]]
    model: str
    usage: VectorUsage
    object: Literal["scoring"] = "scoring"


def parse(plain: dict[str, Any], limits: ApiLimits, bearer: str | None) -> ApiRequest:
    """Raises RequestError."""
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
    """Raises RequestError."""
    query, prompts = request.query, list[Any]()
    for i, item in enumerate([request.items] if isinstance(request.items, str) else request.items):
        is_alike = isinstance(item, str) == isinstance(query, str)
        require(is_alike, "expected a text beside a text, ids beside ids", f"items[{i}]")
        first, second = (item, query) if request.item_first else (query, item)
        prompts.append(first + second)  # type: ignore[operator]
    return prompts


class LabelScoreFormatter(WholeFormatter):
    """softened: the temperature of the softmax; None = there is none."""

    def __init__(self, head: AnswerHead, softened: float | None) -> None:
        self._head, self._softened = head, softened

    def whole(self, results: Sequence[ChoiceResult], prompts: Sequence[PromptInfo]) -> Any:
        scores = [self._scores(result.tokens[0].listed) for result in results]
        return LabelScores(scores, self._head.model, usage_of(prompts))

    def _scores(self, labels: Sequence[TopToken]) -> list[float]:
        if self._softened is None:
            return [math.exp(label.logprob) for label in labels]
        most = max(label.logprob for label in labels)
        parts = [math.exp((label.logprob - most) / self._softened) for label in labels]
        return [part / sum(parts) for part in parts]
