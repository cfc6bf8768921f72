"""A tokenizer's decoder as a pipeline of steps: its `decode`, token by token. Pure.

`flush` gives what the text so far would end in; a copy can be flushed to look at that.
"""

import codecs
import json
from collections.abc import Callable, Sequence
from copy import copy
from functools import partial
from typing import Any, Self

import msgspec
from tokenizers import Tokenizer

from loraplex.adapters.byte_tokens import BYTE_OF_CHAR, REPLACEMENT, byte_of, clean_up


class DecoderStep:
    """A step by which tokens become text. It holds nothing back and remembers nothing, unless it
    says otherwise.

    Each step does what the tokenizers library does with a whole list, as the list comes. A step
    holds back only what later tokens can still change. Up to Fuse or ByteLevel steps see tokens;
    after either there is one text, which comes in pieces.
    """

    __slots__ = ()

    @property
    def holding(self) -> bool:
        """Whether a flush may give text."""
        return False

    @property
    def begun(self) -> bool:
        """Whether what is done only at the start is over."""
        return True

    def settle(self, text: str) -> str | None:
        """The result for `text` after a begun state, where the state behind is always the same.
        None where it is not."""
        raise NotImplementedError

    def copy(self) -> Self:
        return copy(self)


class TokenStep(DecoderStep):
    """A step from tokens to tokens. One token may become none or several."""

    __slots__ = ()

    def push(self, token: str) -> Sequence[str]:
        raise NotImplementedError

    def flush(self) -> Sequence[str]:
        return ()


class TextStep(DecoderStep):
    """A step from a text in pieces to a text in pieces."""

    __slots__ = ()

    def push(self, text: str) -> str:
        raise NotImplementedError

    def flush(self) -> str:
        return ""


class Each(TokenStep):
    """Decodes every token by itself: Replace, Strip."""

    __slots__ = ("_change", "_known")

    def __init__(self, change: Callable[[str], str]) -> None:
        self._change = change
        self._known: dict[str, str] = {}

    def push(self, token: str) -> Sequence[str]:
        return (self.settle(token),)

    def settle(self, text: str) -> str:
        changed = self._known.get(text)
        if changed is None:
            changed = self._known[text] = self._change(text)
        return changed


class FirstAndLater(TokenStep):
    """Decodes the first token in another way than later ones: Metaspace, WordPiece, no decoder."""

    __slots__ = ("_begun", "_first", "_later")

    def __init__(self, first: Callable[[str], str], later: Callable[[str], str]) -> None:
        self._first = first
        self._later = Each(later)
        self._begun = False

    @property
    def begun(self) -> bool:
        return self._begun

    def push(self, token: str) -> Sequence[str]:
        if self._begun:
            return self._later.push(token)
        self._begun = True
        return (self._first(token),)

    def settle(self, text: str) -> str:
        return self._later.settle(text)


class Ctc(TokenStep):
    """Leaves out what repeats the token before, and tokens that `change` leaves nothing of."""

    __slots__ = ("_change", "_last")

    def __init__(self, change: Callable[[str], str]) -> None:
        self._change = Each(change)
        self._last: str | None = None

    def push(self, token: str) -> Sequence[str]:
        if token == self._last:
            return ()
        self._last = token
        changed = self._change.push(token)
        return changed if changed[0] else ()

    def settle(self, text: str) -> None:
        return None


class Bpe(TokenStep):
    """Decodes BPE: the suffix of a word's end is a space, and nothing at the last token."""

    __slots__ = ("_held", "_suffix")

    def __init__(self, suffix: str) -> None:
        self._suffix = suffix
        self._held: str | None = None

    @property
    def holding(self) -> bool:
        return self._held is not None

    def push(self, token: str) -> Sequence[str]:
        before, self._held = self._held, token
        return () if before is None else (before.replace(self._suffix, " "),)

    def flush(self) -> Sequence[str]:
        return () if self._held is None else (self._held.replace(self._suffix, ""),)

    def settle(self, text: str) -> None:
        return None


class ByteFallback(TokenStep):
    """Decodes tokens that stand for bytes. Runs of `<0xNN>` tokens: a text where all their bytes
    are one, else U+FFFD for each.

    A run that may still be a text is held back to its end.
    """

    __slots__ = ("_broken", "_count", "_pieces", "_tail")

    def __init__(self) -> None:
        self._start_run()

    def _start_run(self) -> None:
        self._pieces: list[str] = []
        self._tail = b""
        self._count = 0
        self._broken = False

    @property
    def holding(self) -> bool:
        return self._count > 0

    def push(self, token: str) -> Sequence[str]:
        byte = byte_of(token)
        if byte is None:
            return (*self.flush(), token) if self._count or self._broken else (token,)
        if self._broken:
            return (REPLACEMENT,)
        self._count += 1
        try:
            text, used = codecs.utf_8_decode(self._tail + bytes((byte,)), "strict", False)
        except UnicodeDecodeError:
            count = self._count
            self._start_run()
            self._broken = True
            return (REPLACEMENT,) * count
        self._tail = b"" if used else self._tail + bytes((byte,))
        if text:
            self._pieces.append(text)
        return ()

    def flush(self) -> Sequence[str]:
        held: Sequence[str] = (REPLACEMENT,) * self._count
        if self._count and not self._tail:
            held = ("".join(self._pieces),)
        self._start_run()
        return held

    def settle(self, text: str) -> str | None:
        return text if byte_of(text) is None else None

    def copy(self) -> Self:
        twin = copy(self)
        twin._pieces = list(self._pieces)
        return twin


class ByteLevel(TokenStep):
    """Stand-in characters to bytes, and bytes to one text. At most 3 bytes are held back."""

    __slots__ = ("_bytes", "_tail")

    def __init__(self) -> None:
        self._bytes: dict[str, bytes] = {}
        self._tail = b""

    @property
    def holding(self) -> bool:
        return bool(self._tail)

    def push(self, token: str) -> Sequence[str]:
        data = self._tail + self._bytes_of(token)
        text, used = codecs.utf_8_decode(data, "replace", False)
        self._tail = data[used:]
        return (text,)

    def flush(self) -> Sequence[str]:
        text, _ = codecs.utf_8_decode(self._tail, "replace", True)
        self._tail = b""
        return (text,)

    def settle(self, text: str) -> str | None:
        try:
            return self._bytes_of(text).decode() or None
        except UnicodeDecodeError:
            return None

    def _bytes_of(self, token: str) -> bytes:
        data = self._bytes.get(token)
        if data is None:
            if all(character in BYTE_OF_CHAR for character in token):
                data = bytes(BYTE_OF_CHAR[character] for character in token)
            else:
                data = token.encode()
            self._bytes[token] = data
        return data


class StripText(TextStep):
    """Takes off up to `start` times `content` from the text's start, up to `stop` from its end."""

    __slots__ = ("_content", "_held", "_start", "_stop")

    def __init__(self, content: str, start: int, stop: int) -> None:
        self._content = content
        self._start = start
        self._stop = stop
        self._held = 0

    @property
    def begun(self) -> bool:
        return not self._start

    def push(self, text: str) -> str:
        if self._start and text:
            bare = text.lstrip(self._content)
            taken = min(len(text) - len(bare), self._start)
            text = text[taken:]
            self._start = 0 if text else self._start - taken
        if self._stop:
            text = self._held * self._content + text
            self._held = min(len(text) - len(text.rstrip(self._content)), self._stop)
            text = text[: len(text) - self._held]
        return text

    def settle(self, text: str) -> str | None:
        return None if self._stop else text


class ReplaceText(TextStep):
    """Writes `content` for every `pattern`, which may come in pieces."""

    __slots__ = ("_content", "_held", "_pattern")

    def __init__(self, pattern: str, content: str) -> None:
        self._pattern = pattern
        self._content = content
        self._held = ""

    @property
    def holding(self) -> bool:
        return bool(self._held)

    def push(self, text: str) -> str:
        *whole, rest = (self._held + text).split(self._pattern)
        keep = min(len(self._pattern) - 1, len(rest))
        while keep and not self._pattern.startswith(rest[len(rest) - keep :]):
            keep -= 1
        self._held = rest[len(rest) - keep :]
        return self._content.join([*whole, rest[: len(rest) - keep]])

    def flush(self) -> str:
        held, self._held = self._held, ""
        return held

    def settle(self, text: str) -> str | None:
        return text.replace(self._pattern, self._content) if len(self._pattern) == 1 else None


class WholeText(TextStep):
    """A step that needs the whole text: all of the text is held back to the end."""

    __slots__ = ("_change", "_pieces")

    def __init__(self, change: Callable[[str], str]) -> None:
        self._change = change
        self._pieces: list[str] = []

    @property
    def holding(self) -> bool:
        return True

    def push(self, text: str) -> str:
        self._pieces.append(text)
        return ""

    def flush(self) -> str:
        text = "".join(self._pieces)
        self._pieces = []
        return self._change(text)

    def settle(self, text: str) -> None:
        return None

    def copy(self) -> Self:
        twin = copy(self)
        twin._pieces = list(self._pieces)
        return twin


def strip(token: str, content: str, start: int, stop: int) -> str:
    """Strips a text from the ends of one token."""
    step = StripText(content, start, stop)
    return step.push(token) + step.flush()


def joined() -> TokenStep:
    """Joins tokens with a space between, as where there is no decoder at all."""
    return FirstAndLater(str, " {}".format)


def metaspace(replacement: str, keeps_first: bool) -> TokenStep:
    """Replaces a space's stand-in. keeps_first: a space at the very start stays."""
    table = {ord(replacement): " "}
    first = {ord(replacement): " " if keeps_first else None}
    return FirstAndLater(lambda token: token.translate(first), lambda token: token.translate(table))


def word_piece(prefix: str, cleanup: bool) -> TokenStep:
    tidy = clean_up if cleanup else str

    def later(token: str) -> str:
        return tidy(token[len(prefix) :] if token.startswith(prefix) else f" {token}")

    return FirstAndLater(tidy, later)


def ctc(pad: str, delimiter: str, cleanup: bool) -> TokenStep:
    def change(token: str) -> str:
        token = token.replace(pad, "")
        return clean_up(token).replace(delimiter, " ") if cleanup else token

    return Ctc(change)


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
