"""The decoder, token by token, against the library's own over the whole list, of every kind."""

import json
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Regex, decoders

from loraplex.router.text.text_decoder import make_decoder

SPACES = decoders.Replace("▁", " ")
KINDS: dict[str, Any] = {
    "none": None,
    "byte level": decoders.ByteLevel(),
    "sentencepiece, old form": [SPACES, decoders.ByteFallback(), decoders.Fuse(), ("strip", 1, 0)],
    "gemma": [SPACES, decoders.ByteFallback(), decoders.Fuse()],
    "metaspace": decoders.Metaspace(),
    "metaspace, first": decoders.Metaspace(prepend_scheme="first"),
    "metaspace, never": decoders.Metaspace(prepend_scheme="never"),
    "bytes, then metaspace": [decoders.ByteFallback(), decoders.Metaspace()],
    "wordpiece": decoders.WordPiece(),
    "wordpiece, untidy": decoders.WordPiece(prefix="", cleanup=False),
    "bpe": decoders.BPEDecoder(),
    "bpe without suffix": decoders.BPEDecoder(suffix=""),
    "ctc": decoders.CTC(),
    "ctc, untidy": decoders.CTC(pad_token="a", word_delimiter_token="b", cleanup=False),
    "fuse": decoders.Fuse(),
    "strip each": [("strip", 2, 1), decoders.Fuse()],
    "strip all": [decoders.Fuse(), ("strip", 2, 2)],
    "nothing replaced": decoders.Replace("", "x"),
    "pattern": decoders.Replace(Regex("a+|▁"), "x"),
    "text replaced": [SPACES, decoders.Fuse(), decoders.Replace("a b", "aa")],
    "text of bytes changed": [decoders.ByteLevel(), decoders.Replace("aa", ""), decoders.Fuse()],
    "nested": [[SPACES, decoders.ByteFallback()], [decoders.WordPiece(), decoders.BPEDecoder("b")]],
    "ctc, bytes, bpe": [decoders.CTC(), decoders.ByteFallback(), decoders.BPEDecoder("a")],
    "metaspace of a text": [decoders.Fuse(), decoders.Metaspace()],
    "metaspace of a text, never": [decoders.Fuse(), decoders.Metaspace(prepend_scheme="never")],
    "bytes of a text": [decoders.Fuse(), decoders.ByteLevel()],
    "byte of a text": [decoders.Fuse(), decoders.ByteFallback()],
    "pattern of a text": [decoders.ByteLevel(), decoders.Replace(Regex("a+$"), "x")],
    "words of a text": [decoders.Fuse(), decoders.WordPiece()],
    "ctc of a text": [decoders.Fuse(), decoders.CTC()],
    "bpe of a text": [decoders.Fuse(), decoders.BPEDecoder("a")],
}
TOKENS = (
    *("", "a", "aa", "b", "ab", "a b", " ", "  ", " a", "▁", "▁a", "▁▁", "a▁", "日", "é", "<s>"),
    *("##b", "##", "</w>", "a</w>", " .", "n't", " do not", " ' ", "|", "a|", "<pad>", "<pad>a"),
    *("<0xE4>", "<0xbD>", "<0xA0>", "<0xF0>", "<0x9F>", "<0xED>", "<0xC3>", "<0x41>", "<0x+1>"),
    *("<0x4G>", "<0xé>", "<0x41", "Ġa", "Ċ", "ä½ł", "ä", "½", "ł", "ðŁ", "Į", "í", "ł日"),
)


def build(kind: Any) -> Any:
    """The library's decoder."""
    if isinstance(kind, list):
        return decoders.Sequence([build(part) for part in kind])
    return decoders.Strip(" ", *kind[1:]) if isinstance(kind, tuple) else kind


def document(kind: Any) -> dict[str, Any] | None:
    if kind is None:
        return None
    found: dict[str, Any] = json.loads(build(kind).__getstate__())
    return found


def can_decode(kind: Any, tokens: Sequence[str]) -> bool:
    """The library's Strip fails where both its sides meet within a token."""
    parts = kind if isinstance(kind, list) else [kind]
    strips = [part for part in parts if isinstance(part, tuple)]
    pieces = ["".join(tokens)] if parts[0].__class__ is decoders.Fuse else tokens
    return all(
        len(piece.strip(" ")) > 0 and len(piece) >= sum(part[1:])
        for part in strips
        for piece in pieces
        if part[2]
    )


def library(kind: Any, tokens: list[str]) -> str:
    text: str = " ".join(tokens) if kind is None else build(kind).decode(tokens)
    return text


LISTS = st.lists(st.sampled_from(TOKENS), max_size=14)


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
@settings(max_examples=25)
@given(tokens=LISTS)
def test_equals_the_library(kind: Any, tokens: list[str]) -> None:
    decoder = make_decoder(document(kind))
    text = ""
    for count in range(len(tokens) + 1):
        if can_decode(kind, tokens[:count]):
            so_far = text + decoder.copy().flush()
            assert so_far == library(kind, tokens[:count])
            assert decoder.holding or so_far == text
        if count < len(tokens):
            text += decoder.push(tokens[count])


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
@settings(max_examples=25)
@given(before=LISTS, other=LISTS, token=st.sampled_from(TOKENS), after=LISTS)
def test_what_settles_makes_the_past_forgotten(
    kind: Any, before: list[str], other: list[str], token: str, after: list[str]
) -> None:
    """Of begun decoders, which a plain token makes them."""
    decoder = make_decoder(document(kind))
    for begin in ("x", *before):
        decoder.push(begin)
    if not decoder.begun or not decoder.settles(token):
        return
    twin = make_decoder(document(kind))
    for begin in ("x", *other, token):
        twin.push(begin)
    decoder.push(token)
    rest = "".join(map(decoder.push, after)) + decoder.flush()
    assert rest == "".join(map(twin.push, after)) + twin.flush()


@pytest.mark.parametrize("kind", ["byte level", "sentencepiece, old form", "gemma", "metaspace"])
def test_plain_tokens_settle(kind: str) -> None:
    """So a prompt's length does not matter."""
    decoder = make_decoder(document(KINDS[kind]))
    decoder.push("x")
    assert decoder.begun
    assert decoder.settles("a")
    assert not decoder.holding


def held_tokens(kind: str, tokens: Sequence[str]) -> int:
    decoder = make_decoder(document(KINDS[kind]))
    text = "".join(map(decoder.push, tokens))
    return len(library(KINDS[kind], list(tokens))) - len(text)


def test_a_run_of_bytes_is_held_back_while_it_may_be_a_text() -> None:
    """One byte that is none of a text would make all of it U+FFFD."""
    bytes_of = [f"<0x{byte:02X}>" for byte in "日本\n".encode()]
    assert held_tokens("gemma", ["a", *bytes_of]) == 3
    assert held_tokens("gemma", ["a", *bytes_of, "b"]) == 0
    assert held_tokens("gemma", ["a", *bytes_of, "<0xFF>", "<0x41>"]) == 0
    assert held_tokens("byte level", ["Ċ", "ä½ł", "ä"]) == 1


def test_unknown_kinds_are_refused_by_name() -> None:
    after_fuse = {"type": "Sequence", "decoders": [{"type": "Fuse"}, {"type": "Upside"}]}
    for unknown in ({"type": "Upside"}, after_fuse):
        with pytest.raises(ValueError, match="Upside"):
            make_decoder(unknown)
