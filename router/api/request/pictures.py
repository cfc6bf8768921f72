"""Pictures as requests give them: by data URLs, addresses and files, among messages or texts.
Pure.
"""

import base64
import contextlib
import re
import string
from collections.abc import Sequence
from itertools import chain
from typing import Any
from urllib.parse import unquote

import msgspec

from loraplex.router.call import Api, GenerationCall, GivenPicture, RequestError
from loraplex.server.protocol import UNBOUNDED, ModelCard, VisionCard

MAX_PICTURES = 128
# LoRAX's form of a picture in a text.
_MARKED = re.compile(r"!\[[^\]]*\]\(((?:data:image/|https?://)[^\s)]+)\)", re.I)
_DATA_SCHEME = re.compile(r"\s*data:", re.I)
_DATA = re.compile(r"\s*data:[^,]{0,255}; ?base64,", re.I)
_AS_BASE64 = str.maketrans("-_", "+/", string.whitespace)

Messages = list[dict[str, Any]]


def in_messages(messages: Messages) -> list[GivenPicture]:
    """Finds the pictures of a conversation, in order."""
    parts = (part for message in messages for part in _parts(message))
    return [
        GivenPicture(part["url"], part["where"], part.get("file_id"), part.get("pixels", UNBOUNDED))
        for part in parts
        if part["type"] == "image"
    ]


def bare(messages: Messages) -> Messages:
    """The messages as templates read them: where a picture stands, and no more of it."""
    return [
        {**message, "content": [_bare(part) for part in parts]} if parts else message
        for message in messages
        for parts in (_parts(message),)
    ]


def without_pictures(call: GenerationCall) -> GenerationCall:
    """The call without the data of its pictures."""
    if call.messages is None:
        return msgspec.structs.replace(call, pictures=()) if call.pictures else call
    further = tuple(bare(messages) for messages in call.further)
    return msgspec.structs.replace(call, messages=bare(call.messages), further=further)


def in_text(text: str, where: str, place: str) -> tuple[list[GivenPicture], str]:
    """Finds the pictures that a text marks as `![](URL)`, in order. Returns also the text with
    `place` for each, as the model reads it. Raises RequestError for too many.
    """
    given: list[GivenPicture] = []

    def found(match: re.Match[str]) -> str:
        given.append(GivenPicture(match[1], where))
        return place

    text = _MARKED.sub(found, text)
    _check_count(given)
    return given, text


def as_in_body(given: list[GivenPicture], api: Api) -> list[GivenPicture]:
    """Names pictures as the caller can find them: bodies of other APIs are no chats."""
    if api not in ("responses", "messages"):
        return given
    field = "input" if api == "responses" else api
    return [
        msgspec.structs.replace(one, where=f"{field}, image {i}") for i, one in enumerate(given, 1)
    ]


def check_given(call: GenerationCall, card: ModelCard) -> None:
    """Checks that the model reads the pictures of a call. Raises RequestError."""
    given = as_in_body(_in_call(call), call.api)
    if not given:
        return
    where = given[0].where
    if card.vision is None:
        because = f": {card.blind}" if card.blind else ""
        problem = f"the model {card.names[0]} reads no images{because}"
    elif call.vector is not None:
        problem = "vectors are of texts alone, not of images"
    else:
        _check_count(given)
        _check_pixels(given, card.vision)
        return
    raise RequestError("unsupported", f"`{where}`: {problem}", param=where)


def _check_pixels(given: Sequence[GivenPicture], vision: VisionCard) -> None:
    for one in given:
        try:
            vision.bounded(one.pixels)
        except ValueError as error:
            message = f"`{one.where}`: {error}"
            raise RequestError("unsupported", message, param=one.where) from None


def _in_call(call: GenerationCall) -> list[GivenPicture]:
    """Finds the pictures of all prompts of a call, in order."""
    if call.messages is None:
        return [*chain.from_iterable(call.pictures)]
    conversations = (call.messages, *call.further)
    return [picture for messages in conversations for picture in in_messages(messages)]


def _check_count(given: Sequence[GivenPicture]) -> None:
    if len(given) > MAX_PICTURES:
        where = given[0].where
        problem = f"a request has at most {MAX_PICTURES} images, got {len(given)}"
        raise RequestError("unsupported", f"`{where}`: {problem}", param=where)


def is_address(one: GivenPicture) -> bool:
    """Whether a picture must be fetched."""
    return one.file_id is None and not _DATA_SCHEME.match(one.url)


def lie_elsewhere(call: GenerationCall) -> bool:
    """Whether pictures of a call must be fetched, or read from files."""
    return any(one.file_id is not None or is_address(one) for one in _in_call(call))


def as_url(data: str) -> str:
    """The URL of a picture that may be given as base64 alone."""
    return data if ":" in data else f"data:image/unknown;base64,{data}"


def data_of(url: str) -> bytes | None:
    """The bytes of a data URL, whatever its type says; None for a URL of another kind. It may
    have spaces, `%` codes, and the letters of URLs. Raises ValueError."""
    if not _DATA_SCHEME.match(url):
        return None
    match = _DATA.match(url)
    if match is None:
        raise ValueError("expected data:image/TYPE;base64,DATA")
    data = url[match.end() :]
    with contextlib.suppress(ValueError):
        return base64.b64decode(data, validate=True)
    data = unquote(data).translate(_AS_BASE64)
    try:
        return base64.b64decode(data, validate=True)
    except ValueError as error:
        raise ValueError(f"the data URL holds no base64: {error}") from None


def spaced(text: str, vision: VisionCard, spot: str) -> str:
    """The prompt with the text that comes around each picture's spot. spot: that token."""
    return text.replace(spot, f"{vision.around}{spot}{vision.around}") if vision.around else text


def placed(
    ids: Sequence[int], parts: Sequence[str], pictures: Sequence[list[int]], vision: VisionCard
) -> tuple[list[int], list[str], list[tuple[int, int]]]:
    """Puts each picture's ids where the prompt has its spot. pictures: their ids, in order.
    Returns ids, parts (if there are any), and of each picture the place of its first placeholder
    and the length of its span. Raises ValueError when the prompt has other than one spot for each
    picture.
    """
    spots = [i for i, token_id in enumerate(ids) if token_id == vision.spot]
    if len(spots) != len(pictures):
        raise ValueError(f"the prompt has {len(spots)} places for {len(pictures)} images")
    if vision.spot != vision.token_id and vision.token_id in ids:
        raise ValueError("the prompt has placeholders beside those of its images")
    longer: list[int] = []
    longer_parts: list[str] = []
    spans: list[tuple[int, int]] = []
    begin = 0
    for spot, own in zip(spots, pictures, strict=True):
        longer += ids[begin:spot]
        within = vision.within(own)
        spans.append((len(longer) + within.start, within.stop - within.start))
        longer += own
        if parts:
            longer_parts += [*parts[begin : spot + 1], *([""] * (len(own) - 1))]
        begin = spot + 1
    return [*longer, *ids[begin:]], [*longer_parts, *parts[begin:]], spans


def _parts(message: dict[str, Any]) -> list[dict[str, Any]]:
    content = message.get("content")
    return content if isinstance(content, list) else []


def _bare(part: dict[str, Any]) -> dict[str, Any]:
    return {"type": "image"} if part["type"] == "image" else part
