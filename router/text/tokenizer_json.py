"""What a tokenizer's file says of itself that the tokenizers library does not tell. Pure."""

import json
from typing import Any

import msgspec


def _char_of_byte() -> dict[int, str]:
    """The printable stand-in of each byte in byte-level vocabularies (GPT-2's table)."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    table = {byte: chr(byte) for byte in printable}
    others = (byte for byte in range(256) if byte not in table)
    return table | {byte: chr(0x100 + i) for i, byte in enumerate(others)}


BYTE_OF_CHAR = {char: byte for byte, char in _char_of_byte().items()}
_BYTE_TOKENS = frozenset(f"<0x{byte:02X}>" for byte in range(256))
# Normalizer parts that never shorten a text (`Replace`: of one character by one).
_LOSSLESS_NORMALIZERS = {"Sequence", "Prepend", "Replace"}
_LOSSLESS_SPLITS = {"Sequence", "ByteLevel", "Metaspace", "Split", "Digits"}


class TokenizerFacts(msgspec.Struct, frozen=True):
    """byte_level: the vocabulary spells bytes by stand-in characters.

    longest_token: most characters of a text that one token can stand for, or None where no bound is
    certain. It is certain only where every byte has a token of its own, so that nothing is dropped
    or merged into an unknown token, and where no step before takes characters away.
    """

    byte_level: bool
    longest_token: int | None


def read_facts(tokenizer_json: str) -> TokenizerFacts:
    """Raises ValueError."""
    document = json.loads(tokenizer_json)
    if not isinstance(document, dict):
        raise ValueError("a tokenizer's file is a JSON object")
    byte_level = any(part.get("type") == "ByteLevel" for part in _parts(document, "decoder"))
    return TokenizerFacts(byte_level, _longest_token(document))


def _longest_token(document: dict[str, Any]) -> int | None:
    vocabulary = (document.get("model") or {}).get("vocab")
    if not isinstance(vocabulary, dict):
        return None
    complete = vocabulary.keys() >= _BYTE_TOKENS or BYTE_OF_CHAR.keys() <= vocabulary.keys()
    if not complete or not _keeps_every_character(document):
        return None
    added = [token["content"] for token in document.get("added_tokens") or ()]
    return max(map(len, [*vocabulary, *added]))


def _keeps_every_character(document: dict[str, Any]) -> bool:
    for part in _parts(document, "normalizer"):
        if part["type"] not in _LOSSLESS_NORMALIZERS or not _replaces_one_by_one(part):
            return False
    for part in _parts(document, "pre_tokenizer"):
        if part["type"] not in _LOSSLESS_SPLITS or part.get("behavior") == "Removed":
            return False
    return not any(
        token.get("lstrip") or token.get("rstrip") for token in document.get("added_tokens") or ()
    )


def _replaces_one_by_one(part: dict[str, Any]) -> bool:
    if part["type"] != "Replace":
        return True
    return part.get("pattern") == {"String": " "} and len(part.get("content", "")) == 1


def _parts(document: dict[str, Any], name: str) -> list[dict[str, Any]]:
    """A pipeline stage with all that is nested in it."""
    stage = document.get(name)
    if stage is None:
        return []
    nested = (stage.get("normalizers"), stage.get("pretokenizers"), stage.get("decoders"))
    parts = [stage]
    for group in nested:
        for part in group or ():
            parts += _parts({name: part}, name)
    return parts
