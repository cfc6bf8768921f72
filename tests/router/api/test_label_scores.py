"""`/v1/score` in SGLang's shape."""

import math
from typing import Any

import pytest

from loraplex.router.api.request.formatter import ApiLimits
from loraplex.router.api.vectors import fits
from loraplex.router.call import ChoiceResult, RequestError, TextToken, TopToken
from tests.router.api.answers import HEAD, PROMPT

LIMITS = ApiLimits(base_names=("org/small",), max_logprobs=4)
SPAM: dict[str, Any] = {"query": "Spam? ", "items": ["Win", "See you"], "label_token_ids": [7, 9]}


@pytest.mark.parametrize(
    ("changes", "prompts"),
    [
        ({}, ("Spam? Win", "Spam? See you")),
        ({"item_first": True, "items": "Win "}, ("Win Spam? ",)),
        ({"query": [5, 6], "items": [[1], [2, 3]]}, ([5, 6, 1], [5, 6, 2, 3])),
        ({"query": [5], "items": [[1]], "item_first": True, "model": "org/ada"}, ([1, 5],)),
    ],
)
def test_prompts(changes: dict[str, Any], prompts: tuple[Any, ...]) -> None:
    call = fits.parse_labels(SPAM | changes, LIMITS, None).call
    assert call.prompts == prompts
    assert (call.max_tokens, call.sampling.logprob_token_ids) == (1, (7, 9))
    assert (call.adapter is None) == ("model" not in changes)


@pytest.mark.parametrize(
    ("asked", "scores"),
    [
        ({}, [0.6, 0.15]),
        ({"apply_softmax": True}, [0.8, 0.2]),
        ({"apply_softmax": True, "temperature": 0.5}, [16 / 17, 1 / 17]),
    ],
)
def test_scores(asked: dict[str, Any], scores: list[float]) -> None:
    listed = tuple(TopToken(i, "", math.log(p)) for i, p in ((7, 0.6), (9, 0.15)))
    token = TextToken(3, "x", "x", -1.0, False, listed=listed)
    results = [ChoiceResult(i, 0, "x", (token,), "length", 1) for i in range(2)]
    form = fits.parse_labels(SPAM | asked, LIMITS, None).formatter(HEAD)
    answer: Any = form.whole(results, [PROMPT, PROMPT])
    assert answer.scores == [pytest.approx(scores)] * 2
    assert (answer.object, answer.usage.total_tokens) == ("scoring", 4)


@pytest.mark.parametrize(
    ("changes", "param"),
    [
        ({"items": ["Win", [3]]}, "items[1]"),
        ({"items": []}, "items"),
        ({"query": None}, "query"),
        ({"label_token_ids": []}, "label_token_ids"),
        ({"label_token_ids": [1, 2, 3, 4, 5]}, "label_token_ids"),
        ({"temperature": 2}, "temperature"),
        ({"items": [""] * 257}, "items"),
        ({"score_extraction_token": "<e>"}, "score_extraction_token"),
    ],
)
def test_refused(changes: dict[str, Any], param: str) -> None:
    with pytest.raises(RequestError) as caught:
        fits.parse_labels(SPAM | changes, LIMITS, None)
    assert caught.value.param == param
