"""OpenAI's `/v1/responses`: the events of an answer. Pure."""

from collections import Counter
from collections.abc import Sequence
from typing import Any, Literal

import msgspec
from msgspec import UNSET, UnsetType

from loraplex.router.api.openai.chat import ChatTokenLogprob
from loraplex.router.api.responses.answer import (
    Answer,
    Asked,
    Item,
    MessageItem,
    OutputText,
    ReasoningItem,
    ReasoningText,
    ResponseFailure,
    ResponseObject,
    ResponseUsage,
    status_of,
    usage_of,
)
from loraplex.router.api.responses.calls import (
    AnyCallItem,
    Called,
    CallItem,
    CustomCallItem,
    ItemStatus,
)
from loraplex.router.api.responses.logprobs import TextLogprobs
from loraplex.router.api.wire import HeldSpace, encode, named_sse
from loraplex.router.call import AnswerHead, ChoiceResult, PromptInfo, RequestError, TextEvent
from loraplex.router.parts.parts import CallDelta


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


class _Text:
    """An item that is being written. kind: also of its id."""

    def __init__(self, kind: Literal["msg", "rs"], item_id: str) -> None:
        self.kind = kind
        self.id = item_id
        self.pieces: list[str] = []
        self.logprobs: list[ChatTokenLogprob] = []
        self.event = "output_text" if kind == "msg" else "reasoning_text"

    def place(self, logprobs: Sequence[ChatTokenLogprob]) -> dict[str, Any]:
        """What its events say beside its id. logprobs: of the event's text."""
        more = {"logprobs": tuple(logprobs)} if self.kind == "msg" else {}
        return {"content_index": 0, **more}

    def part(self) -> OutputText | ReasoningText:
        text = "".join(self.pieces)
        if self.kind == "rs":
            return ReasoningText(text)
        return OutputText(text, logprobs=tuple(self.logprobs))

    def item(self, status: ItemStatus) -> Item:
        part = None if status == "in_progress" else self.part()
        if self.kind == "msg":
            texts = [part] if isinstance(part, OutputText) else []
            return MessageItem(self.id, status, texts)
        return ReasoningItem(self.id, status, [part] if isinstance(part, ReasoningText) else [])


class _Call:
    """A call that is being written."""

    kind = "fc"

    def __init__(self, called: Called) -> None:
        self.id = called.id
        self.called = called
        self.pieces: list[str] = []

    def item(self, status: ItemStatus) -> AnyCallItem:
        return self.called.item(status, "".join(self.pieces))


class ResponseFormatter:
    """A Formatter. The items of a stream come one after another, each wholly before the next."""

    def __init__(self, head: AnswerHead, asked: Asked) -> None:
        self._answer = Answer(head, asked)
        self._prompts: list[PromptInfo] = []
        self._num_tokens = 0
        self._num_reasoning = 0
        self._num_events = 0
        self._output: list[Item] = []
        self._kinds = Counter[str]()
        self._open: _Text | _Call | None = None
        self._held = HeldSpace()
        self._logprobs = TextLogprobs(asked.logprobs)
        self._status: Literal["completed", "incomplete"] = "completed"

    def whole(self, results: Sequence[ChoiceResult], prompts: Sequence[PromptInfo]) -> bytes:
        """Raises RequestError (incomplete)."""
        return encode(self._answer.whole(results[0], prompts[0]))

    def prompt(self, info: PromptInfo) -> bytes:
        self._prompts.append(info)
        begun = self._answer.response("in_progress", [])
        created = self._event("response.created", response=begun)
        return created + self._event("response.in_progress", response=begun)

    def chunk(self, event: TextEvent) -> bytes:
        """Raises RequestError (incomplete)."""
        self._num_tokens += event.num_tokens
        self._num_reasoning += event.num_reasoning
        self._logprobs.add(event.tokens, event.num_reasoning)
        data = self._add_text("rs", event.reasoning) + self._add_text("msg", event.text)
        data += b"".join(map(self._add_call, event.calls))
        if event.finish is not None:
            self._status = status_of(event.finish)
        return data

    def end(self) -> bytes:
        data = b""
        if self._open is None and not self._output:
            data = self._begin_text("msg") + self._add_text("msg", self._held.pop("msg"))
        data += self._close(self._status)
        response = self._answer.response(self._status, self._output, self._usage())
        return data + self._event(f"response.{self._status}", response=response)

    def error(self, error: RequestError) -> bytes:
        """What there is of the answer, and that it failed."""
        output = self._output + ([] if self._open is None else [self._open.item("incomplete")])
        failure = ResponseFailure(error.message)
        response = self._answer.response("failed", output, self._usage(), failure)
        return self._event("response.failed", response=response)

    def _usage(self) -> ResponseUsage:
        return usage_of(self._prompts, self._num_tokens, self._num_reasoning)

    def _add_text(self, kind: Literal["msg", "rs"], piece: str) -> bytes:
        if not piece:
            return b""
        data, item = b"", self._open
        if item is None or item.kind != kind:
            piece = self._held.begin(kind, piece)
            if not piece:
                return b""
            data = self._close() + self._begin_text(kind)
        return data + self._grow(piece)

    def _add_call(self, delta: CallDelta) -> bytes:
        data = b""
        if delta.name is not None:
            data = self._close()
            self._kinds["fc"] += 1
            earlier = self._kinds["fc"] - 1
            data += self._begin(_Call(self._answer.called(earlier, delta.id or "", delta.name)))
        return data + (self._grow(delta.arguments) if delta.arguments else b"")

    def _begin_text(self, kind: Literal["msg", "rs"]) -> bytes:
        item = _Text(kind, self._new_id(kind))
        data = self._begin(item)
        return data + self._of_item(
            "response.content_part.added", content_index=0, part=item.part()
        )

    def _begin(self, item: _Text | _Call) -> bytes:
        self._open = item
        index = len(self._output)
        return self._event(
            "response.output_item.added", output_index=index, item=item.item("in_progress")
        )

    def _grow(self, piece: str) -> bytes:
        item = self._open
        assert item is not None
        item.pieces.append(piece)
        if isinstance(item, _Call):
            event = "response.function_call_arguments.delta"
            return b"" if item.called.kind else self._of_item(event, delta=piece)
        read = self._logprobs.take(piece) if item.kind == "msg" else ()
        item.logprobs += read
        return self._of_item(f"response.{item.event}.delta", delta=piece, **item.place(read))

    def _close(self, status: ItemStatus = "completed") -> bytes:
        """Ends the item that is being written, if there is one."""
        item = self._open
        if item is None:
            return b""
        whole = item.item(status)
        if isinstance(whole, CallItem):
            kind = "response.function_call_arguments.done"
            data = self._of_item(kind, name=whole.name, arguments=whole.arguments)
        elif isinstance(whole, CustomCallItem):  # its text is known when its JSON is whole
            kind, text = "response.custom_tool_call_input", whole.input
            data = self._of_item(f"{kind}.delta", delta=text) if text else b""
            data += self._of_item(f"{kind}.done", input=text)
        elif isinstance(item, _Call):
            data = b""
        else:
            part = item.part()
            place = item.place(item.logprobs)
            data = self._of_item(f"response.{item.event}.done", text=part.text, **place)
            data += self._of_item("response.content_part.done", content_index=0, part=part)
        data += self._event("response.output_item.done", output_index=len(self._output), item=whole)
        self._output.append(whole)
        self._open = None
        return data

    def _new_id(self, kind: str) -> str:
        self._kinds[kind] += 1
        return self._answer.item_id(kind, self._kinds[kind] - 1)

    def _of_item(self, kind: str, **fields: Any) -> bytes:
        assert self._open is not None
        return self._event(kind, item_id=self._open.id, output_index=len(self._output), **fields)

    def _event(self, kind: str, **fields: Any) -> bytes:
        event = ResponseEvent(kind, self._num_events, **fields)
        self._num_events += 1
        return named_sse(kind, event)
