"""Words and header of a server's refusal, whichever server it is. Pure."""

from email.utils import parsedate_to_datetime

import msgspec

_LONGEST = 300
# The errors of msgspec, and of Python for JSON that is nested too deeply.
UNREADABLE = (msgspec.MsgspecError, RecursionError, UnicodeDecodeError)


def error_text(body: bytes) -> str:
    """Finds the message in an error's body of OpenAI's shape, LoRAX's or another: one line."""
    try:
        said = msgspec.json.decode(body)
    except UNREADABLE:
        return one_line(body)
    for name in ("error", "message", "detail"):
        if isinstance(said, dict):
            said = said.get(name) or said
    return one_line(said.encode() if isinstance(said, str) else msgspec.json.encode(said))


def one_line(text: bytes) -> str:
    """Makes one printable line of any bytes, at most 301 characters long."""
    words = " ".join(text[: 4 * _LONGEST].decode("utf-8", "replace").split())
    words = "".join(char if char.isprintable() else "?" for char in words)
    return words if len(words) <= _LONGEST else f"{words[:_LONGEST]}…"


def retry_after_s(text: str, now: float) -> float | None:
    """Reads a `retry-after` header, seconds or a date; None if it is neither. now: Unix time."""
    if text.isascii() and text.isdigit():
        return float(text)
    try:
        return max(0.0, parsedate_to_datetime(text).timestamp() - now)
    except (ValueError, OverflowError):
        return None
