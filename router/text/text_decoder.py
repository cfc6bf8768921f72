"""A tokenizer's decoder as a pipeline of steps: its `decode`, token by token. Pure.

`flush` gives what the text so far would end in; a copy can be flushed to look at that.
"""

import json
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import msgspec
from tokenizers import Tokenizer

from loraplex.router.text.decoders import (
    Bpe,
    ByteFallback,
    ByteLevel,
    Each,
    ReplaceText,
    StripText,
    TextStep,
    TokenStep,
    WholeText,
    ctc,
    joined,
    metaspace,
    strip,
    word_piece,
)

# Decoders after which there is one text in place of tokens.
_FUSING = {"ByteLevel", "Fuse"}


class TextDecoder:
    """Decodes tokens to text. Push tokens as the vocabulary spells them, one at a time; the work
    for each is constant.

    What it gives, from all pushes and the flush together, is the library's `decode`.
    """

    __slots__ = ("_text_steps", "_token_steps")

    def __init__(self, token_steps: list[TokenStep], text_steps: list[TextStep]) -> None:
        self._token_steps = token_steps
        self._text_steps = text_steps

    def push(self, token: str) -> str:
        """Takes the next token, and gives the text that is now certain."""
        tokens: Sequence[str] = (token,)
        for step in self._token_steps:
            if len(tokens) == 1:
                tokens = step.push(tokens[0])
            else:
                tokens = [changed for token in tokens for changed in step.push(token)]
        text = "".join(tokens)
        for text_step in self._text_steps:
            text = text_step.push(text)
        return text

    def flush(self) -> str:
        """The text that was held back. Nothing may be pushed after it."""
        tokens: list[str] = []
        for step in self._token_steps:
            tokens = [changed for token in tokens for changed in step.push(token)]
            tokens += step.flush()
        text = "".join(tokens)
        for text_step in self._text_steps:
            text = text_step.push(text) + text_step.flush()
        return text

    @property
    def holding(self) -> bool:
        """Whether a flush may give text."""
        return any(step.holding for step in self._token_steps) or any(
            step.holding for step in self._text_steps
        )

    @property
    def begun(self) -> bool:
        """Whether what is done only at the start of a text is over."""
        return all(step.begun for step in self._token_steps) and all(
            step.begun for step in self._text_steps
        )

    def settles(self, token: str) -> bool:
        """Whether after this token a begun decoder is in the same state whatever came before."""
        for step in (*self._token_steps, *self._text_steps):
            settled = step.settle(token)
            if settled is None:
                return False
            token = settled
        return True

    def copy(self) -> "TextDecoder":
        return TextDecoder(
            [step.copy() for step in self._token_steps], [step.copy() for step in self._text_steps]
        )


def make_decoder(document: dict[str, Any] | None) -> TextDecoder:
    """Makes a decoder that turns tokens into text. document: the decoder of a tokenizer, as its
    file writes it; None = there is none.

    Raises ValueError for a kind that is not known.
    """
    if document is None:
        return TextDecoder([joined()], [])
    token_steps: list[TokenStep] = []
    text_steps: list[TextStep] = []
    fused = False
    for part in _flat(document):
        if fused:
            text_steps += _text_step(part)
        else:
            token_steps += _token_step(part)
            fused = part["type"] in _FUSING
    return TextDecoder(token_steps, text_steps)


def _flat(document: dict[str, Any]) -> list[dict[str, Any]]:
    if document["type"] != "Sequence":
        return [document]
    return [part for nested in document["decoders"] for part in _flat(nested)]


class _Options(msgspec.Struct):
    """Options of all kinds of decoders, by the library's names and defaults."""

    type: str
    pattern: dict[str, str] = {}
    content: str = ""
    start: int = 0
    stop: int = 0
    replacement: str = "▁"
    prepend_scheme: str = "always"
    prefix: str = "##"
    cleanup: bool = True
    suffix: str = "</w>"
    pad_token: str = "<pad>"
    word_delimiter_token: str = "|"

    @property
    def plain_pattern(self) -> str:
        """The pattern as plain text; "" where it is a regular expression."""
        return self.pattern.get("String", "")

    @property
    def keeps_first(self) -> bool:
        return self.prepend_scheme == "never"


def _token_step(part: dict[str, Any]) -> list[TokenStep]:
    kind, o = part["type"], msgspec.convert(part, _Options)
    steps: dict[str, Callable[[], TokenStep]] = {
        "BPEDecoder": lambda: Bpe(o.suffix),
        "ByteFallback": ByteFallback,
        "ByteLevel": ByteLevel,
        "CTC": lambda: ctc(o.pad_token, o.word_delimiter_token, o.cleanup),
        "Metaspace": lambda: metaspace(o.replacement, o.keeps_first),
        "Replace": lambda: Each(_replace(part, o)),
        "Strip": lambda: Each(partial(strip, content=o.content, start=o.start, stop=o.stop)),
        "WordPiece": lambda: word_piece(o.prefix, o.cleanup),
    }
    if kind == "Fuse":
        return []
    if kind not in steps:
        raise ValueError(f"decoders of kind {kind!r} are not known")
    return [steps[kind]()]


def _replace(part: dict[str, Any], o: _Options) -> Callable[[str], str]:
    if o.plain_pattern:
        return lambda token: token.replace(o.plain_pattern, o.content)
    return _by_library(part)


def _text_step(part: dict[str, Any]) -> list[TextStep]:
    """Makes a step of the decoder that works on the whole text. Kinds that nobody puts there are
    left to the library, at its end.
    """
    kind, o = part["type"], msgspec.convert(part, _Options)
    if kind == "Fuse":
        return []
    if kind == "Strip":
        return [StripText(o.content, o.start, o.stop)]
    if kind == "Replace" and o.plain_pattern:
        return [ReplaceText(o.plain_pattern, o.content)]
    if kind == "Metaspace":
        return [ReplaceText(o.replacement, " " if o.keeps_first else "")]
    return [WholeText(_by_library(part))]


def _by_library(part: dict[str, Any]) -> Callable[[str], str]:
    """The library's own decoder, over one token. Raises ValueError."""
    model = {"type": "WordLevel", "vocab": {}, "unk_token": ""}
    document = {"version": "1.0", "added_tokens": [], "decoder": part, "model": model}
    try:
        decoder = Tokenizer.from_str(json.dumps(document)).decoder
    except Exception as error:  # the library raises bare Exception
        raise ValueError(f"decoders of kind {part['type']!r} are not known: {error}") from error
    assert decoder is not None

    def decode(token: str) -> str:
        text: str = decoder.decode([token])
        return text

    return decode
