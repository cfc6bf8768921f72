"""Anthropic's `/v1/messages`: answers, whole. Pure."""

from typing import Any, Literal

import msgspec

from loraplex.adapters.common.strict_json import StrictJsonError, decode_object
from loraplex.router.api.answers import completed
from loraplex.router.call import AnswerHead, ChoiceResult, FinishReason, PromptInfo

StopReason = Literal["end_turn", "max_tokens", "stop_sequence", "tool_use"]


class TextBlock(msgspec.Struct, frozen=True, tag_field="type", tag="text"):
    text: str


class ThinkingBlock(msgspec.Struct, frozen=True, tag_field="type", tag="thinking"):
    """signature: empty; reasoning goes back unsigned."""

    thinking: str
    signature: Literal[""] = ""


class ToolUseBlock(msgspec.Struct, frozen=True, tag_field="type", tag="tool_use"):
    """input: empty in a stream, where it follows as JSON text, and where it broke off."""

    id: str
    name: str
    input: dict[str, Any] = {}


Block = TextBlock | ThinkingBlock | ToolUseBlock


class ThinkingTokens(msgspec.Struct, frozen=True):
    """thinking_tokens: the markers' own included."""

    thinking_tokens: int


class MessageUsage(msgspec.Struct, frozen=True):
    """input_tokens: of the prompt, those that the KV cache saved not included.
    cache_creation_input_tokens: always 0; nothing is charged for what is kept."""

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


def answered(begun: MessageObject, result: ChoiceResult, prompt: PromptInfo) -> MessageObject:
    """Raises RequestError (incomplete)."""
    return msgspec.structs.replace(
        begun,
        content=_blocks(result),
        stop_reason=stop_reason_of(result.finish, result.matched, bool(result.calls)),
        stop_sequence=stop_sequence_of(result.matched),
        usage=usage_of(prompt, result.generated_tokens, result.reasoning_tokens),
    )


def _blocks(result: ChoiceResult) -> list[Block]:
    """White space alone is a text only where there is nothing else."""
    blocks: list[Block] = []
    if result.reasoning.strip():
        blocks.append(ThinkingBlock(result.reasoning))
    if result.text.strip() or (result.text and not (blocks or result.calls)):
        blocks.append(TextBlock(result.text))
    blocks += [ToolUseBlock(call.id, call.name, _input(call.arguments)) for call in result.calls]
    return blocks


def stop_sequence_of(matched: int | str | None) -> str | None:
    """matched: as in ChoiceResult."""
    return matched if isinstance(matched, str) else None


def stop_reason_of(finish: FinishReason, matched: int | str | None, has_calls: bool) -> StopReason:
    """Raises RequestError (incomplete)."""
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
    """Empty where the arguments are no object, or one that cannot be written again."""
    try:
        found = decode_object(arguments.encode())
        msgspec.json.encode(found)
    except (StrictJsonError, UnicodeEncodeError):
        return {}
    return found
