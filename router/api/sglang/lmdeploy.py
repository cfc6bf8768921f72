"""LMDeploy's shape of `/generate`: events hold new text alone. Pure."""

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar

import msgspec
from msgspec import Meta

from loraplex.router.api.openai import completions
from loraplex.router.api.openai.common import SharedBody
from loraplex.router.api.openai.completions import CompletionsBody
from loraplex.router.api.request.body import only_one_of, require
from loraplex.router.api.request.fields import NonNegative
from loraplex.router.api.request.formatter import ApiLimits, ApiRequest
from loraplex.router.api.request.known_elsewhere import (
    Body,
    Elsewhere,
    aliases_of,
    typed_by_aliases,
)
from loraplex.router.api.sglang.generate import (
    DEFAULT_MAX_TOKENS,
    AbortFinish,
    LengthFinish,
    SglangBody,
    SglangFormatter,
    SglangOptions,
    StartLen,
    StopFinish,
    TokenScore,
    so_far,
)
from loraplex.router.api.wire import sse
from loraplex.router.call import RequestError, TextEvent

SHAPES = ("prompt", "input_ids")


class LmdeployBody(SharedBody, frozen=True, kw_only=True):
    """Body of a request in LMDeploy's shape. prompt, input_ids: one of both. logprob_start_len: of
    the prompt's tokens, the first with a logprob.
    """

    # It changes nothing: answers keep no state.
    harmless: ClassVar[frozenset[str]] = frozenset(("session_id",))

    prompt: Annotated[str, Meta(min_length=1)] | None = None
    input_ids: Annotated[list[NonNegative], Meta(extra_json_schema={"minItems": 1})] | None = None
    max_tokens: NonNegative | None = None
    return_logprob: bool | None = None
    top_logprobs_num: NonNegative | None = None
    logprob_start_len: StartLen | None = None


Pair = tuple[float | None, int]


class LmdeployMeta(msgspec.Struct, frozen=True):
    """Facts about an answer, apart from its text. finish_reason: null while it goes on. Logprobs:
    with the token's id; null unless they were asked for.
    """

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
    """Checks whether a body has LMDeploy's shape, not SGLang's or LoRAX's."""
    given = {name: value for name, value in plain.items() if value is not None}
    flat = _names(LmdeployBody) - _names(SglangBody)
    is_flat = "prompt" in given or ("input_ids" in given and bool(flat & given.keys()))
    texts = (given.get("inputs"), given.get("text"))
    return is_flat and all(map(Elsewhere().asks_for_nothing, texts))


def _names(kind: type[Body]) -> set[str]:
    """Names of a body's fields, also those without effect."""
    own = kind.__struct_fields__
    return {*own, *aliases_of(own), *kind.harmless}


def parse(plain: dict[str, Any], limits: ApiLimits, bearer: str | None) -> ApiRequest:
    """Reads a request in LMDeploy's shape. Raises RequestError."""
    body = typed_by_aliases(plain, LmdeployBody)
    field = only_one_of(plain, SHAPES)
    top = (body.top_logprobs_num or 0) if body.return_logprob else None
    require(top is not None or not body.top_logprobs_num, "needs `return_logprob`", _TOP)
    completion = CompletionsBody(
        prompt=body.prompt or list(body.input_ids or ()),
        echo=body.max_tokens == 0,
        logprobs=top,
        **{name: getattr(body, name) for name in SharedBody.__struct_fields__},
        max_tokens=DEFAULT_MAX_TOKENS if body.max_tokens is None else body.max_tokens,
    )
    try:
        call = completions.request_of(completion, limits, bearer).call
    except RequestError as error:
        raise error.spelled({"logprobs": _TOP, "prompt": field}) from None
    given = body.logprob_start_len
    start = None if top is None or given == -1 else given
    scored = msgspec.structs.replace(call.sampling, prompt_logprobs=None if start is None else top)
    call = msgspec.structs.replace(call, api="lmdeploy", sampling=scored)
    options = SglangOptions(1, False, body.request_id, top=top, prompt_from=start)
    return ApiRequest(call, LmdeployFormatter, options)


_TOP = "top_logprobs_num"


class LmdeployFormatter(SglangFormatter):
    _count = 0

    def chunk(self, event: TextEvent) -> bytes:
        """Writes the event for the next piece of the answer. Raises RequestError (incomplete)."""
        self._count += len(event.token_ids)
        return sse(self._answer(event.prompt_index, event.choice, so_far(event)))

    def _answer(self, prompt: int, choice: int, known: Any) -> Any:
        answer = super()._answer(prompt, choice, known)
        meta = answer.meta_info
        scores: dict[str, Any] = {
            name: [_pairs(one) for one in found] if name.endswith("top_logprobs") else _pairs(found)
            for name in LmdeployMeta.__struct_fields__[3:]
            if (found := getattr(meta, name))
        }
        count = self._count or meta.completion_tokens
        shaped = LmdeployMeta(meta.prompt_tokens, count, meta.finish_reason, **scores)
        return LmdeployAnswer(answer.text, answer.output_ids, shaped)


def _pairs(scores: Sequence[TokenScore] | None) -> list[Pair]:
    return [(one.logprob, one.token_id) for one in scores or ()]
