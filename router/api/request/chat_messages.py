"""Chat messages as callers send them. Pure."""

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from loraplex.adapters.chat.conversation import REASONING
from loraplex.router.api.request.body import agreed, check_size, require
from loraplex.router.api.request.custom_tools import custom_arguments
from loraplex.router.api.request.fields import Positive
from loraplex.router.api.request.known_elsewhere import unsupported
from loraplex.router.call import RequestError
from loraplex.server.protocol import UNBOUNDED, PixelBounds

Role = Literal["system", "developer", "user", "assistant", "tool", "function"]
# Templates may know further roles.
AnyRole = Annotated[str, Meta(min_length=1, max_length=64)]
# Fields of other servers that say how large the model sees a picture; null alone passes.
TILES = ("min_dynamic_patch", "max_dynamic_patch")
PIXELS = ("min_pixels", "max_pixels")


class ImageUrl(msgspec.Struct, frozen=True):
    """A picture. url: a data URL, or where the picture is. min_pixels, max_pixels: of the resized
    picture, in place of those of the model's files. The others are refused."""

    url: str
    min_pixels: Positive | None = None
    max_pixels: Positive | None = None
    min_dynamic_patch: Any = None
    max_dynamic_patch: Any = None


class ContentPart(msgspec.Struct, frozen=True):
    """A part of a text."""

    type: str
    text: str | None = None


class MessagePart(ContentPart, frozen=True):
    """A part of a message: `text` or `image_url`. OpenAI has further types, which are not served.
    `input_text`, `output_text` and the assistant's `refusal` are texts, `input_image` of
    `/v1/responses` and `image` of transformers are pictures.

    image_url: the address may stand there as it is. image, url: of an `image`. min_pixels,
    max_pixels: as of ImageUrl.
    """

    refusal: str | None = None
    image_url: ImageUrl | str | None = None
    image: str | None = None
    url: str | None = None
    min_pixels: Positive | None = None
    max_pixels: Positive | None = None


class FilePart(MessagePart, frozen=True):
    """A picture in an uploaded file, as other APIs than the chat have it."""

    file_id: str = ""


class FunctionCall(msgspec.Struct, frozen=True):
    """Function that an earlier message of the assistant calls. arguments: JSON text, or the object
    itself; null = none.
    """

    name: str
    arguments: str | dict[str, Any] | None = None


class CustomCall(msgspec.Struct, frozen=True):
    """Custom tool that an earlier message of the assistant calls. input: a text."""

    name: str
    input: str


class MessageToolCall(msgspec.Struct, frozen=True):
    """A call of a function, or of a custom tool."""

    function: FunctionCall | None = None
    id: str | None = None
    type: str = "function"
    custom: CustomCall | None = None

    @property
    def called(self) -> FunctionCall:
        """The call as the model has made it: to it all tools are functions."""
        if self.custom is not None:
            return FunctionCall(self.custom.name, custom_arguments(self.custom.input))
        function = self.function
        assert function is not None
        return FunctionCall(function.name, "{}") if function.arguments is None else function


class Message(msgspec.Struct, frozen=True):
    """Message of a chat, as the caller sends it. content may be null or empty where the assistant
    speaks, or a tool has answered.

    reasoning_content, reasoning, thinking: three names for the model's reasoning; where several are
    given they must agree. function_call: the assistant's call as OpenAI had it before tools; a
    message of the role `function` holds its result. Unknown fields are ignored, since clients send
    whole answers back.
    """

    role: AnyRole
    content: str | list[MessagePart] | None = None
    name: str | None = None
    tool_call_id: str | None = None
    tool_calls: list[MessageToolCall] | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    thinking: str | None = None
    refusal: str | None = None
    function_call: FunctionCall | None = None


def to_template(
    messages: list[Message], where: str = "messages", pixels: PixelBounds = UNBOUNDED
) -> list[dict[str, Any]]:
    """Converts messages to plain dicts for `loraplex.adapters.chat.conversation.shaped`; null
    fields are left out. Parts with pictures have their addresses still. pixels: of pictures that
    say nothing themselves.

    Raises RequestError.
    """
    messages = _with_tool_calls(messages, where)
    check_size("".join(_spelled_arguments(messages)).encode())
    return [_plain(message, f"{where}[{i}]", pixels) for i, message in enumerate(messages)]


def _plain(message: Message, where: str, pixels: PixelBounds) -> dict[str, Any]:
    plain: dict[str, Any] = {"role": message.role, "content": _content(message, where, pixels)}
    for name in ("name", "tool_call_id"):
        value = getattr(message, name)
        if value is not None:
            plain[name] = value
    reasoning = _reasoning(message, where)
    if reasoning is not None:
        plain["reasoning_content"] = reasoning
    if message.tool_calls:
        is_assistant = message.role == "assistant"
        require(is_assistant, "only the assistant calls tools", f"{where}.tool_calls")
        plain["tool_calls"] = [_tool_call(call) for call in message.tool_calls]
    return plain


def _with_tool_calls(messages: list[Message], where: str) -> list[Message]:
    """Rewrites calls of functions and their results as calls of tools, by ids that all templates
    take. Raises RequestError."""
    found, call_id = list[Message](), None
    for i, message in enumerate(messages):
        for j, made in enumerate(message.tool_calls or ()):
            part = "custom" if made.type == "custom" else "function"
            is_there = getattr(made, part) is not None
            require(is_there, "is needed", f"{where}[{i}].tool_calls[{j}].{part}")
        call = message.function_call
        if call is not None:
            why = "goes with no `tool_calls`"
            require(not message.tool_calls, why, f"{where}[{i}].function_call")
            call_id = f"call{i:05}"
            calls = [MessageToolCall(call, call_id)]
            message = msgspec.structs.replace(message, tool_calls=calls, function_call=None)
        elif message.role == "function":
            require(message.name is not None, "is needed", f"{where}[{i}].name")
            message = msgspec.structs.replace(message, role="tool", tool_call_id=call_id)
        found.append(message)
    return found


# In the order in which an answer has them, with those that may stand before a part.
_BEFORE = {
    "reasoning_content": (),
    "content": ("reasoning_content",),
    "tool_calls": ("reasoning_content", "content", "tool_calls"),
}


def join_assistant(messages: list[Message], part: str, value: Any) -> None:
    """Joins the part to the last message if that is the assistant's and it belongs there."""
    last = messages[-1] if messages else None
    if last is None or last.role != "assistant" or not _fits(last, part):
        messages.append(Message("assistant", **{part: value}))
        return
    if part == "tool_calls":
        value = [*(last.tool_calls or ()), *value]
    messages[-1] = msgspec.structs.replace(last, **{part: value})


def _fits(last: Message, part: str) -> bool:
    return all(getattr(last, name) is None or name in _BEFORE[part] for name in _BEFORE)


def _reasoning(message: Message, where: str) -> str | None:
    return agreed({f"{where}.{name}": getattr(message, name) for name in REASONING})


def _content(
    message: Message, where: str, pixels: PixelBounds
) -> str | list[dict[str, Any]] | None:
    content = message.content
    if isinstance(content, str):
        return content
    if not content:
        may_be_empty = message.role in ("assistant", "tool")
        words = "expected a text or a list of at least one part"
        require(may_be_empty, words, f"{where}.content")
        if message.role == "assistant" and message.refusal is not None:
            return message.refusal
        return None if message.tool_calls else ""
    return [
        _part(_as_text(part, message.role), f"{where}.content[{i}]", pixels)
        for i, part in enumerate(content)
    ]


def _as_text(part: MessagePart, role: str) -> MessagePart:
    """Returns a text or picture by another API's name as one of a chat; others as they are."""
    if part.type == "refusal" and role == "assistant":
        return MessagePart("text", part.refusal)
    if part.type in ("input_text", "output_text"):
        return MessagePart("text", part.text)
    if part.type in ("input_image", "image"):
        address = part.image_url or part.image or part.url
        return msgspec.structs.replace(part, type="image_url", image_url=address)
    return part


def _part(part: MessagePart, param: str, pixels: PixelBounds) -> dict[str, Any]:
    """Returns a part of a message as templates read it; a picture has its address and its place in
    the body. Raises RequestError.
    """
    if isinstance(part, FilePart):
        return {"type": "image", "url": "", "where": param, "file_id": part.file_id}
    if part.type != "image_url":
        return text_part(part, param, "send text or an `image_url`")
    given, where = part.image_url, f"{param}.image_url"
    for name in TILES:
        if getattr(given, name, None) is not None:
            raise unsupported(f"{where}.{name}", "the model's own files say how images are read")
    url = given.url if isinstance(given, ImageUrl) else given
    require(url is not None, "expected `image_url`", param)
    least, most = (
        agreed(
            {f"{param}.{name}": getattr(part, name), f"{where}.{name}": getattr(given, name, None)}
        )
        or usual
        for name, usual in zip(PIXELS, pixels, strict=True)
    )
    check_pixels((least, most), where)
    return {"type": "image", "url": url, "where": where, "pixels": (least, most)}


def check_pixels(pixels: PixelBounds, where: str) -> None:
    """Raises RequestError where there can be no picture of so many pixels."""
    least, most = pixels
    require(not most or least <= most, "has more min_pixels than max_pixels", where)


def text_part(part: ContentPart, param: str, hint: str = "send text") -> dict[str, Any]:
    """Returns a part of a message as templates read it. Raises RequestError for what is no text."""
    if part.type != "text":
        raise RequestError(
            "unsupported",
            f"`{param}`: content of type {part.type[:40]!r} is not supported: {hint}",
            param=param,
        )
    require(part.text is not None, "expected `text`", param)
    return {"type": "text", "text": part.text}


def _spelled_arguments(messages: list[Message]) -> list[str]:
    """The texts of calls' arguments: JSON inside of JSON, which nobody has checked yet."""
    calls = [call for message in messages for call in message.tool_calls or ()]
    spelled = (call.called.arguments for call in calls)
    return [arguments for arguments in spelled if isinstance(arguments, str)]


def _tool_call(call: MessageToolCall) -> dict[str, Any]:
    function = {"name": call.called.name, "arguments": call.called.arguments}
    ids = {} if call.id is None else {"id": call.id}
    kind = "function" if call.custom else call.type
    return {**ids, "type": kind, "function": function}  # templates may write it as JSON
