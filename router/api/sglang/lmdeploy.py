"""LMDeploy's shape of `/generate`: a body becomes SGLang's; events hold new text alone. Pure."""

from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from router.api.answers import encode, sse
from router.api.request.aliases import typed_by_aliases
from router.api.request.body import only_one_of, require
from router.api.request.fields import (
    NonNegative,
    Probability,
    RepetitionPenalty,
    StopString,
    UnitInterval,
)
from router.api.request.formatter import ApiLimits, ApiRequest
from router.api.sglang.answer import (
    AbortFinish,
    LengthFinish,
    SglangAnswer,
    SglangFormatter,
    StopFinish,
    TokenScore,
    so_far,
)
from router.api.sglang.request import SglangBody, SglangSampling, StartLen, request_of
from router.call import AnswerHead, ChoiceResult, PromptInfo, RequestError, TextEvent

SHAPES = ("prompt", "input_ids")
# They change nothing: answers keep no state.
HARMLESS = ("session_id",)


class LmdeployBody(msgspec.Struct, frozen=True, kw_only=True):
    """prompt, input_ids: one of both. logprob_start_len: of the prompt's tokens, the first with a
    logprob. lora_path: an extension, as SGLang has it."""

    prompt: Annotated[str, Meta(min_length=1)] | None = None
    input_ids: list[NonNegative] | None = None
    max_tokens: NonNegative | None = None
    stop: str | list[StopString] | None = None
    stop_token_ids: list[NonNegative] | None = None
    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    top_p: Probability | None = None
    top_k: NonNegative | None = None
    min_p: UnitInterval | None = None
    repetition_penalty: RepetitionPenalty | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    spaces_between_special_tokens: bool | None = None
    include_stop_str_in_output: bool | None = None
    stream: bool | None = None
    return_logprob: bool | None = None
    top_logprobs_num: NonNegative | None = None
    logprob_start_len: StartLen | None = None
    lora_path: str | None = None


# What SGLang calls them.
_SAMPLING = {"max_tokens": "max_new_tokens", "include_stop_str_in_output": "no_stop_trim"} | {
    name: name
    for name in LmdeployBody.__struct_fields__
    if name in SglangSampling.__struct_fields__
}
_NAMES = {"text": "prompt"} | {f"sampling_params.{own}": name for name, own in _SAMPLING.items()}
_BODY = tuple(n for n in LmdeployBody.__struct_fields__ if n in SglangBody.__struct_fields__)
Pair = tuple[float | None, int]


class LmdeployMeta(msgspec.Struct, frozen=True):
    """finish_reason: null while it goes on. Logprobs: with the token's id; null unless they were
    asked for."""

    prompt_tokens: int
    completion_tokens: int
    finish_reason: StopFinish | LengthFinish | AbortFinish | None
    output_token_logprobs: list[Pair] | None = None
    input_token_logprobs: list[Pair] | None = None
    output_top_logprobs: list[list[Pair]] | None = None
    input_top_logprobs: list[list[Pair]] | None = None


class LmdeployAnswer(msgspec.Struct, frozen=True):
    """A whole answer, or what is new. meta_info.completion_tokens: of all of it so far."""

    text: str
    output_ids: list[int]
    meta_info: LmdeployMeta


def is_native(plain: Mapping[str, Any]) -> bool:
    """Whether it is LMDeploy's shape, not SGLang's or LoRAX's."""
    said = {name for name, value in plain.items() if value is not None}
    if {"inputs", "text"} & said:
        return False
    flat = {*LmdeployBody.__struct_fields__} - {*_BODY}
    return "prompt" in said or ("input_ids" in said and bool(flat & said))


def parse(plain: dict[str, Any], limits: ApiLimits, bearer: str | None) -> ApiRequest:
    """Raises RequestError."""
    body = typed_by_aliases(plain, LmdeployBody, HARMLESS)
    only_one_of(plain, SHAPES)
    scored = body.return_logprob or not body.top_logprobs_num
    require(scored, "needs `return_logprob`", "top_logprobs_num")
    sampling = {own: getattr(body, name) for name, own in _SAMPLING.items()}
    same = {name: getattr(body, name) for name in _BODY}
    asked = SglangBody(text=body.prompt, sampling_params=SglangSampling(**sampling), **same)
    try:
        request = request_of(asked, limits, bearer)
    except RequestError as error:
        raise error.spelled(_NAMES) from None
    call = msgspec.structs.replace(request.call, api="lmdeploy")
    return ApiRequest(call, LmdeployFormatter, request.options)


class LmdeployFormatter(SglangFormatter):
    def __init__(self, head: AnswerHead, options: Any) -> None:
        super().__init__(head, options)
        self._count = 0

    def chunk(self, event: TextEvent) -> bytes:
        """Raises RequestError (incomplete)."""
        self._count += len(event.token_ids)
        answer = self._answer(event.prompt_index, event.choice, so_far(event))
        return sse(_shaped(answer, self._count))

    def whole(self, results: Sequence[ChoiceResult], prompts: Sequence[PromptInfo]) -> bytes:
        """Raises RequestError (incomplete)."""
        self._prompts = {info.prompt_index: info for info in prompts}
        answer = self._answer(0, 0, so_far(results[0]))
        return encode(_shaped(answer, len(answer.output_ids)))


def _shaped(answer: SglangAnswer, count: int) -> LmdeployAnswer:
    meta = answer.meta_info
    scores: dict[str, Any] = {
        name: [_pairs(one) for one in found] if name.endswith("top_logprobs") else _pairs(found)
        for name in LmdeployMeta.__struct_fields__[3:]
        if (found := getattr(meta, name))
    }
    shaped = LmdeployMeta(meta.prompt_tokens, count, meta.finish_reason, **scores)
    return LmdeployAnswer(answer.text, answer.output_ids, shaped)


def _pairs(scores: Sequence[TokenScore] | None) -> list[Pair]:
    return [(one.logprob, one.token_id) for one in scores or ()]
