"""OpenAI's `/v1/responses`: answers, whole, and their items. Pure."""

from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import msgspec
from msgspec import UNSET, UnsetType

from loraplex.adapters.common.strict_json import StrictJsonError, decode_object
from loraplex.router.api.openai.chat import ChatTokenLogprob, TopLogprob, bytes_of
from loraplex.router.api.request.custom_tools import custom_input
from loraplex.router.api.wire import completed, finite
from loraplex.router.call import AnswerHead, ChoiceResult, FinishReason, PromptInfo, TextToken

ItemStatus = Literal["in_progress", "completed", "incomplete"]
CallKind = Literal["custom", "local_shell"]
# What models call the shell.
SHELL = "local_shell"


class CallItem(msgspec.Struct, frozen=True, tag_field="type", tag="function_call"):
    """Item of an answer: the call of a function. arguments: JSON text. namespace: of a function in
    one.
    """

    id: str
    status: ItemStatus
    call_id: str
    name: str
    arguments: str
    namespace: str | UnsetType = UNSET


class CustomCallItem(msgspec.Struct, frozen=True, tag_field="type", tag="custom_tool_call"):
    """Item of an answer: the call of a custom tool. input: a text; of a call that broke off, what
    the model wrote.
    """

    id: str
    status: ItemStatus
    call_id: str
    name: str
    input: str
    namespace: str | UnsetType = UNSET


class ShellAction(msgspec.Struct, frozen=True, tag_field="type", tag="exec"):
    """A program to run: empty where the call broke off. env, user: never said."""

    command: list[str] = []
    env: dict[str, str] = {}
    timeout_ms: int | None = None
    user: None = None
    working_directory: str | None = None


class ShellCallItem(msgspec.Struct, frozen=True, tag_field="type", tag="local_shell_call"):
    id: str
    status: ItemStatus
    call_id: str
    action: ShellAction


AnyCallItem = CallItem | CustomCallItem | ShellCallItem


class Called(msgspec.Struct, frozen=True):
    """A call of an answer. kind: None = of a function. id: of its item; call_id: its own."""

    kind: CallKind | None
    id: str
    call_id: str
    name: str
    namespace: str | UnsetType = UNSET

    def item(self, status: ItemStatus, arguments: str) -> AnyCallItem:
        """The item that shows the call. arguments: JSON text, as far as it came."""
        if self.kind == "custom":
            text = custom_input(arguments)
            return CustomCallItem(self.id, status, self.call_id, self.name, text, self.namespace)
        if self.kind == "local_shell":
            return ShellCallItem(self.id, status, self.call_id, _action(arguments))
        return CallItem(self.id, status, self.call_id, self.name, arguments, self.namespace)


def shell_arguments(action: Mapping[str, Any]) -> str:
    """Writes a shell's action as the arguments of a function."""
    said = {name: value for name, value in action.items() if value and name in _SHELL_FIELDS}
    return msgspec.json.encode(said).decode()


_SHELL_FIELDS = ("command", "working_directory", "timeout_ms")


def _action(arguments: str) -> ShellAction:
    try:
        plain = decode_object(arguments.encode())
        return msgspec.convert({**plain, "type": "exec"}, ShellAction)
    except (StrictJsonError, msgspec.ValidationError):
        return ShellAction()


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
    """Item of an answer: the reasoning. summary: always empty; the reasoning itself is
    the content.
    """

    id: str
    status: ItemStatus
    content: list[ReasoningText]
    summary: tuple[()] = ()


Item = MessageItem | ReasoningItem | CallItem | CustomCallItem | ShellCallItem


class InputTokensDetails(msgspec.Struct, frozen=True):
    """Details of the prompt's tokens. cache_write_tokens: always 0; nothing is charged for what is
    kept.
    """

    cached_tokens: int
    cache_write_tokens: int = 0


class OutputTokensDetails(msgspec.Struct, frozen=True):
    """Details of the tokens that were generated. reasoning_tokens: the markers' own included."""

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
    """The error of an answer that broke off."""

    message: str
    code: Literal["server_error"] = "server_error"


class ReasoningAsked(msgspec.Struct, frozen=True):
    effort: str | None
    summary: None = None


class ResponseTextForm(msgspec.Struct, frozen=True):
    """Form of the text, as the answer repeats it. format: as the request has it."""

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


class Asked(msgspec.Struct, frozen=True, kw_only=True):
    """Fields of a request that its answer needs. begun: what the answer repeats of it. id: the
    caller's own, in place of the request's. logprobs: wanted at each place; None = none.

    kinds: by name, the tools that are no functions. namespaces: by name, those of a namespace, and
    their own name there.
    """

    begun: ResponseObject
    id: str | None
    logprobs: int | None
    kinds: dict[str, CallKind]
    namespaces: dict[str, tuple[str | None, str | None]]


class Answer(msgspec.Struct, frozen=True):
    """The parts of an answer that are known from its begin on."""

    head: AnswerHead
    asked: Asked

    def item_id(self, prefix: str, earlier: int) -> str:
        """Makes the id of an item of the answer. earlier: items of its kind."""
        name = f"{prefix}_{self.asked.id or self.head.request_id}"
        return f"{name}_{earlier}" if earlier else name

    def called(self, earlier: int, call_id: str, name: str) -> Called:
        """Describes a call that the answer has begun. earlier: calls of the answer."""
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
        return msgspec.structs.replace(
            self.asked.begun,
            id=self.item_id("resp", 0),
            created_at=self.head.created,
            model=self.head.model,
            status=status,
            error=failure,
            incomplete_details=IncompleteDetails() if status == "incomplete" else None,
            output=output,
            usage=usage,
        )

    def whole(self, result: ChoiceResult, prompt: PromptInfo) -> ResponseObject:
        """Makes the whole response from the model's answer. Raises RequestError (incomplete)."""
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
    """Returns the status of an answer that has ended. Raises RequestError (incomplete)."""
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


class TextLogprobs:
    """Finds the tokens of a text among those of an answer, which has reasoning and calls, too.

    wanted: the likeliest tokens a place; None = nothing is reported.
    """

    def __init__(self, wanted: int | None) -> None:
        self._is_wanted = wanted is not None
        self._tokens: deque[TextToken] = deque()
        self._reasoning = 0
        self._owed = 0

    def add(self, tokens: Sequence[TextToken], num_reasoning: int) -> None:
        """Adds an answer's next tokens. num_reasoning: so many more are the reasoning's."""
        self._tokens.extend(tokens)
        self._reasoning += num_reasoning
        while self._tokens and self._reasoning:
            self._tokens.popleft()
            self._reasoning -= 1

    def take(self, piece: str) -> tuple[ChatTokenLogprob, ...]:
        """Takes those of the next piece of the text."""
        if not self._is_wanted:
            return ()
        found: list[ChatTokenLogprob] = []
        self._owed += len(piece)
        while self._tokens and self._owed > 0:
            token = self._tokens.popleft()
            self._owed -= len(token.text)
            if token.text or not token.special:
                found.append(_of(token))
        return tuple(found)


def _of(token: TextToken) -> ChatTokenLogprob:
    """Bytes are empty where they are not known."""
    raw = bytes_of(token.token) if token.raw is None else list(token.raw)
    top = [TopLogprob(t.text, finite(t.logprob), bytes_of(t.text) or []) for t in token.top]
    return ChatTokenLogprob(token.token, finite(token.logprob), raw or [], top)
