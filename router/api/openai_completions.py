"""OpenAI's `/v1/completions`: request bodies and answers. Pure."""

import itertools
from collections.abc import Sequence
from typing import Literal

import msgspec
from msgspec import UNSET, UnsetType

from router.api.answers import best_first, encode, finite, sse, sse_error
from router.api.body import require
from router.api.fields import NonNegative, Positive
from router.api.formatter import ApiLimits
from router.api.openai_common import (
    OpenAIBody,
    OpenAIFinish,
    Usage,
    UsageIn,
    adapter_of,
    decode_openai,
    fingerprint,
    finish_reason,
    sampling_of,
    seed_of,
    stops_of,
    usage_of,
    usage_so_far,
    usage_wanted,
)
from router.generation import (
    AnswerHead,
    ChoiceResult,
    FinishReason,
    GenerationCall,
    PromptInfo,
    RequestError,
    TextEvent,
    TextToken,
)

DEFAULT_MAX_TOKENS = 16
_UNSUPPORTED = ("suffix", "response_format", "tools", "tool_choice")


class CompletionsBody(OpenAIBody, frozen=True, kw_only=True):
    """prompt: a text, a list of texts, token ids, or a list of lists of token ids.

    max_tokens: 0 wants the prompt alone, with `echo`. add_special_tokens: around texts; true unless
    told otherwise.
    """

    prompt: str | list[str | NonNegative | list[NonNegative]]
    max_tokens: NonNegative | None = None
    best_of: Positive | None = None
    echo: bool | None = None
    logprobs: NonNegative | None = None
    add_special_tokens: bool | None = None


class CompletionsOptions(msgspec.Struct, frozen=True):
    """How a request wants its answer."""

    n: int
    echo: bool
    logprobs: bool
    usage: UsageIn


class CompletionsRequest(msgspec.Struct, frozen=True):
    """A parsed body; an ApiRequest."""

    call: GenerationCall
    options: CompletionsOptions

    def formatter(self, head: AnswerHead) -> "CompletionsFormatter":
        return CompletionsFormatter(head, self.options)


class Logprobs(msgspec.Struct, frozen=True):
    """Parallel lists. text_offset: characters of the choice's text before the token."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class CompletionChoice(msgspec.Struct, frozen=True):
    index: int
    text: str
    logprobs: Logprobs | None
    finish_reason: OpenAIFinish | None


class Completion(msgspec.Struct, frozen=True):
    """A whole answer, or one chunk of a stream."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    system_fingerprint: str
    choices: list[CompletionChoice]
    usage: Usage | None | UnsetType = UNSET


def parse(body: bytes, limits: ApiLimits, bearer: str | None = None) -> CompletionsRequest:
    """Raises RequestError."""
    request = decode_openai(body, CompletionsBody, _UNSUPPORTED)
    prompts = _prompts(request.prompt, limits)
    n = request.n or 1
    best_of = n if request.best_of is None else request.best_of
    _check_counts(n, best_of, bool(request.stream), limits)
    max_tokens = DEFAULT_MAX_TOKENS if request.max_tokens is None else request.max_tokens
    require(max_tokens or request.echo, "expected at least 1, or 0 with `echo`", "max_tokens")
    sampling = sampling_of(
        request,
        limits,
        max_tokens=max_tokens,
        logprobs=request.logprobs,
        prompt_logprobs=request.logprobs if request.echo else None,
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
        stop=stops_of(request, limits),
        include_stop=False,
        echo=bool(request.echo),
        stream=bool(request.stream),
        seed=seed_of(request),
        add_special_tokens=request.add_special_tokens is not False,
        user=request.user,
    )
    options = CompletionsOptions(
        n,
        call.echo,
        request.logprobs is not None,
        usage=usage_wanted(request),
    )
    return CompletionsRequest(call, options)


def _check_counts(n: int, best_of: int, stream: bool, limits: ApiLimits) -> None:
    most = limits.max_n
    require(n <= most, f"expected at most {most}, got {n}", "n")
    require(best_of <= most, f"expected at most {most}, got {best_of}", "best_of")
    require(best_of >= n, f"expected at least `n`, got {best_of}", "best_of")
    require(not stream or best_of == n, "must equal `n` when streaming", "best_of")


def _prompts(
    prompt: str | list[str | int | list[int]], limits: ApiLimits
) -> tuple[str | list[int], ...]:
    """One kind only: texts, lists of ids, or the ids of a single prompt. Raises RequestError."""
    if isinstance(prompt, str):
        return (prompt,)
    require(prompt, "expected at least one prompt", "prompt")
    ids = [item for item in prompt if isinstance(item, int)]
    if ids:
        require(len(ids) == len(prompt), "expected token ids only, or none", "prompt")
        return (ids,)
    require(
        len(prompt) <= limits.max_prompts,
        f"expected at most {limits.max_prompts} prompts, got {len(prompt)}",
        "prompt",
    )
    several = tuple(item for item in prompt if not isinstance(item, int))
    texts = sum(isinstance(item, str) for item in several)
    require(texts in (0, len(several)), "expected texts only, or lists of token ids only", "prompt")
    require(all(item or item == "" for item in several), "expected no empty list", "prompt")
    return several


class CompletionsFormatter:
    """A Formatter."""

    def __init__(self, head: AnswerHead, options: CompletionsOptions) -> None:
        self._head = head
        self._options = options
        self._id = f"cmpl-{head.request_id}"
        self._fingerprint = fingerprint(head)
        self._prompts: list[PromptInfo] = []
        self._num_tokens = 0
        self._offsets: dict[int, int] = {}

    def prompt(self, info: PromptInfo) -> bytes:
        self._prompts.append(info)
        if not self._options.echo:
            return b""
        indexes = range(
            info.prompt_index * self._options.n, (info.prompt_index + 1) * self._options.n
        )
        chunks = [self._chunk(index, info.text, info.tokens, None) for index in indexes]
        self._offsets |= dict.fromkeys(indexes, len(info.text))
        return b"".join(chunks)

    def chunk(self, event: TextEvent) -> bytes:
        """Raises RequestError (incomplete)."""
        text, tokens = event.text, event.tokens if self._options.logprobs else ()
        self._num_tokens += event.num_tokens
        if not (text or tokens or event.finish):
            return b""
        index = event.prompt_index * self._options.n + event.choice
        return self._chunk(index, text, tokens, event.finish)

    def end(self) -> bytes:
        done = b"data: [DONE]\n\n"
        if self._options.usage == "none":
            return done
        usage = usage_of(self._prompts, self._num_tokens)
        return sse(self._completion([], usage)) + done

    def error(self, error: RequestError) -> bytes:
        return sse_error(error, "openai")

    def whole(self, results: Sequence[ChoiceResult], prompts: Sequence[PromptInfo]) -> bytes:
        """Raises RequestError (incomplete)."""
        choices = []
        for info in sorted(prompts, key=lambda info: info.prompt_index):
            own = [result for result in results if result.prompt_index == info.prompt_index]
            if len(own) > self._options.n:
                own = best_first(own)[: self._options.n]
            first = info.prompt_index * self._options.n
            choices += [self._choice(first + i, info, result) for i, result in enumerate(own)]
        num_tokens = sum(result.generated_tokens for result in results)
        return encode(self._completion(choices, usage_of(prompts, num_tokens)))

    def _choice(self, index: int, info: PromptInfo, result: ChoiceResult) -> CompletionChoice:
        before, prompt = (info.text, info.tokens) if self._options.echo else ("", ())
        text, tokens = before + result.text, (*prompt, *result.tokens)
        offsets = _offsets(prompt, 0) + _offsets(result.tokens, len(before))
        logprobs = _logprobs(tokens, offsets) if self._options.logprobs else None
        return CompletionChoice(index, text, logprobs, finish_reason(result.finish))

    def _chunk(
        self,
        index: int,
        text: str,
        tokens: Sequence[TextToken],
        finish: FinishReason | None,
    ) -> bytes:
        logprobs = None
        if self._options.logprobs:
            offset = self._offsets.get(index, 0)
            logprobs = _logprobs(tokens, _offsets(tokens, offset))
            self._offsets[index] = offset + sum(len(token.text) for token in tokens)
        reason = None if finish is None else finish_reason(finish)
        choice = CompletionChoice(index, text, logprobs, reason)
        usage = usage_so_far(self._options.usage, self._prompts, self._num_tokens)
        return sse(self._completion([choice], usage))

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


def _offsets(tokens: Sequence[TextToken], begin: int) -> list[int]:
    """Where in the choice's text each token begins. begin: the first."""
    return [*itertools.accumulate((len(token.text) for token in tokens), initial=begin)][:-1]


def _logprobs(tokens: Sequence[TextToken], offsets: list[int]) -> Logprobs:
    return Logprobs(
        tokens=[token.token for token in tokens],
        token_logprobs=[_logprob(token) for token in tokens],
        top_logprobs=[_top(token) for token in tokens],
        text_offset=offsets,
    )


def _logprob(token: TextToken) -> float | None:
    return None if token.logprob is None else finite(token.logprob)


def _top(token: TextToken) -> dict[str, float] | None:
    """The most likely tokens and the chosen one; of several with one spelling the likeliest."""
    if token.logprob is None:
        return None
    top: dict[str, float] = {}
    for _, text, value in token.top:
        top.setdefault(text, finite(value))
    top.setdefault(token.token, finite(token.logprob))
    return top
