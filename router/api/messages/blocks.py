"""Anthropic's `/v1/messages`: answers of blocks, whole and in events. Pure."""

from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import msgspec

from loraplex.adapters.common.strict_json import StrictJsonError, decode_object
from loraplex.router.api.errors import error_object
from loraplex.router.api.part_stream import PartKind, PartStatus, PartStream
from loraplex.router.api.wire import completed, encode, named_sse
from loraplex.router.call import (
    AnswerHead,
    ChoiceResult,
    FinishReason,
    PromptInfo,
    RequestError,
    TextEvent,
)
from loraplex.router.parts.parts import CallDelta

StopReason = Literal["end_turn", "max_tokens", "stop_sequence", "tool_use"]


class TextBlock(msgspec.Struct, frozen=True, tag_field="type", tag="text"):
    text: str


class ThinkingBlock(msgspec.Struct, frozen=True, tag_field="type", tag="thinking"):
    """Block of an answer with the model's reasoning. signature: empty; reasoning goes back
    unsigned.
    """

    thinking: str
    signature: Literal[""] = ""


class ToolUseBlock(msgspec.Struct, frozen=True, tag_field="type", tag="tool_use"):
    """Block of an answer with the call of a tool. input: empty in a stream, where it follows as
    JSON text, and where it broke off.
    """

    id: str
    name: str
    input: dict[str, Any] = {}


Block = TextBlock | ThinkingBlock | ToolUseBlock


class ThinkingTokens(msgspec.Struct, frozen=True):
    """Count of the tokens of the reasoning. thinking_tokens: the markers' own included."""

    thinking_tokens: int


class MessageUsage(msgspec.Struct, frozen=True):
    """Counts of the tokens of a message. input_tokens: of the prompt, those that the KV cache saved
    not included. cache_creation_input_tokens: always 0; nothing is charged for what is kept.
    """

    input_tokens: int
    cache_read_input_tokens: int
    output_tokens: int
    output_tokens_details: ThinkingTokens
    cache_creation_input_tokens: int = 0


class MessageObject(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="message"):
    """A whole answer, or what is known of it when its stream begins."""

    id: str
    role: Literal["assistant"] = "assistant"
    model: str
    content: list[Block]
    stop_reason: StopReason | None
    stop_sequence: str | None
    usage: MessageUsage


class MessageOptions(NamedTuple):
    """How a request wants its answer. id: the caller's own, in place of the request's.
    shows_thinking: False = blocks of the model's reasoning are empty.
    """

    id: str | None = None
    shows_thinking: bool = True


def message_of(head: AnswerHead, own_id: str | None, prompt: PromptInfo) -> MessageObject:
    """An answer that begins. own_id: the caller's, in place of the request's."""
    return MessageObject(
        id=f"msg_{own_id or head.request_id}",
        model=head.model,
        content=[],
        stop_reason=None,
        stop_sequence=None,
        usage=usage_of(prompt, 0, 0),
    )


def answered(
    begun: MessageObject, result: ChoiceResult, prompt: PromptInfo, shows_thinking: bool
) -> MessageObject:
    """Completes a message with what the model has answered. Raises RequestError (incomplete)."""
    return msgspec.structs.replace(
        begun,
        content=_blocks(result, shows_thinking),
        stop_reason=stop_reason_of(result.finish, result.matched, bool(result.calls)),
        stop_sequence=stop_sequence_of(result.matched),
        usage=usage_of(prompt, result.generated_tokens, result.reasoning_tokens),
    )


def _blocks(result: ChoiceResult, shows_thinking: bool) -> list[Block]:
    """The blocks of an answer. White space alone is a text only where nothing else is."""
    blocks: list[Block] = []
    if result.reasoning.strip():
        blocks.append(ThinkingBlock(result.reasoning if shows_thinking else ""))
    if result.text.strip() or (result.text and not (blocks or result.calls)):
        blocks.append(TextBlock(result.text))
    blocks += [ToolUseBlock(call.id, call.name, _input(call.arguments)) for call in result.calls]
    return blocks


def stop_sequence_of(matched: int | str | None) -> str | None:
    """The stop string that ended an answer, else None. matched: as in ChoiceResult."""
    return matched if isinstance(matched, str) else None


def stop_reason_of(finish: FinishReason, matched: int | str | None, has_calls: bool) -> StopReason:
    """Anthropic's name of why an answer ended. Raises RequestError (incomplete)."""
    if completed(finish) == "length":
        return "max_tokens"
    if stop_sequence_of(matched) is not None:
        return "stop_sequence"
    return "tool_use" if has_calls else "end_turn"


def usage_of(prompt: PromptInfo, output_tokens: int, reasoning_tokens: int) -> MessageUsage:
    cached = prompt.cached_tokens
    details = ThinkingTokens(reasoning_tokens)
    return MessageUsage(prompt.num_tokens - cached, cached, output_tokens, details)


def _input(arguments: str) -> dict[str, Any]:
    """A call's arguments; empty where they are no object that can be written again."""
    try:
        found = decode_object(arguments.encode())
        msgspec.json.encode(found)
    except (StrictJsonError, UnicodeEncodeError):
        return {}
    return found


class TextPiece(msgspec.Struct, frozen=True, tag_field="type", tag="text_delta"):
    text: str


class ThinkingPiece(msgspec.Struct, frozen=True, tag_field="type", tag="thinking_delta"):
    thinking: str


class InputPiece(msgspec.Struct, frozen=True, tag_field="type", tag="input_json_delta"):
    partial_json: str


class MessageEnd(msgspec.Struct, frozen=True):
    stop_reason: StopReason
    stop_sequence: str | None


class MessageStart(msgspec.Struct, frozen=True, tag_field="type", tag="message_start"):
    message: MessageObject


class Ping(msgspec.Struct, frozen=True, tag_field="type", tag="ping"):
    pass


class BlockStart(msgspec.Struct, frozen=True, tag_field="type", tag="content_block_start"):
    """Event at the beginning of a block. content_block: still empty."""

    index: int
    content_block: Block


class BlockDelta(msgspec.Struct, frozen=True, tag_field="type", tag="content_block_delta"):
    index: int
    delta: TextPiece | ThinkingPiece | InputPiece


class BlockStop(msgspec.Struct, frozen=True, tag_field="type", tag="content_block_stop"):
    index: int


class MessageDelta(msgspec.Struct, frozen=True, tag_field="type", tag="message_delta"):
    """Event with the end's reason and the counts of the message. usage: of the whole answer."""

    delta: MessageEnd
    usage: MessageUsage


class MessageStop(msgspec.Struct, frozen=True, tag_field="type", tag="message_stop"):
    pass


MessageEvent = (
    MessageStart | Ping | BlockStart | BlockDelta | BlockStop | MessageDelta | MessageStop
)


class MessageFormatter(PartStream):
    """Writes answers of `/v1/messages`."""

    def __init__(self, head: AnswerHead, options: MessageOptions) -> None:
        super().__init__()
        self._head = head
        self._options = options
        self._prompt: PromptInfo | None = None
        self._num_blocks = 0
        self._has_calls = False
        self._end: MessageEnd | None = None

    def whole(self, results: Sequence[ChoiceResult], prompts: Sequence[PromptInfo]) -> bytes:
        """Writes the whole message at once. Raises RequestError (incomplete)."""
        begun = message_of(self._head, self._options.id, prompts[0])
        return encode(answered(begun, results[0], prompts[0], self._options.shows_thinking))

    def prompt(self, info: PromptInfo) -> bytes:
        self._prompt = info
        begun = message_of(self._head, self._options.id, info)
        return _written(MessageStart(begun)) + _written(Ping())

    def chunk(self, event: TextEvent) -> bytes:
        """Writes the events for the next piece of the answer. Raises RequestError (incomplete)."""
        data = self._go_on(event)
        self._has_calls = self._has_calls or bool(event.calls)
        if event.finish is not None:
            reason = stop_reason_of(event.finish, event.matched, self._has_calls)
            self._end = MessageEnd(reason, stop_sequence_of(event.matched))
        return data

    def end(self) -> bytes:
        assert self._prompt is not None
        assert self._end is not None
        data, blanks = self._close(), self._held.get("text")
        if blanks and not self._num_blocks:
            data += self._begin("text") + self._grown("text", blanks) + self._close()
        usage = usage_of(self._prompt, self._num_tokens, self._num_reasoning)
        data += _written(MessageDelta(self._end, usage))
        return data + _written(MessageStop())

    def error(self, error: RequestError) -> bytes:
        return named_sse("error", error_object(error, "anthropic", self._head.request_id))

    def _begun(self, kind: PartKind, call: CallDelta | None) -> bytes:
        block: Block = ThinkingBlock("") if kind == "reasoning" else TextBlock("")
        if call is not None:
            block = ToolUseBlock(call.id or "", call.name or "")
        return _written(BlockStart(self._num_blocks, block))

    def _grown(self, kind: PartKind, piece: str) -> bytes:
        if kind == "reasoning" and not self._options.shows_thinking:
            return b""
        return _written(BlockDelta(self._num_blocks, _PIECES[kind](piece)))

    def _ended(self, kind: PartKind, status: PartStatus) -> bytes:
        self._num_blocks += 1
        return _written(BlockStop(self._num_blocks - 1))


_PIECES: dict[PartKind, type[TextPiece | ThinkingPiece | InputPiece]] = {
    "reasoning": ThinkingPiece,
    "text": TextPiece,
    "call": InputPiece,
}


def _written(event: MessageEvent) -> bytes:
    return named_sse(str(event.__struct_config__.tag), event)
