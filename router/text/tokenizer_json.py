"""Facts in a tokenizer's file that the tokenizers library does not expose. Pure."""

import json
from typing import Any

import msgspec

from loraplex.adapters.byte_tokens import BYTE_OF_CHAR, BYTE_TOKENS

# Normalizer parts that never shorten a text (`Replace`: of one character by one).
_LOSSLESS_NORMALIZERS = {"Sequence", "Prepend", "Replace", "ByteLevel"}
_LOSSLESS_SPLITS = {"Sequence", "ByteLevel", "Metaspace", "Split", "Digits"}


class AddedToken(msgspec.Struct, frozen=True):
    """An added token, as tokenizer_config.json lists one."""

    content: str
    lstrip: bool
    normalized: bool
    rstrip: bool
    single_word: bool
    special: bool


def longest_token(tokenizer_json: str) -> int | None:
    """Most characters of a text that one token can stand for, or None where no bound is certain.

    This is certain only where every byte has its own token, so nothing is dropped or merged into an
    unknown token. No earlier step may remove characters either. Raises ValueError.
    """
    document = json.loads(tokenizer_json)
    if not isinstance(document, dict):
        raise ValueError("a tokenizer's file is a JSON object")
    if not _has_every_byte(document) or not _keeps_every_character(document):
        return None
    # A normalized added token is looked for with what is put before each text.
    before = [len(part["prepend"]) for part in _normalizers(document) if part["type"] == "Prepend"]
    added = [len(token["content"]) + sum(before) for token in document.get("added_tokens") or ()]
    return max([*map(len, document["model"]["vocab"]), *added])


def _has_every_byte(document: dict[str, Any]) -> bool:
    """Whether the model cuts all that it is given into tokens that it knows, down to bytes."""
    model = document.get("model") or {}
    vocabulary = model.get("vocab")
    if model.get("type", "BPE") != "BPE" or not isinstance(vocabulary, dict):
        return False
    if model.get("byte_fallback"):
        return vocabulary.keys() >= BYTE_TOKENS
    steps = _normalizers(document) + _parts(document, "pre_tokenizer")
    spells_bytes = any(part["type"] == "ByteLevel" for part in steps)
    whole = not model.get("end_of_word_suffix") and not model.get("continuing_subword_prefix")
    return spells_bytes and whole and vocabulary.keys() >= BYTE_OF_CHAR.keys()


def _keeps_every_character(document: dict[str, Any]) -> bool:
    for part in _normalizers(document):
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


def _normalizers(document: dict[str, Any]) -> list[dict[str, Any]]:
    return _parts(document, "normalizer")


def _parts(document: dict[str, Any], name: str) -> list[dict[str, Any]]:
    """A pipeline stage with all that is nested in it."""
    stage = document.get(name)
    if stage is None:
        return []
    nested = (stage.get("normalizers"), stage.get("pretokenizers"))
    parts = [stage]
    for group in nested:
        for part in group or ():
            parts += _parts({name: part}, name)
    return parts
