"""Attributes parts of a text to tokens where the text comes later than its tokens. Pure."""

from collections.abc import Sequence

from loraplex.adapters.byte_tokens import REPLACEMENT

_INVALID = REPLACEMENT.encode()


def attribute(text: str, expected: Sequence[bytes]) -> tuple[list[str], list[bytes]]:
    """Divides `text` among its tokens, in order. A character is its last byte's token's.

    expected: what each token adds by itself. What does not agree with that is the last token's.
    Returns each token's part, and what of it is still to come.
    """
    data = text.encode()
    ends, rests, at = [], [], 0
    for own in expected:
        count, rest = _agreeing(data[at : at + len(own) + 3], own)
        at += count
        ends.append(at)
        rests.append(rest)
    if at == 0:
        rests[-1] = expected[-1]  # nothing of it yet
    ends[-1] = len(data)
    parts = _cut(data, ends)
    newest = max((i for i, part in enumerate(parts) if part), default=0)
    return parts, [b"" if i < newest else rest for i, rest in enumerate(rests)]


def _agreeing(data: bytes, own: bytes) -> tuple[int, bytes]:
    """How many bytes of `data` are a token's, and which of its bytes are still to come."""
    if data.startswith(own):
        return len(own), b""
    if own.startswith(data):
        return len(data), own[len(data) :]
    if _is_text(own):
        return 0, b""
    # Part of a character: it became invalid, or its beginning is the prompt's.
    first = data.decode("utf-8", "ignore")[:1].encode()
    return (len(first) if first == _INVALID or first.endswith(own) else 0), b""


def _cut(data: bytes, ends: Sequence[int]) -> list[str]:
    """The parts of a UTF-8 text up to each end; an end within a character is at its start."""
    parts, begin = [], 0
    for end in ends:
        while end < len(data) and data[end] & 0xC0 == 0x80:
            end -= 1
        end = max(end, begin)
        parts.append(data[begin:end].decode())
        begin = end
    return parts


def _is_text(data: bytes) -> bool:
    try:
        data.decode()
    except UnicodeDecodeError:
        return False
    return True
