"""vLLM's `/inference/v1/generate`: token ids in, token ids and logprobs out. Pure."""

from collections.abc import Sequence
from typing import Annotated, Any, ClassVar, Literal

import msgspec
from msgspec import UNSET, Meta, UnsetType

from loraplex.router.api.openai import completions
from loraplex.router.api.openai.common import StreamOptions, whole_logprobs
from loraplex.router.api.openai.completions import CompletionsBody
from loraplex.router.api.openai.openai_formatter import (
    AnswerOptions,
    OpenAIFormatter,
    PromptLogprobs,
    Usage,
    listed,
    stopped,
)
from loraplex.router.api.request.fields import (
    CacheSalt,
    LogitBias,
    LogprobsMode,
    NonNegative,
    Penalty,
    Positive,
    Priority,
    Probability,
    RepetitionPenalty,
    RequestId,
    StopString,
    TopK,
    UnitInterval,
)
from loraplex.router.api.request.formatter import ApiLimits, ApiRequest
from loraplex.router.api.request.known_elsewhere import (
    Body,
    Elsewhere,
    check_refused,
    check_unknown,
    check_unknown_parts,
    typed_by_aliases,
)
from loraplex.router.api.request.shapes import StructuredOutputs
from loraplex.router.api.routed_experts import as_npy
from loraplex.router.api.wire import encode, finite, sse
from loraplex.router.call import (
    AnswerHead,
    ChoiceResult,
    PromptInfo,
    RequestError,
    TextEvent,
    TextToken,
    TopToken,
)


class TokensSampling(msgspec.Struct, frozen=True, kw_only=True):
    """vLLM's `sampling_params`. Each may be null; then its default changes nothing, whatever the
    model's files advise. max_tokens: all that fits by default.
    """

    n: Positive | None = None
    temperature: Annotated[float, Meta(ge=0, le=1e4)] | None = None
    top_p: Probability | None = None
    top_k: TopK | None = None
    min_p: UnitInterval | None = None
    frequency_penalty: Penalty | None = None
    presence_penalty: Penalty | None = None
    repetition_penalty: RepetitionPenalty | None = None
    logit_bias: LogitBias | None = None
    seed: Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)] | None = None
    stop: str | list[StopString] | None = None
    stop_token_ids: list[NonNegative] | None = None
    ignore_eos: bool | None = None
    max_tokens: Positive | None = None
    min_tokens: NonNegative | None = None
    logprobs: NonNegative | None = None
    prompt_logprobs: NonNegative | None = None
    logprob_token_ids: list[NonNegative] | None = None
    allowed_token_ids: list[NonNegative] | None = None
    bad_words: list[StopString] | None = None
    structured_outputs: StructuredOutputs | None = None


# Of no effect: how texts are made of tokens, and how vLLM's engine hands answers over.
VOID = ("detokenize", "skip_special_tokens", "spaces_between_special_tokens", "output_kind") + (
    *("include_stop_str_in_output", "skip_clone", "output_text_buffer_length", "flat_logprobs"),
)
_NEUTRAL: dict[str, Any] = {
    **dict.fromkeys(("temperature", "top_p", "repetition_penalty"), 1.0),
    **dict.fromkeys(("top_k", "min_p", "min_tokens"), 0),
}


class TokensBody(Body, frozen=True, kw_only=True):
    """Body of a request. token_ids: the prompt. model: as on OpenAI's routes."""

    refused: ClassVar[dict[str, Elsewhere]] = {
        **dict.fromkeys(("features", "content_parts"), Elsewhere(hint="text alone is read")),
        "output_mode": Elsewhere(("tokens",), "`/v1/completions` answers with texts"),
    }
    harmless: ClassVar[frozenset[str]] = frozenset(("token_offsets", "parse_context"))

    token_ids: Annotated[list[NonNegative], Meta(min_length=1)]
    sampling_params: TokensSampling
    model: str | None = None
    request_id: RequestId | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    cache_salt: CacheSalt | None = None
    priority: Priority | None = None
    return_token_ids: bool | None = None
    return_routed_experts: bool | None = None
    logprobs_mode: LogprobsMode | None = None


def parse(plain: dict[str, Any], limits: ApiLimits, bearer: str | None) -> ApiRequest:
    """Reads a request whose JSON is decoded already. Raises RequestError."""
    check_refused(plain, TokensBody.refused)
    plain = {name: value for name, value in plain.items() if name not in TokensBody.refused}
    given = plain.get("sampling_params")
    try:
        if isinstance(given, dict):
            check_unknown(given, TokensSampling.__struct_fields__, VOID)
            plain["sampling_params"] = whole_logprobs(given, limits)
    except RequestError as error:
        raise error.spelled(dict.fromkeys([error.param or ""], _within(error.param))) from None
    body = typed_by_aliases(plain, TokensBody)
    options = plain.get("stream_options") or {}
    check_unknown_parts(options, StreamOptions.__struct_fields__, "stream_options.")
    said = body.sampling_params
    try:
        asked = completions.request_of(_completion(body, said), limits, bearer)
    except RequestError as error:
        raise error.spelled(_NAMES) from None
    own = {"api": "tokens", "max_tokens": said.max_tokens, "lists_all": True}
    call = msgspec.structs.replace(asked.call, **own)
    return ApiRequest(call, TokensFormatter, asked.options)


def _within(name: str | None) -> str:
    return f"sampling_params.{name}"


_NAMES = {name: _within(name) for name in TokensSampling.__struct_fields__} | {
    "prompt": "token_ids"
}


def _completion(body: TokensBody, said: TokensSampling) -> CompletionsBody:
    fields = {name: getattr(said, name) for name in said.__struct_fields__}
    drawn = {name: _NEUTRAL.get(name) if value is None else value for name, value in fields.items()}
    own = {name: getattr(body, name) for name in _SAME}
    return CompletionsBody(prompt=list(body.token_ids), **drawn, **own)


_SAME = ("model", "request_id", "stream", "stream_options", "cache_salt", "priority") + (
    *("return_token_ids", "return_routed_experts", "logprobs_mode"),
)


class TokenScored(msgspec.Struct, frozen=True):
    """A token and its log-probability. token: `token_id:ID`, as earlier versions of vLLM name
    tokens. rank: not counted.
    """

    token_id: int
    token: str
    logprob: float
    rank: int | None = None
    bytes: list[int] | None = None


class PlaceScored(TokenScored, frozen=True):
    """A generated token. top_logprobs: the token itself, then the likeliest others."""

    top_logprobs: list[TokenScored] = []


class TokensLogprobs(msgspec.Struct, frozen=True):
    """Log-probabilities of a choice: one entry for each of its ids."""

    content: list[PlaceScored]


class TokensChoice(msgspec.Struct, frozen=True):
    """One choice of an answer, or what is new of the choice. token_ids: the token that ended it
    included. stop_reason: the stop string or token of the caller's; null of the model's own end.
    routed_experts: as of a completion's choice; null unless they were asked for.
    """

    index: int
    token_ids: list[int]
    finish_reason: Literal["stop", "length", "abort"] | None
    stop_reason: int | str | None
    logprobs: TokensLogprobs | None
    routed_experts: str | None = None


class TokensAnswer(msgspec.Struct, frozen=True):
    """A whole answer, or one chunk of a stream. prompt_token_ids: where they are asked for."""

    request_id: str
    created: int
    model: str
    choices: list[TokensChoice]
    usage: Usage | None | UnsetType = UNSET
    prompt_logprobs: PromptLogprobs | None = None
    prompt_token_ids: list[int] | None = None
    output_mode: Literal["tokens"] = "tokens"
    kv_transfer_params: None = None


class TokensFormatter(OpenAIFormatter):
    """Writes answers of `/inference/v1/generate`."""

    def __init__(self, head: AnswerHead, options: AnswerOptions) -> None:
        super().__init__(head, options, "generate-tokens")
        self._first = True

    def prompt(self, info: PromptInfo) -> bytes:
        self._prompts.append(info)
        return b""

    def chunk(self, event: TextEvent) -> bytes:
        """Writes the chunk for the next tokens of a choice. Raises RequestError (incomplete)."""
        self._num_tokens += event.num_tokens
        if not (event.token_ids or event.finish):
            return b""
        info = self._prompts[0] if self._first else None
        self._first = False
        return sse(self._answer([self._choice(event)], self._usage_so_far(), info))

    def whole(self, results: Sequence[ChoiceResult], prompts: Sequence[PromptInfo]) -> bytes:
        """Writes the whole answer at once. Raises RequestError (incomplete)."""
        (info,) = prompts
        choices = [self._choice(result) for result in results]
        answer = self._answer(choices, self._usage_of(results, prompts), info)
        scores = self._prompt_logprobs(info)
        return encode(msgspec.structs.replace(answer, prompt_logprobs=scores))

    def _counts_alone(self, usage: Usage) -> TokensAnswer:
        return self._answer([], usage, None)

    def _answer(
        self, choices: list[TokensChoice], usage: Usage | None | UnsetType, info: PromptInfo | None
    ) -> TokensAnswer:
        head = self._head
        ids = None if info is None else self._options.ids(info.token_ids)
        return TokensAnswer(
            self._id, head.created, head.model, choices, usage, prompt_token_ids=ids
        )

    def _choice(self, said: ChoiceResult | TextEvent) -> TokensChoice:
        finish = None if said.finish is None else self._ended(said.finish)
        stop, _ = stopped(said)
        experts = None if said.routed is None else as_npy(said.routed)
        logprobs = self._logprobs(said.tokens)
        return TokensChoice(said.choice, list(said.token_ids), finish, stop, logprobs, experts)

    def _logprobs(self, tokens: Sequence[TextToken]) -> TokensLogprobs | None:
        most = self._options.logprobs
        return None if most is None else TokensLogprobs([_place(token, most) for token in tokens])


def _place(token: TextToken, most: int) -> PlaceScored:
    own = TopToken(token.token_id, token.token, finite(token.logprob))
    likeliest = [one for one in token.top[:most] if one.token_id != token.token_id]
    top = listed(token) or [own, *likeliest]
    scored = _scored(own)
    return PlaceScored(
        scored.token_id, scored.token, scored.logprob, None, None, [*map(_scored, top)]
    )


def _scored(one: TopToken) -> TokenScored:
    return TokenScored(one.token_id, f"token_id:{one.token_id}", finite(one.logprob))
