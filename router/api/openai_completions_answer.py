"""OpenAI's `/v1/completions`: answers, whole and in chunks. Pure."""

import itertools
from collections.abc import Sequence
from typing import Literal

import msgspec
from msgspec import UNSET, UnsetType

from router.api.answers import best_first, encode, finite, sse, sse_error
from router.api.openai_answer import (
    OpenAIFinish,
    Usage,
    UsageIn,
    fingerprint,
    finish_reason,
    usage_of,
    usage_so_far,
)
from router.generation import (
    AnswerHead,
    ChoiceResult,
    FinishReason,
    PromptInfo,
    RequestError,
    TextEvent,
    TextToken,
)


class CompletionsOptions(msgspec.Struct, frozen=True):
    """How a request wants its answer."""

    n: int
    echo: bool
    logprobs: bool
    usage: UsageIn


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
