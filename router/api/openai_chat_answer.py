"""OpenAI's `/v1/chat/completions`: answers, whole and in chunks. Pure."""

from collections.abc import Sequence
from typing import Literal

import msgspec
from msgspec import UNSET, UnsetType

from router.api.answers import encode, finite, sse, sse_error
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
    PromptInfo,
    RequestError,
    TextEvent,
    TextToken,
)

_BROKEN_CHARACTER = "�"


class ChatOptions(msgspec.Struct, frozen=True):
    """How a request wants its answer."""

    n: int
    logprobs: bool
    usage: UsageIn


class TopLogprob(msgspec.Struct, frozen=True):
    token: str
    logprob: float
    bytes: list[int] | None


class TokenLogprob(msgspec.Struct, frozen=True):
    token: str
    logprob: float
    bytes: list[int] | None
    top_logprobs: list[TopLogprob]


class ChoiceLogprobs(msgspec.Struct, frozen=True):
    content: list[TokenLogprob]
    refusal: None = None


class AnswerMessage(msgspec.Struct, frozen=True):
    role: Literal["assistant"]
    content: str
    refusal: None = None


class ChatChoice(msgspec.Struct, frozen=True):
    index: int
    message: AnswerMessage
    logprobs: ChoiceLogprobs | None
    finish_reason: OpenAIFinish


class ChatCompletion(msgspec.Struct, frozen=True):
    """A whole answer."""

    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    system_fingerprint: str
    choices: list[ChatChoice]
    usage: Usage


class Delta(msgspec.Struct, frozen=True):
    role: Literal["assistant"] | UnsetType = UNSET
    content: str | UnsetType = UNSET
    refusal: None | UnsetType = UNSET


class ChunkChoice(msgspec.Struct, frozen=True):
    index: int
    delta: Delta
    logprobs: ChoiceLogprobs | None = None
    finish_reason: OpenAIFinish | None = None


class ChatChunk(msgspec.Struct, frozen=True):
    """One chunk of a stream."""

    id: str
    object: Literal["chat.completion.chunk"]
    created: int
    model: str
    system_fingerprint: str
    choices: list[ChunkChoice]
    usage: Usage | None | UnsetType = UNSET


class ChatFormatter:
    """A Formatter."""

    def __init__(self, head: AnswerHead, options: ChatOptions) -> None:
        self._head = head
        self._options = options
        self._id = f"chatcmpl-{head.request_id}"
        self._fingerprint = fingerprint(head)
        self._prompts: list[PromptInfo] = []
        self._num_tokens = 0

    def prompt(self, info: PromptInfo) -> bytes:
        """Every choice begins with the role."""
        self._prompts.append(info)
        delta = Delta(role="assistant", content="", refusal=None)
        return b"".join([self._chunk(ChunkChoice(i, delta)) for i in range(self._options.n)])

    def chunk(self, event: TextEvent) -> bytes:
        """Raises RequestError (incomplete)."""
        self._num_tokens += event.num_tokens
        logprobs = _logprobs(event.tokens) if self._options.logprobs else None
        data = b""
        if event.text or (logprobs is not None and logprobs.content):
            delta = Delta(content=event.text)
            data = self._chunk(ChunkChoice(event.choice, delta, logprobs))
        if event.finish is not None:
            reason = finish_reason(event.finish)
            data += self._chunk(ChunkChoice(event.choice, Delta(), None, reason))
        return data

    def end(self) -> bytes:
        done = b"data: [DONE]\n\n"
        if self._options.usage == "none":
            return done
        usage = usage_of(self._prompts, self._num_tokens)
        return sse(self._chunk_of([], usage)) + done

    def error(self, error: RequestError) -> bytes:
        return sse_error(error, "openai")

    def whole(self, results: Sequence[ChoiceResult], prompts: Sequence[PromptInfo]) -> bytes:
        """Raises RequestError (incomplete)."""
        choices = [
            ChatChoice(
                result.choice,
                AnswerMessage("assistant", result.text),
                _logprobs(result.tokens) if self._options.logprobs else None,
                finish_reason(result.finish),
            )
            for result in results
        ]
        num_tokens = sum(result.generated_tokens for result in results)
        answer = ChatCompletion(
            self._id,
            "chat.completion",
            self._head.created,
            self._head.model,
            self._fingerprint,
            choices,
            usage_of(prompts, num_tokens),
        )
        return encode(answer)

    def _chunk(self, choice: ChunkChoice) -> bytes:
        usage = usage_so_far(self._options.usage, self._prompts, self._num_tokens)
        return sse(self._chunk_of([choice], usage))

    def _chunk_of(self, choices: list[ChunkChoice], usage: Usage | None | UnsetType) -> ChatChunk:
        return ChatChunk(
            self._id,
            "chat.completion.chunk",
            self._head.created,
            self._head.model,
            self._fingerprint,
            choices,
            usage,
        )


def _logprobs(tokens: Sequence[TextToken]) -> ChoiceLogprobs:
    """Of the tokens that are part of the message: special ones are where they are written."""
    return ChoiceLogprobs(
        [
            TokenLogprob(
                token.token,
                finite(token.logprob),
                list(token.raw) if token.raw is not None else _bytes(token.token),
                [TopLogprob(text, finite(value), _bytes(text)) for _, text, value in token.top],
            )
            for token in tokens
            if not token.special or token.text
        ]
    )


def _bytes(text: str) -> list[int] | None:
    """null where the token is only part of a character, so that its bytes are not known here."""
    return None if _BROKEN_CHARACTER in text else list(text.encode())
