"""OpenAI's `/v1/responses`: answers, whole. Pure."""

from collections.abc import Sequence
from typing import Any, Literal

import msgspec
from msgspec import UNSET

from loraplex.router.api.openai.chat import ChatTokenLogprob
from loraplex.router.api.responses.calls import (
    Called,
    CallItem,
    CallKind,
    CustomCallItem,
    ItemStatus,
    ShellCallItem,
)
from loraplex.router.api.responses.logprobs import TextLogprobs
from loraplex.router.api.wire import completed
from loraplex.router.call import AnswerHead, ChoiceResult, FinishReason, PromptInfo

ResponseStatus = Literal["in_progress", "completed", "incomplete", "failed", "cancelled"]


class OutputText(msgspec.Struct, frozen=True, tag_field="type", tag="output_text"):
    text: str
    annotations: tuple[()] = ()
    logprobs: tuple[ChatTokenLogprob, ...] = ()


class ReasoningText(msgspec.Struct, frozen=True, tag_field="type", tag="reasoning_text"):
    text: str


class MessageItem(msgspec.Struct, frozen=True, tag_field="type", tag="message"):
    id: str
    status: ItemStatus
    content: list[OutputText]
    role: Literal["assistant"] = "assistant"


class ReasoningItem(msgspec.Struct, frozen=True, tag_field="type", tag="reasoning"):
    """summary: always empty; the reasoning itself is the content."""

    id: str
    status: ItemStatus
    content: list[ReasoningText]
    summary: tuple[()] = ()


Item = MessageItem | ReasoningItem | CallItem | CustomCallItem | ShellCallItem


class InputTokensDetails(msgspec.Struct, frozen=True):
    """cache_write_tokens: always 0; nothing is charged for what is kept."""

    cached_tokens: int
    cache_write_tokens: int = 0


class OutputTokensDetails(msgspec.Struct, frozen=True):
    """reasoning_tokens: the markers' own included."""

    reasoning_tokens: int


class ResponseUsage(msgspec.Struct, frozen=True):
    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: int
    output_tokens_details: OutputTokensDetails
    total_tokens: int


class IncompleteDetails(msgspec.Struct, frozen=True):
    reason: Literal["max_output_tokens"] = "max_output_tokens"


class ResponseFailure(msgspec.Struct, frozen=True):
    """Of an answer that broke off."""

    message: str
    code: Literal["server_error"] = "server_error"


class Asked(msgspec.Struct, frozen=True, kw_only=True):
    """What an answer repeats of its request. id: the caller's own, in place of the request's.
    kinds: by name, the tools that are no functions. namespaces: by name, those of a namespace, and
    their own name there. previous: the answer that it follows."""

    id: str | None = None
    instructions: str | None = None
    max_output_tokens: int | None = None
    metadata: dict[str, str] = {}
    temperature: float = 1.0
    top_p: float = 1.0
    user: str | None = None
    logprobs: int | None = None
    tools: tuple[dict[str, Any], ...] = ()
    kinds: dict[str, CallKind] = {}
    namespaces: dict[str, tuple[str | None, str | None]] = {}
    tool_choice: str | dict[str, Any] = "auto"
    parallel_tool_calls: bool = True
    effort: str | None = None
    format: dict[str, Any] | None = None
    background: bool = False
    previous: str | None = None
    store: bool = False


class ReasoningAsked(msgspec.Struct, frozen=True):
    effort: str | None
    summary: None = None


class ResponseTextForm(msgspec.Struct, frozen=True):
    """format: as the request has it."""

    format: dict[str, Any]


class ResponseObject(msgspec.Struct, frozen=True, kw_only=True):
    """A whole answer, or, in a stream, what there is of it. truncation: it cannot be otherwise."""

    id: str
    object: Literal["response"] = "response"
    created_at: int
    status: ResponseStatus
    error: ResponseFailure | None = None
    incomplete_details: IncompleteDetails | None = None
    instructions: str | None
    max_output_tokens: int | None
    metadata: dict[str, str]
    model: str
    output: list[Item]
    temperature: float
    top_p: float
    usage: ResponseUsage | None
    user: str | None
    tools: tuple[dict[str, Any], ...]
    tool_choice: str | dict[str, Any]
    parallel_tool_calls: bool
    reasoning: ReasoningAsked
    text: ResponseTextForm
    background: bool = False
    previous_response_id: str | None = None
    store: bool = False
    top_logprobs: int = 0
    truncation: Literal["disabled"] = "disabled"


class Answer(msgspec.Struct, frozen=True):
    """What is known of an answer from its begin on."""

    head: AnswerHead
    asked: Asked

    def item_id(self, prefix: str, earlier: int) -> str:
        """earlier: items of its kind."""
        name = f"{prefix}_{self.asked.id or self.head.request_id}"
        return f"{name}_{earlier}" if earlier else name

    def called(self, earlier: int, call_id: str, name: str) -> Called:
        """earlier: calls of the answer."""
        kind = self.asked.kinds.get(name)
        namespace, own_name = self.asked.namespaces.get(name, (None, None))
        item_id = self.item_id("fc", earlier)
        return Called(kind, item_id, call_id, own_name or name, namespace or UNSET)

    def response(
        self,
        status: ResponseStatus,
        output: list[Item],
        usage: ResponseUsage | None = None,
        failure: ResponseFailure | None = None,
    ) -> ResponseObject:
        asked, is_cut = self.asked, status == "incomplete"
        return ResponseObject(
            id=self.item_id("resp", 0),
            created_at=self.head.created,
            status=status,
            error=failure,
            incomplete_details=IncompleteDetails() if is_cut else None,
            instructions=asked.instructions,
            max_output_tokens=asked.max_output_tokens,
            metadata=asked.metadata,
            model=self.head.model,
            output=output,
            temperature=asked.temperature,
            top_p=asked.top_p,
            usage=usage,
            user=asked.user,
            tools=asked.tools,
            tool_choice=asked.tool_choice,
            parallel_tool_calls=asked.parallel_tool_calls,
            reasoning=ReasoningAsked(asked.effort),
            text=ResponseTextForm(asked.format or {"type": "text"}),
            background=asked.background,
            previous_response_id=asked.previous,
            store=asked.store,
            top_logprobs=asked.logprobs or 0,
        )

    def whole(self, result: ChoiceResult, prompt: PromptInfo) -> ResponseObject:
        """Raises RequestError (incomplete)."""
        status = status_of(result.finish)
        items: list[Item] = []
        if result.reasoning.strip():
            reasoning = [ReasoningText(result.reasoning)]
            items.append(ReasoningItem(self.item_id("rs", 0), "completed", reasoning))
        if result.text.strip() or not (items or result.calls):
            read = TextLogprobs(self.asked.logprobs)
            read.add(result.tokens, result.reasoning_tokens)
            text = [OutputText(result.text, logprobs=read.take(result.text))]
            items.append(MessageItem(self.item_id("msg", 0), "completed", text))
        for i, call in enumerate(result.calls):
            called = self.called(i, call.id, call.name)
            items.append(called.item("completed", call.arguments))
        items[-1] = msgspec.structs.replace(items[-1], status=status)
        usage = usage_of([prompt], result.generated_tokens, result.reasoning_tokens)
        return self.response(status, items, usage)


def status_of(finish: FinishReason) -> Literal["completed", "incomplete"]:
    """Raises RequestError (incomplete)."""
    return "incomplete" if completed(finish) == "length" else "completed"


def usage_of(
    prompts: Sequence[PromptInfo], output_tokens: int, reasoning_tokens: int
) -> ResponseUsage:
    input_tokens = sum(prompt.num_tokens for prompt in prompts)
    return ResponseUsage(
        input_tokens,
        InputTokensDetails(sum(prompt.cached_tokens for prompt in prompts)),
        output_tokens,
        OutputTokensDetails(reasoning_tokens),
        input_tokens + output_tokens,
    )
