"""OpenAI's `/v1/completions`: request bodies and answers. Pure."""

import itertools
from collections.abc import Sequence
from typing import Literal

import msgspec
from msgspec import UNSET, UnsetType

from loraplex.router.api.openai.common import (
    OpenAIBody,
    adapter_of,
    decode_openai,
    options_of,
    sampling_of,
    with_shape,
)
from loraplex.router.api.openai.openai_formatter import (
    AnswerOptions,
    OpenAIFormatter,
    PromptLogprobs,
    TextFinish,
    Usage,
    experts_of,
    listed,
    state_of,
    stopped,
)
from loraplex.router.api.request.body import require
from loraplex.router.api.request.fields import NonNegative, Positive, prompts_of
from loraplex.router.api.request.formatter import ApiLimits, ApiRequest
from loraplex.router.api.wire import best_first, encode, finite, sse
from loraplex.router.call import (
    AnswerHead,
    ChoiceResult,
    GenerationCall,
    PromptInfo,
    TextEvent,
    TextToken,
)


class CompletionLogprobs(msgspec.Struct, frozen=True):
    """Parallel lists. text_offset: characters of the choice's text before the token."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class CompletionChoice(msgspec.Struct, frozen=True):
    """One choice of an answer. stop_reason, matched_stop: as in chats. From token_ids on: null
    unless they were asked for; of a stream, the prompt's in the first chunk.

    token_ids: generated, without an echoed prompt's. hidden_states: the state from which the last
    token was drawn, where it was asked for; of a stream, in a chunk behind the choice's end.
    routed_experts: numpy's file in base64, uint8 or uint16 `[tokens - 1, layers, top_k]`: of the
    tokens of prompt and answer but the last, where they were asked for; of a stream, with
    `finish_reason`.
    """

    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: TextFinish | None
    stop_reason: int | str | None
    matched_stop: int | str | None
    token_ids: list[int] | None
    prompt_token_ids: list[int] | None = None
    prompt_logprobs: PromptLogprobs | None | UnsetType = UNSET
    hidden_states: list[float] | UnsetType = UNSET
    routed_experts: str | UnsetType = UNSET


class Completion(msgspec.Struct, frozen=True):
    """A whole answer, or one chunk of a stream."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    system_fingerprint: str
    choices: list[CompletionChoice]
    usage: Usage | None | UnsetType = UNSET
    kv_transfer_params: None = None


class CompletionsFormatter(OpenAIFormatter):
    """Writes answers of `/v1/completions`."""

    def __init__(self, head: AnswerHead, options: AnswerOptions) -> None:
        super().__init__(head, options, "cmpl")
        self._offsets: dict[int, int] = {}

    def prompt(self, info: PromptInfo) -> bytes:
        self._prompts.append(info)
        if not (self._options.echoes_prompt or self._options.token_ids):
            return b""
        first = info.prompt_index * self._options.n
        return b"".join([self._begin(first + i, info) for i in range(self._options.n)])

    def _begin(self, index: int, info: PromptInfo) -> bytes:
        text, tokens = (info.text, info.tokens) if self._options.echoes_prompt else ("", ())
        logprobs = (
            self._logprobs(tokens, _offsets(tokens, 0)) if self._options.echoes_prompt else None
        )
        self._offsets[index] = len(text)
        ids, none = self._options.ids(info.token_ids), self._options.ids(())
        return self._chunk(CompletionChoice(index, text, logprobs, None, None, None, none, ids))

    def chunk(self, event: TextEvent) -> bytes:
        """Writes the chunk for the next piece of a choice. Raises RequestError (incomplete)."""
        tokens = event.tokens if self._options.logprobs is not None else ()
        ids = self._options.ids(event.token_ids)
        self._num_tokens += event.num_tokens
        if not (event.text or tokens or ids or event.finish or event.vector):
            return b""
        index = event.prompt_index * self._options.n + event.choice
        logprobs = None
        if self._options.logprobs is not None:
            offset = self._offsets.get(index, 0)
            self._offsets[index] = offset + sum(len(token.text) for token in tokens)
            logprobs = self._logprobs(tokens, _offsets(tokens, offset))
        choice = CompletionChoice(
            index,
            event.text,
            logprobs,
            None if event.finish is None else self._ended(event.finish),
            *stopped(event),
            ids,
            hidden_states=state_of(event),
            routed_experts=experts_of(event),
        )
        return self._chunk(choice)

    def whole(self, results: Sequence[ChoiceResult], prompts: Sequence[PromptInfo]) -> bytes:
        """Writes the whole answer at once. Raises RequestError (incomplete)."""
        choices = []
        for info in sorted(prompts, key=lambda info: info.prompt_index):
            own = [result for result in results if result.prompt_index == info.prompt_index]
            if len(own) > self._options.n:
                own = best_first(own)[: self._options.n]
            first = info.prompt_index * self._options.n
            choices += [self._choice(first + i, info, result) for i, result in enumerate(own)]
        return encode(self._completion(choices, self._usage_of(results, prompts)))

    def _choice(self, index: int, info: PromptInfo, result: ChoiceResult) -> CompletionChoice:
        before, prompt = (info.text, info.tokens) if self._options.echoes_prompt else ("", ())
        offsets = _offsets(prompt, 0) + _offsets(result.tokens, len(before))
        return CompletionChoice(
            index,
            before + result.text,
            self._logprobs((*prompt, *result.tokens), offsets),
            self._ended(result.finish),
            *stopped(result),
            self._options.ids(result.token_ids),
            self._options.ids(info.token_ids),
            self._prompt_logprobs(info),
            state_of(result),
            experts_of(result),
        )

    def _counts_alone(self, usage: Usage) -> Completion:
        return self._completion([], usage)

    def _chunk(self, choice: CompletionChoice) -> bytes:
        return sse(self._completion([choice], self._usage_so_far()))

    def _completion(
        self, choices: list[CompletionChoice], usage: Usage | None | UnsetType
    ) -> Completion:
        return Completion(
            self._id,
            "text_completion",
            self._head.created,
            self._head.model,
            self._fingerprint,
            choices,
            usage,
        )

    def _logprobs(
        self, tokens: Sequence[TextToken], offsets: list[int]
    ) -> CompletionLogprobs | None:
        most, name = self._options.logprobs, self._options.name
        if most is None:
            return None
        return CompletionLogprobs(
            tokens=[name(token.token_id, token.token) for token in tokens],
            token_logprobs=[_logprob(token) for token in tokens],
            top_logprobs=[self._top(token, most) for token in tokens],
            text_offset=offsets,
        )

    def _top(self, token: TextToken, most: int) -> dict[str, float] | None:
        """The likeliest tokens and the chosen one; of one spelling the likeliest alone."""
        if token.logprob is None:
            return None
        name = self._options.name
        top: dict[str, float] = {}
        for one in listed(token) or token.top[:most]:
            top.setdefault(name(one.token_id, one.text), finite(one.logprob))
        top.setdefault(name(token.token_id, token.token), finite(token.logprob))
        return top


def _offsets(tokens: Sequence[TextToken], begin: int) -> list[int]:
    """Finds where in the choice's text each token begins. begin: the place of the first."""
    return [*itertools.accumulate((len(token.text) for token in tokens), initial=begin)][:-1]


def _logprob(token: TextToken) -> float | None:
    return None if token.logprob is None else finite(token.logprob)


DEFAULT_MAX_TOKENS = 16


class CompletionsBody(OpenAIBody, frozen=True, kw_only=True):
    """Body of a request to `/v1/completions`. prompt: a text, a list of texts, token ids, or a list
    of lists of token ids.

    max_tokens: 0 wants the prompt alone, with `echo`. logprobs: true is 1, false is none.
    add_special_tokens: around texts; true by default.
    """

    prompt: str | list[str | NonNegative | list[NonNegative]]
    max_tokens: NonNegative | None = None
    best_of: Positive | None = None
    echo: bool | None = None
    logprobs: NonNegative | bool | None = None
    add_special_tokens: bool | None = None


def parse(body: bytes, limits: ApiLimits, bearer: str | None = None) -> ApiRequest:
    """Reads the body of a request to `/v1/completions`. Raises RequestError."""
    return request_of(decode_openai(body, CompletionsBody, limits), limits, bearer)


def request_of(request: CompletionsBody, limits: ApiLimits, bearer: str | None) -> ApiRequest:
    """Makes the call of the model that a completion asks for. Raises RequestError."""
    prompts = prompts_of(request.prompt, "prompt", limits.max_prompts)
    n = request.n or 1
    best_of = n if request.best_of is None else request.best_of
    _check_best_of(n, best_of, bool(request.stream))
    max_tokens = request.max_tokens
    if max_tokens is None and "max_tokens" not in limits.sampling_defaults:
        max_tokens = DEFAULT_MAX_TOKENS
    require(max_tokens != 0 or request.echo, "expected at least 1, or 0 with `echo`", "max_tokens")
    logprobs = request.logprobs
    if isinstance(logprobs, bool):
        logprobs = min(1, limits.max_logprobs) if logprobs else None
    sampling = sampling_of(
        request,
        limits,
        max_tokens=max_tokens,
        logprobs=logprobs,
        prompt_logprobs=_prompt_logprobs(request, logprobs),
    )
    call = GenerationCall(
        api="completions",
        prompts=prompts,
        messages=None,
        adapter=adapter_of(request, limits, bearer),
        sampling=sampling,
        max_tokens=max_tokens,
        n=n,
        best_of=best_of,
        echo=bool(request.echo),
        add_special_tokens=request.add_special_tokens is not False,
    )
    call = with_shape(call, request, limits)
    return ApiRequest(call, CompletionsFormatter, options_of(request, call))


def _prompt_logprobs(request: CompletionsBody, logprobs: int | None) -> int | None:
    """Alternatives to the prompt's tokens: asked for, or those of an echoed prompt."""
    echoed = logprobs if request.echo else None
    return max((n for n in (request.prompt_logprobs, echoed) if n is not None), default=None)


def _check_best_of(n: int, best_of: int, stream: bool) -> None:
    require(best_of >= n, f"expected at least `n`, got {best_of}", "best_of")
    require(not stream or best_of == n, "must equal `n` when streaming", "best_of")
