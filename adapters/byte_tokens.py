"""Reads how vocabularies spell bytes: `<0xNN>`, or stand-in characters. Cleans up words. Pure."""

import re

REPLACEMENT = "\ufffd"
# As the tokenizers library reads the two digits: by a parser that takes a plus sign, too.
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2}|\+[0-9A-Fa-f])>")


def _char_of_byte() -> dict[int, str]:
    """The printable stand-in of each byte in byte-level vocabularies (GPT-2's table)."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    table = {byte: chr(byte) for byte in printable}
    others = (byte for byte in range(256) if byte not in table)
    return table | {byte: chr(0x100 + i) for i, byte in enumerate(others)}


BYTE_OF_CHAR = {char: byte for byte, char in _char_of_byte().items()}
BYTE_TOKENS = frozenset(f"<0x{byte:02X}>" for byte in range(256))


def byte_of(token: str) -> int | None:
    """The byte that a `<0xNN>` token stands for; None for all other tokens."""
    if len(token) != 6 or not token.startswith("<0x"):
        return None
    match = _BYTE_TOKEN.fullmatch(token)
    return None if match is None else int(match[1], 16)


# WordPiece's and CTC's clean-up, in its order.
_CLEAN_UP = (
    (" .", "."),
    (" ?", "?"),
    (" !", "!"),
    (" ,", ","),
    (" ' ", "'"),
    (" n't", "n't"),
    (" 'm", "'m"),
    (" do not", " don't"),
    (" 's", "'s"),
    (" 've", "'ve"),
    (" 're", "'re"),
)


def clean_up(token: str) -> str:
    for written, tidy in _CLEAN_UP:
        token = token.replace(written, tidy)
    return token
