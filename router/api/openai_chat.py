"""OpenAI's `/v1/chat/completions`: request bodies and answers. Pure."""

from collections.abc import Sequence
from typing import Any, Literal

import msgspec
from msgspec import UNSET, UnsetType

from router.api.answers import encode, finite, sse, sse_error
from router.api.body import require
from router.api.chat_messages import Message, to_template
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
    GenerationCall,
    PromptInfo,
    RequestError,
    TextEvent,
    TextToken,
)

_UNSUPPORTED = (
    *("tools", "tool_choice", "functions", "function_call", "response_format", "modalities"),
    *("audio", "web_search_options", "reasoning_effort", "verbosity", "best_of", "suffix"),
)
_BROKEN_CHARACTER = "�"


class ChatBody(OpenAIBody, frozen=True, kw_only=True):
    """max_completion_tokens: max_tokens under its newer name; without both, all that fits.

    chat_template_kwargs: further variables of the chat template. add_special_tokens: around the
    rendered text, for a template that does not write them.
    """

    messages: list[Message]
    max_tokens: Positive | None = None
    max_completion_tokens: Positive | None = None
    logprobs: bool | None = None
    top_logprobs: NonNegative | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_special_tokens: bool | None = None


class ChatOptions(msgspec.Struct, frozen=True):
    """How a request wants its answer."""

    n: int
    logprobs: bool
    usage: UsageIn


class ChatRequest(msgspec.Struct, frozen=True):
    """A parsed body; an ApiRequest."""

    call: GenerationCall
    options: ChatOptions

    def formatter(self, head: AnswerHead) -> "ChatFormatter":
        return ChatFormatter(head, self.options)


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


def parse(body: bytes, limits: ApiLimits, bearer: str | None = None) -> ChatRequest:
    """Raises RequestError."""
    request = decode_openai(body, ChatBody, _UNSUPPORTED)
    require(request.messages, "expected at least one message", "messages")
    require(
        len(request.messages) <= limits.max_messages,
        f"expected at most {limits.max_messages} messages, got {len(request.messages)}",
        "messages",
    )
    n = request.n or 1
    require(n <= limits.max_n, f"expected at most {limits.max_n}, got {n}", "n")
    max_tokens = _max_tokens(request)
    sampling = sampling_of(
        request, limits, max_tokens=max_tokens, logprobs=_logprobs_asked(request, limits)
    )
    call = GenerationCall(
        api="chat",
        prompts=(),
        messages=to_template(request.messages),
        adapter=adapter_of(request, limits, bearer),
        sampling=sampling,
        max_tokens=max_tokens,
        n=n,
        best_of=n,
        stop=stops_of(request, limits),
        include_stop=False,
        echo=False,
        stream=bool(request.stream),
        seed=seed_of(request),
        add_special_tokens=bool(request.add_special_tokens),
        user=request.user,
        template_vars=request.chat_template_kwargs or {},
    )
    options = ChatOptions(n, sampling.logprobs is not None, usage_wanted(request))
    return ChatRequest(call, options)


def _max_tokens(request: ChatBody) -> int | None:
    old, new = request.max_tokens, request.max_completion_tokens
    require(
        old is None or new is None or old == new,
        "contradicts `max_tokens`",
        "max_completion_tokens",
    )
    return old if new is None else new


def _logprobs_asked(request: ChatBody, limits: ApiLimits) -> int | None:
    top = request.top_logprobs
    require(top is None or request.logprobs, "needs `logprobs` to be true", "top_logprobs")
    most = limits.max_logprobs
    require((top or 0) <= most, f"expected at most {most}, got {top}", "top_logprobs")
    return (top or 0) if request.logprobs else None


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
    """Of the tokens that are part of the message: special ones are not."""
    return ChoiceLogprobs(
        [
            TokenLogprob(
                token.token,
                finite(token.logprob),
                list(token.raw) if token.raw is not None else _bytes(token.token),
                [TopLogprob(text, finite(value), _bytes(text)) for _, text, value in token.top],
            )
            for token in tokens
            if not token.special
        ]
    )


def _bytes(text: str) -> list[int] | None:
    """null where the token is only part of a character, so that its bytes are not known here."""
    return None if _BROKEN_CHARACTER in text else list(text.encode())
