"""OpenAI's `/v1/chat/completions`: answers, whole and in chunks. Pure."""

from collections.abc import Sequence
from typing import Literal

import msgspec
from msgspec import UNSET, UnsetType

from router.api.answers import encode, finite, sse
from router.api.openai_answer import (
    AnswerOptions,
    OpenAIFinish,
    OpenAIFormatter,
    PromptLogprobs,
    Usage,
    finish_reason,
    usage_of,
)
from router.generation import AnswerHead, ChoiceResult, PromptInfo, TextEvent, TextToken

_BROKEN_CHARACTER = "�"


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
    token_ids: list[int] | UnsetType = UNSET


class ChatCompletion(msgspec.Struct, frozen=True):
    """A whole answer. From prompt_logprobs on: where they were asked for."""

    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    system_fingerprint: str
    choices: list[ChatChoice]
    usage: Usage
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET


class Delta(msgspec.Struct, frozen=True):
    role: Literal["assistant"] | UnsetType = UNSET
    content: str | UnsetType = UNSET
    refusal: None | UnsetType = UNSET


class ChunkChoice(msgspec.Struct, frozen=True):
    index: int
    delta: Delta
    logprobs: ChoiceLogprobs | None = None
    finish_reason: OpenAIFinish | None = None
    token_ids: list[int] | UnsetType = UNSET


class ChatChunk(msgspec.Struct, frozen=True):
    """One chunk of a stream. prompt_token_ids: in a choice's first, where they were asked for."""

    id: str
    object: Literal["chat.completion.chunk"]
    created: int
    model: str
    system_fingerprint: str
    choices: list[ChunkChoice]
    usage: Usage | None | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET


class ChatFormatter(OpenAIFormatter):
    """A Formatter. echoed: what stands before each answer's text."""

    def __init__(self, head: AnswerHead, options: AnswerOptions, echoed: str = "") -> None:
        super().__init__(head, options, "chatcmpl")
        self._echoed = echoed

    def prompt(self, info: PromptInfo) -> bytes:
        """Every choice begins with the role."""
        self._prompts.append(info)
        choices, ids = range(self._options.n), self._options.ids(info.token_ids)
        none = self._options.ids(())
        role = Delta(role="assistant", content="", refusal=None)
        chunks = [self._chunk(ChunkChoice(i, role, token_ids=none), ids) for i in choices]
        if self._echoed:
            echoed = Delta(content=self._echoed)
            chunks += [self._chunk(ChunkChoice(i, echoed, token_ids=none)) for i in choices]
        return b"".join(chunks)

    def chunk(self, event: TextEvent) -> bytes:
        """Raises RequestError (incomplete)."""
        self._num_tokens += event.num_tokens
        logprobs = self._logprobs(event.tokens)
        ids, data = self._options.ids(event.token_ids), b""
        if event.text or ids or (logprobs is not None and logprobs.content):
            delta = Delta(content=event.text)
            data = self._chunk(ChunkChoice(event.choice, delta, logprobs, token_ids=ids))
        if event.finish is not None:
            reason, none = finish_reason(event.finish), self._options.ids(())
            data += self._chunk(ChunkChoice(event.choice, Delta(), None, reason, none))
        return data

    def whole(self, results: Sequence[ChoiceResult], prompts: Sequence[PromptInfo]) -> bytes:
        """Raises RequestError (incomplete)."""
        choices = [
            ChatChoice(
                result.choice,
                AnswerMessage("assistant", self._echoed + result.text),
                self._logprobs(result.tokens),
                finish_reason(result.finish),
                self._options.ids(result.token_ids),
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
            self._prompt_logprobs(prompts[0]),
            self._options.ids(prompts[0].token_ids),
        )
        return encode(answer)

    def _counts_alone(self, usage: Usage) -> ChatChunk:
        return self._chunk_of([], usage)

    def _chunk(self, choice: ChunkChoice, prompt_ids: list[int] | UnsetType = UNSET) -> bytes:
        return sse(self._chunk_of([choice], self._usage_so_far(), prompt_ids))

    def _chunk_of(
        self,
        choices: list[ChunkChoice],
        usage: Usage | None | UnsetType,
        prompt_ids: list[int] | UnsetType = UNSET,
    ) -> ChatChunk:
        return ChatChunk(
            self._id,
            "chat.completion.chunk",
            self._head.created,
            self._head.model,
            self._fingerprint,
            choices,
            usage,
            prompt_ids,
        )

    def _logprobs(self, tokens: Sequence[TextToken]) -> ChoiceLogprobs | None:
        if self._options.logprobs is None:
            return None
        # Those that are part of the message: special ones are where they are written.
        every = self._options.tokens_as_ids
        return ChoiceLogprobs([self._token(t) for t in tokens if every or not t.special or t.text])

    def _token(self, token: TextToken) -> TokenLogprob:
        name = self._options.name
        return TokenLogprob(
            name(token.token_id, token.token),
            finite(token.logprob),
            list(token.raw) if token.raw is not None else _bytes(token.token),
            [
                TopLogprob(name(token_id, text), finite(value), _bytes(text))
                for token_id, text, value in token.top
            ],
        )


def _bytes(text: str) -> list[int] | None:
    """null where the token is only part of a character, so that its bytes are not known here."""
    return None if _BROKEN_CHARACTER in text else list(text.encode())
