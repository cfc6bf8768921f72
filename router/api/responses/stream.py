"""OpenAI's `/v1/responses`: the events of an answer. Pure."""

from collections import Counter
from collections.abc import Sequence
from typing import Any

import msgspec
from msgspec import UNSET, UnsetType

from loraplex.router.api.openai.chat import ChatTokenLogprob
from loraplex.router.api.part_stream import PartKind, PartStatus, PartStream
from loraplex.router.api.responses.items import (
    Answer,
    Asked,
    Called,
    CallItem,
    CustomCallItem,
    Item,
    ItemStatus,
    MessageItem,
    OutputText,
    ReasoningItem,
    ReasoningText,
    ResponseFailure,
    ResponseObject,
    ResponseUsage,
    TextLogprobs,
    status_of,
    usage_of,
)
from loraplex.router.api.wire import encode, named_sse
from loraplex.router.call import AnswerHead, ChoiceResult, PromptInfo, RequestError, TextEvent
from loraplex.router.parts.parts import CallDelta

_PREFIXES: dict[PartKind, str] = {"reasoning": "rs", "text": "msg", "call": "fc"}


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
