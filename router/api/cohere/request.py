"""Cohere's `/v2/chat`: a body becomes that of OpenAI's chat. Pure."""

from typing import Any, Literal

import msgspec

from loraplex.router.api.cohere.answer import CohereFormatter
from loraplex.router.api.openai import chat
from loraplex.router.api.openai.chat import ChatBody
from loraplex.router.api.openai.common import SharedBody, decode_shared, typed_openai
from loraplex.router.api.request.body import decode_plain
from loraplex.router.api.request.fields import NonNegative, Positive, Probability, StopString
from loraplex.router.api.request.formatter import ApiLimits, ApiRequest
from loraplex.router.api.request.known_elsewhere import Elsewhere, check_refused
from loraplex.router.api.request.tool_fields import OfferedTools
from loraplex.router.call import RequestError

REFUSED = {
    "documents": Elsewhere(([],), "put them into the messages"),
    "citation_options": Elsewhere(({"mode": "OFF"},), "answers have no citations"),
    "strict_tools": Elsewhere((False,), "say `strict` in each tool's `function`"),
}


class CohereChatBody(SharedBody, frozen=True, kw_only=True):
    """messages: Cohere's. Their `tool_plan` and parts of type `thinking` are reasoning, documents
    among tools' results texts. safety_mode: a variable of the chat template."""

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
    """Raises RequestError."""
    plain = decode_plain(body)
    check_refused(plain, REFUSED)
    plain = {name: value for name, value in plain.items() if name not in REFUSED}
    request = decode_shared(plain, CohereChatBody, limits)
    asked = {_NAMES.get(name, name): value for name, value in plain.items()}
    mode = asked.pop("safety_mode", None)
    asked["messages"] = [_message(one) for one in request.messages]
    asked["response_format"] = _format(request.response_format or {})
    asked["tool_choice"] = request.tool_choice and request.tool_choice.lower()
    asked["chat_template_kwargs"] = mode and {"safety_mode": mode}
    try:
        found = chat.request_of(typed_openai(asked, ChatBody, limits), limits, bearer)
    except RequestError as error:
        raise error.spelled({own: name for name, own in _NAMES.items()}) from None
    return ApiRequest(found.call, CohereFormatter, None)


def _message(given: dict[str, Any]) -> dict[str, Any]:
    """As OpenAI has it."""
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
    """Cohere's schema stands where OpenAI has a name and one."""
    return {("schema" if name == "json_schema" else name): part for name, part in given.items()}
