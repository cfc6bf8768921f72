"""Cohere's `/v2/chat`: a body becomes that of OpenAI's chat; answers, whole and in events. Pure."""

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal, get_args

import msgspec
from msgspec import UNSET, UnsetType

from loraplex.router.api.messages.blocks import (
    MessageFormatter,
    MessageOptions,
    StopReason,
)
from loraplex.router.api.messages.blocks import stop_reason_of as reason_of
from loraplex.router.api.openai import chat
from loraplex.router.api.openai.chat import ChatBody
from loraplex.router.api.openai.common import SharedBody, decode_shared, typed_openai
from loraplex.router.api.part_stream import PartKind, PartStatus
from loraplex.router.api.request.body import decode_plain
from loraplex.router.api.request.fields import NonNegative, Positive, Probability, StopString
from loraplex.router.api.request.formatter import ApiLimits, ApiRequest
from loraplex.router.api.request.known_elsewhere import ALIASES, Elsewhere, without_refused
from loraplex.router.api.request.tool_fields import OfferedTools
from loraplex.router.api.wire import finite, named_sse
from loraplex.router.call import ChoiceResult, PromptInfo, RequestError, TextEvent, TextToken
from loraplex.router.parts.parts import CallDelta

CohereFinish = Literal["COMPLETE", "MAX_TOKENS", "STOP_SEQUENCE", "TOOL_CALL"]
_FINISH = dict(zip(get_args(StopReason), get_args(CohereFinish), strict=True))


class CohereChat(msgspec.Struct, frozen=True):
    """Answer of Cohere's chat route. message: `role`, and what there is of `content`, `tool_plan`
    and `tool_calls`. logprobs: of each token.
    """

    id: str
    finish_reason: CohereFinish
    message: dict[str, Any]
    usage: dict[str, Any]
    logprobs: list[dict[str, Any]] | UnsetType = UNSET


class CohereEvent(msgspec.Struct, frozen=True):
    """Event of a stream on Cohere's chat route. type: its SSE name, too. index: of a part of the
    content, or of a call. delta: the new.
    """

    type: str
    id: str | UnsetType = UNSET
    index: int | UnsetType = UNSET
    delta: dict[str, Any] | UnsetType = UNSET
    logprobs: dict[str, Any] | UnsetType = UNSET


class CohereFormatter(MessageFormatter):
    """Writes answers of Cohere's chat route. Parts come one by one, as Anthropic's do."""

    _num_calls = 0
    _tokens: Sequence[TextToken] = ()

    def whole(self, results: Sequence[ChoiceResult], prompts: Sequence[PromptInfo]) -> Any:
        """Writes the whole answer at once. Raises RequestError (incomplete)."""
        one = results[0]
        said = {
            "content": [{"type": "text", "text": one.text}] if one.text.strip() else None,
            "tool_calls": [_call(call.id, call.name, call.arguments) for call in one.calls],
            "tool_plan": one.reasoning,
        }
        message = {"role": "assistant"} | {name: part for name, part in said.items() if part}
        reason = _FINISH[reason_of(one.finish, one.matched, bool(one.calls))]
        logprobs = [_logprobs((token,)) for token in one.tokens] or UNSET
        usage = _usage(prompts[0], one.generated_tokens)
        return CohereChat(self._head.request_id, reason, message, usage, logprobs)

    def prompt(self, info: PromptInfo) -> bytes:
        self._prompt = info
        begun = {"role": "assistant", "content": [], "tool_plan": "", "tool_calls": []}
        return _event("message-start", begun, id=self._head.request_id)

    def chunk(self, event: TextEvent) -> bytes:
        """Writes the events for the next piece of the answer. Raises RequestError (incomplete)."""
        self._tokens = event.tokens
        return super().chunk(event)

    def end(self) -> bytes:
        assert self._prompt is not None
        assert self._end is not None
        usage = _usage(self._prompt, self._num_tokens)
        last = self._last(_FINISH[self._end.stop_reason], usage=usage)
        return self._close() + last + b"data: [DONE]\n\n"

    def error(self, error: RequestError) -> bytes:
        return self._last("ERROR", error=error.message)

    def _last(self, reason: str, **more: Any) -> bytes:
        delta = {"finish_reason": reason, **more}
        return _event("message-end", id=self._head.request_id, delta=delta)

    def _begun(self, kind: PartKind, call: CallDelta | None) -> bytes:
        if call is not None:
            begun = {"tool_calls": _call(call.id or "", call.name or "", "")}
            return _event("tool-call-start", begun, index=self._num_calls)
        if kind == "reasoning":
            return b""
        part = {"content": {"type": "text", "text": ""}}
        return _event("content-start", part, index=self._num_blocks)

    def _grown(self, kind: PartKind, piece: str) -> bytes:
        if kind == "call":
            call = {"tool_calls": {"function": {"arguments": piece}}}
            return _event("tool-call-delta", call, index=self._num_calls)
        if kind == "reasoning":
            return _event("tool-plan-delta", {"tool_plan": piece})
        logprobs = _logprobs(self._tokens) if self._tokens else UNSET
        part = {"content": {"text": piece}}
        return _event("content-delta", part, index=self._num_blocks, logprobs=logprobs)

    def _ended(self, kind: PartKind, status: PartStatus) -> bytes:
        if kind == "reasoning":
            return b""
        if kind == "call":
            self._num_calls += 1
            return _event("tool-call-end", index=self._num_calls - 1)
        self._num_blocks += 1
        return _event("content-end", index=self._num_blocks - 1)


def _event(name: str, message: dict[str, Any] | None = None, **fields: Any) -> bytes:
    delta: dict[str, Any] = {} if message is None else {"delta": {"message": message}}
    return named_sse(name, CohereEvent(name, **delta, **fields))


def _call(call_id: str, name: str, arguments: str) -> dict[str, Any]:
    function = {"name": name, "arguments": arguments}
    return {"id": call_id, "type": "function", "function": function}


def _usage(prompt: PromptInfo, output_tokens: int) -> dict[str, Any]:
    tokens = {"input_tokens": prompt.num_tokens, "output_tokens": output_tokens}
    return {"billed_units": tokens, "tokens": tokens, "cached_tokens": prompt.cached_tokens}


def _logprobs(tokens: Sequence[TextToken]) -> dict[str, Any]:
    return {
        "text": "".join(token.text for token in tokens),
        "token_ids": [token.token_id for token in tokens],
        "logprobs": [finite(token.logprob) for token in tokens],
    }


REFUSED = {
    "documents": Elsewhere(([],), "put them into the messages"),
    "citation_options": Elsewhere(({"mode": "OFF"},), "answers have no citations"),
    "strict_tools": Elsewhere((False,), "say `strict` in each tool's `function`"),
}


class CohereChatBody(SharedBody, frozen=True, kw_only=True):
    """Body of a request to Cohere's chat route. messages: Cohere's. Their `tool_plan` and parts of
    type `thinking` are reasoning, documents among tools' results texts. safety_mode: a variable
    of the chat template.
    """

    refused: ClassVar[Mapping[str, Elsewhere]] = REFUSED

    messages: list[dict[str, Any]]
    tools: OfferedTools | None = None
    tool_choice: Literal["REQUIRED", "NONE"] | None = None
    response_format: dict[str, Any] | None = None
    safety_mode: Literal["CONTEXTUAL", "STRICT", "OFF"] | None = None
    max_tokens: Positive | None = None
    stop_sequences: list[StopString] | None = None
    k: NonNegative | None = None
    p: Probability | None = None
    logprobs: bool | None = None


_NAMES = {name: name for name in CohereChatBody.__struct_fields__} | {
    "stop_sequences": "stop",
    "k": "top_k",
    "p": "top_p",
}


def parse(body: bytes, limits: ApiLimits, bearer: str | None = None) -> ApiRequest:
    """Reads a request in Cohere's shape as a chat. Raises RequestError."""
    plain = without_refused(decode_plain(body), REFUSED)
    request = decode_shared(plain, CohereChatBody, limits)
    read = {*_NAMES, *ALIASES}  # the rest asks for nothing, in values that a chat may not take
    asked = {_NAMES.get(name, name): value for name, value in plain.items() if name in read}
    mode = asked.pop("safety_mode", None)
    asked["messages"] = [_message(one) for one in request.messages]
    asked["response_format"] = _format(request.response_format or {})
    asked["tool_choice"] = request.tool_choice and request.tool_choice.lower()
    asked["chat_template_kwargs"] = mode and {"safety_mode": mode}
    try:
        found = chat.request_of(typed_openai(asked, ChatBody, limits), limits, bearer)
    except RequestError as error:
        raise error.spelled({own: name for name, own in _NAMES.items()}) from None
    return ApiRequest(found.call, CohereFormatter, MessageOptions())


def _message(given: dict[str, Any]) -> dict[str, Any]:
    """Returns a message of Cohere's as OpenAI has it."""
    content, thought = given.get("content"), given.get("tool_plan")
    if isinstance(content, list):
        thinking = [p["thinking"] for p in content if isinstance(p, dict) and "thinking" in p]
        thought = "".join(map(str, thinking)) or thought
        content = [_part(p) for p in content if not isinstance(p, dict) or "thinking" not in p]
    kept = {name: given.get(name) for name in ("role", "tool_calls", "tool_call_id")}
    return {**kept, "content": content or None, "reasoning_content": thought}


def _part(part: Any) -> Any:
    document = part.get("document") if isinstance(part, dict) else None
    if not isinstance(document, dict):
        return part
    data = document.get("data", "")
    text = data if isinstance(data, str) else msgspec.json.encode(data).decode()
    return {"type": "text", "text": text}


def _format(given: dict[str, Any]) -> dict[str, Any]:
    """Rewrites Cohere's form of an answer as OpenAI's, which has a name beside the schema."""
    return {("schema" if name == "json_schema" else name): part for name, part in given.items()}
