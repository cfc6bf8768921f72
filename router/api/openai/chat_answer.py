"""OpenAI's `/v1/chat/completions`: answers, whole and in chunks. Pure."""

from collections.abc import Sequence
from typing import Literal

import msgspec
from msgspec import UNSET, UnsetType

from loraplex.router.api.answers import encode, finite, sse
from loraplex.router.api.openai.answer import (
    AnswerOptions,
    OpenAIFinish,
    OpenAIFormatter,
    PromptLogprobs,
    Usage,
    listed,
    stopped,
)
from loraplex.router.call import (
    AnswerHead,
    ChoiceResult,
    PromptInfo,
    TextEvent,
    TextToken,
)
from loraplex.router.parts.parts import CallDelta

_BROKEN_CHARACTER = "�"


class TopLogprob(msgspec.Struct, frozen=True):
    token: str
    logprob: float
    bytes: list[int] | None


class ChatTokenLogprob(msgspec.Struct, frozen=True):
    token: str
    logprob: float
    bytes: list[int] | None
    top_logprobs: list[TopLogprob]


class ChoiceLogprobs(msgspec.Struct, frozen=True):
    content: list[ChatTokenLogprob]
    refusal: None = None


class CalledFunction(msgspec.Struct, frozen=True):
    """arguments: JSON text; in a stream the next part of it. name: in a stream at first alone."""

    arguments: str
    name: str | UnsetType = UNSET


class AnswerCall(msgspec.Struct, frozen=True):
    id: str
    function: CalledFunction
    type: Literal["function"] = "function"


class AnswerMessage(msgspec.Struct, frozen=True):
    """content: null beside calls without text. reasoning_content: the older name of `reasoning`."""

    role: Literal["assistant"]
    content: str | None
    refusal: None = None
    tool_calls: list[AnswerCall] | UnsetType = UNSET
    reasoning: str | None = None
    reasoning_content: str | None = None


class ChatChoice(msgspec.Struct, frozen=True):
    """stop_reason, matched_stop: the stop string or the token that ended it; the former is null of
    the model's own end."""

    index: int
    message: AnswerMessage
    logprobs: ChoiceLogprobs | None
    finish_reason: OpenAIFinish
    stop_reason: int | str | None
    matched_stop: int | str | None
    token_ids: list[int] | None


class ChatCompletion(msgspec.Struct, frozen=True):
    """A whole answer. From prompt_logprobs on: null unless they were asked for."""

    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    system_fingerprint: str
    choices: list[ChatChoice]
    usage: Usage
    prompt_logprobs: PromptLogprobs | None
    prompt_token_ids: list[int] | None
    kv_transfer_params: None = None


class CallPart(msgspec.Struct, frozen=True):
    """A part of the answer's call number `index`. id, type: of its first."""

    index: int
    function: CalledFunction
    id: str | UnsetType = UNSET
    type: Literal["function"] | UnsetType = UNSET


class Delta(msgspec.Struct, frozen=True):
    """reasoning_content: the older name of `reasoning`."""

    role: Literal["assistant"] | UnsetType = UNSET
    content: str | UnsetType = UNSET
    refusal: None | UnsetType = UNSET
    tool_calls: list[CallPart] | UnsetType = UNSET
    reasoning: str | None = None
    reasoning_content: str | None = None


class ChunkChoice(msgspec.Struct, frozen=True):
    """stop_reason, matched_stop: as of a whole answer's; null before the end."""

    index: int
    delta: Delta
    logprobs: ChoiceLogprobs | None = None
    finish_reason: OpenAIFinish | None = None
    stop_reason: int | str | None = None
    matched_stop: int | str | None = None
    token_ids: list[int] | None = None


class ChatChunk(msgspec.Struct, frozen=True):
    """One chunk of a stream. prompt_token_ids: in a choice's first; null unless asked for."""

    id: str
    object: Literal["chat.completion.chunk"]
    created: int
    model: str
    system_fingerprint: str
    choices: list[ChunkChoice]
    usage: Usage | None | UnsetType = UNSET
    prompt_token_ids: list[int] | None | UnsetType = UNSET


class ChatFormatter(OpenAIFormatter):
    """A Formatter."""

    def __init__(self, head: AnswerHead, options: AnswerOptions) -> None:
        super().__init__(head, options, "chatcmpl")
        self._calling: set[int] = set()
        self._reasoning: dict[int, str] = {}

    def prompt(self, info: PromptInfo) -> bytes:
        """Every choice begins with the role."""
        self._prompts.append(info)
        choices, ids = range(self._options.n), self._options.ids(info.token_ids)
        none = self._options.ids(())
        role = Delta(role="assistant", content="", refusal=None)
        chunks = [self._chunk(ChunkChoice(i, role, token_ids=none), ids) for i in choices]
        if self._options.echoed:
            echoed = Delta(content=self._options.echoed)
            chunks += [self._chunk(ChunkChoice(i, echoed, token_ids=none)) for i in choices]
        return b"".join(chunks)

    def chunk(self, event: TextEvent) -> bytes:
        """Raises RequestError (incomplete)."""
        self._num_tokens += event.num_tokens
        self._num_reasoning += event.num_reasoning
        logprobs = self._logprobs(event.tokens)
        ids, data = self._options.ids(event.token_ids), b""
        reasoning = self._reasoning_now(event)
        parts = [[_call_part(delta)] for delta in event.calls]
        if event.calls:
            self._calling.add(event.choice)
        has_text = event.text or reasoning or parts
        if has_text or ids or (logprobs is not None and logprobs.content):
            content = UNSET if has_text and not event.text else event.text
            delta = Delta(
                content=content,
                tool_calls=parts.pop(0) if parts else UNSET,
                reasoning=reasoning or None,
                reasoning_content=reasoning or None,
            )
            data = self._chunk(ChunkChoice(event.choice, delta, logprobs, token_ids=ids))
        none = self._options.ids(())
        for part in parts:  # one in a chunk: clients read the first one alone
            delta = Delta(tool_calls=part)
            data += self._chunk(ChunkChoice(event.choice, delta, token_ids=none))
        if event.finish is not None:
            reason = self._finish_reason(event.finish, event.choice in self._calling)
            end = ChunkChoice(event.choice, Delta(), None, reason, *stopped(event), none)
            data += self._chunk(end)
        return data

    def _reasoning_now(self, event: TextEvent) -> str:
        """What of the reasoning the event's chunk carries."""
        sent = self._options.reasoning
        if sent == "streamed":
            return event.reasoning
        if sent == "never":
            return ""
        kept = self._reasoning.pop(event.choice, "") + event.reasoning
        if kept and not (event.text.strip() or event.calls or event.finish):
            self._reasoning[event.choice] = kept
            return ""
        return kept

    def whole(self, results: Sequence[ChoiceResult], prompts: Sequence[PromptInfo]) -> bytes:
        """Raises RequestError (incomplete)."""
        choices = [
            ChatChoice(
                result.prompt_index * self._options.n + result.choice,
                self._message(result),
                self._logprobs(result.tokens),
                self._finish_reason(result.finish, bool(result.calls)),
                *stopped(result),
                self._options.ids(result.token_ids),
            )
            for result in results
        ]
        answer = ChatCompletion(
            self._id,
            "chat.completion",
            self._head.created,
            self._head.model,
            self._fingerprint,
            choices,
            self._usage_of(results, prompts),
            self._prompt_logprobs(prompts[0]) if len(prompts) == 1 else None,
            self._options.ids(prompts[0].token_ids) if len(prompts) == 1 else None,
        )
        return encode(answer)

    def _message(self, result: ChoiceResult) -> AnswerMessage:
        text = self._options.echoed + result.text
        hides = self._options.reasoning == "never"
        reasoning = None if hides or not result.reasoning else result.reasoning
        calls = [
            AnswerCall(call.id, CalledFunction(call.arguments, call.name)) for call in result.calls
        ]
        return AnswerMessage(
            "assistant",
            None if calls and not text else text,
            tool_calls=calls or UNSET,
            reasoning=reasoning,
            reasoning_content=reasoning,
        )

    def _counts_alone(self, usage: Usage) -> ChatChunk:
        return self._chunk_of([], usage)

    def _chunk(
        self, choice: ChunkChoice, prompt_ids: list[int] | None | UnsetType = UNSET
    ) -> bytes:
        return sse(self._chunk_of([choice], self._usage_so_far(), prompt_ids))

    def _chunk_of(
        self,
        choices: list[ChunkChoice],
        usage: Usage | None | UnsetType,
        prompt_ids: list[int] | None | UnsetType = UNSET,
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

    def _token(self, token: TextToken) -> ChatTokenLogprob:
        name = self._options.name
        return ChatTokenLogprob(
            name(token.token_id, token.token),
            finite(token.logprob),
            list(token.raw) if token.raw is not None else bytes_of(token.token),
            [
                TopLogprob(name(top.token_id, top.text), finite(top.logprob), bytes_of(top.text))
                for top in listed(token) or token.top
            ],
        )


def _call_part(delta: CallDelta) -> CallPart:
    if delta.name is None:
        return CallPart(delta.index, CalledFunction(delta.arguments))
    function = CalledFunction(delta.arguments, delta.name)
    return CallPart(delta.index, function, delta.id or UNSET, "function")


def bytes_of(text: str) -> list[int] | None:
    """null where the token is only part of a character, so that its bytes are not known here."""
    return None if _BROKEN_CHARACTER in text else list(text.encode())
