"""OpenAI's `/v1/responses`: answers with their items, whole and as events. Pure."""

from collections import Counter, deque
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import msgspec
from msgspec import UNSET, UnsetType

from loraplex.adapters.common.strict_json import StrictJsonError, decode_object
from loraplex.router.api.openai.chat import ChatTokenLogprob, TopLogprob, bytes_of
from loraplex.router.api.part_stream import PartKind, PartStatus, PartStream
from loraplex.router.api.request.custom_tools import custom_input
from loraplex.router.api.wire import completed, encode, finite, named_sse
from loraplex.router.call import (
    AnswerHead,
    ChoiceResult,
    FinishReason,
    PromptInfo,
    RequestError,
    TextEvent,
    TextToken,
)
from loraplex.router.parts.parts import CallDelta

ItemStatus = Literal["in_progress", "completed", "incomplete"]
CallKind = Literal["custom", "local_shell"]
# What models call the shell.
SHELL = "local_shell"

_PREFIXES: dict[PartKind, str] = {"reasoning": "rs", "text": "msg", "call": "fc"}


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


class ResponseEvent(msgspec.Struct, frozen=True):
    """One event. From response on: what its type has."""

    type: str
    sequence_number: int
    response: ResponseObject | UnsetType = UNSET
    item_id: str | UnsetType = UNSET
    output_index: int | UnsetType = UNSET
    content_index: int | UnsetType = UNSET
    item: Item | UnsetType = UNSET
    part: OutputText | ReasoningText | UnsetType = UNSET
    delta: str | UnsetType = UNSET
    text: str | UnsetType = UNSET
    name: str | UnsetType = UNSET
    arguments: str | UnsetType = UNSET
    input: str | UnsetType = UNSET
    logprobs: tuple[ChatTokenLogprob, ...] | UnsetType = UNSET


class _Item:
    """An item that is being written. called: of a call. id: of the item."""

    def __init__(self, kind: PartKind, item_id: str, called: Called | None) -> None:
        self.kind = kind
        self.id = item_id
        self.called = called
        self.pieces: list[str] = []
        self.logprobs: list[ChatTokenLogprob] = []
        self.event = "output_text" if kind == "text" else "reasoning_text"

    def place(self, logprobs: Sequence[ChatTokenLogprob]) -> dict[str, Any]:
        """Fields of a text's events, its id apart. logprobs: of the event's text."""
        more = {"logprobs": tuple(logprobs)} if self.kind == "text" else {}
        return {"content_index": 0, **more}

    def part(self) -> OutputText | ReasoningText:
        text = "".join(self.pieces)
        if self.kind == "reasoning":
            return ReasoningText(text)
        return OutputText(text, logprobs=tuple(self.logprobs))

    def item(self, status: ItemStatus) -> Item:
        if self.called is not None:
            return self.called.item(status, "".join(self.pieces))
        parts: list[Any] = [] if status == "in_progress" else [self.part()]
        if self.kind == "text":
            return MessageItem(self.id, status, parts)
        return ReasoningItem(self.id, status, parts)


class ResponseFormatter(PartStream):
    """Writes answers of `/v1/responses`."""

    def __init__(self, head: AnswerHead, asked: Asked) -> None:
        super().__init__()
        self._answer = Answer(head, asked)
        self._prompts: list[PromptInfo] = []
        self._num_events = 0
        self._output: list[Item] = []
        self._kinds = Counter[PartKind]()
        self._item: _Item | None = None
        self._logprobs = TextLogprobs(asked.logprobs)
        self._status: PartStatus = "completed"

    def whole(self, results: Sequence[ChoiceResult], prompts: Sequence[PromptInfo]) -> bytes:
        """Writes the whole response at once. Raises RequestError (incomplete)."""
        return encode(self._answer.whole(results[0], prompts[0]))

    def prompt(self, info: PromptInfo) -> bytes:
        self._prompts.append(info)
        begun = self._answer.response("in_progress", [])
        created = self._event("response.created", response=begun)
        return created + self._event("response.in_progress", response=begun)

    def chunk(self, event: TextEvent) -> bytes:
        """Writes the events for the next piece of the answer. Raises RequestError (incomplete)."""
        self._logprobs.add(event.tokens, event.num_reasoning)
        data = self._go_on(event)
        if event.finish is not None:
            self._status = status_of(event.finish)
        return data

    def end(self) -> bytes:
        data = b""
        if self._item is None and not self._output:
            data = self._begin("text") + self._add_text("text", self._held.pop("text", ""))
        data += self._close(self._status)
        response = self._answer.response(self._status, self._output, self._usage())
        return data + self._event(f"response.{self._status}", response=response)

    def error(self, error: RequestError) -> bytes:
        """Sends what there is of the answer, and that it failed."""
        output = self._output + ([] if self._item is None else [self._item.item("incomplete")])
        failure = ResponseFailure(error.message)
        response = self._answer.response("failed", output, self._usage(), failure)
        return self._event("response.failed", response=response)

    def _usage(self) -> ResponseUsage:
        return usage_of(self._prompts, self._num_tokens, self._num_reasoning)

    def _begun(self, kind: PartKind, call: CallDelta | None) -> bytes:
        earlier = self._kinds[kind]
        self._kinds[kind] += 1
        called = None
        if call is not None:
            called = self._answer.called(earlier, call.id or "", call.name or "")
        item = self._item = _Item(kind, self._answer.item_id(_PREFIXES[kind], earlier), called)
        index, begun = len(self._output), item.item("in_progress")
        data = self._event("response.output_item.added", output_index=index, item=begun)
        if call is not None:
            return data
        part = "response.content_part.added"
        return data + self._of_item(part, content_index=0, part=item.part())

    def _grown(self, kind: PartKind, piece: str) -> bytes:
        item = self._item
        assert item is not None
        item.pieces.append(piece)
        if item.called is not None:
            event = "response.function_call_arguments.delta"
            return b"" if item.called.kind else self._of_item(event, delta=piece)
        read = self._logprobs.take(piece) if kind == "text" else ()
        item.logprobs += read
        return self._of_item(f"response.{item.event}.delta", delta=piece, **item.place(read))

    def _ended(self, kind: PartKind, status: PartStatus) -> bytes:
        item = self._item
        assert item is not None
        whole, data = item.item(status), b""
        if isinstance(whole, CallItem):
            event = "response.function_call_arguments.done"
            data = self._of_item(event, name=whole.name, arguments=whole.arguments)
        elif isinstance(whole, CustomCallItem):  # its text is known when its JSON is whole
            event, text = "response.custom_tool_call_input", whole.input
            data = self._of_item(f"{event}.delta", delta=text) if text else b""
            data += self._of_item(f"{event}.done", input=text)
        elif item.called is None:
            part = item.part()
            place = item.place(item.logprobs)
            data = self._of_item(f"response.{item.event}.done", text=part.text, **place)
            data += self._of_item("response.content_part.done", content_index=0, part=part)
        data += self._event("response.output_item.done", output_index=len(self._output), item=whole)
        self._output.append(whole)
        self._item = None
        return data

    def _of_item(self, kind: str, **fields: Any) -> bytes:
        assert self._item is not None
        return self._event(kind, item_id=self._item.id, output_index=len(self._output), **fields)

    def _event(self, kind: str, **fields: Any) -> bytes:
        event = ResponseEvent(kind, self._num_events, **fields)
        self._num_events += 1
        return named_sse(kind, event)
