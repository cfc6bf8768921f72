"""Names in the JSON of an output, each of which stands once in its object. Pure.

A grammar remembers no names. So masks lose the tokens that end a name which its object has.
"""

import re
from collections import defaultdict
from collections.abc import Sequence
from copy import copy

import numpy as np

from loraplex.server.protocol import NamesOnce

_PART = re.compile(rb'"[^"\\]*(?:\\.[^"\\]*)*("|\\?\Z)|[{}\[\],]', re.DOTALL)
_BRACKETS = b"{", b"["


class NameTokens:
    """Tokens that may end names. by_id: the bytes of each token of the vocabulary.

    ending: ids by what they end a name with, and whether that stands behind a backslash. whole: ids
    by a name that lies in them; by b"": in which two names of one object may end.
    """

    def __init__(self, by_id: Sequence[bytes]) -> None:
        self.by_id = by_id
        self.ending: dict[tuple[bool, bytes], list[int]] = defaultdict(list)
        self.whole: dict[bytes, list[int]] = defaultdict(list)
        for token_id, data in ((i, data) for i, data in enumerate(by_id) if b'"' in data):
            quotes = [found.start() for found in re.finditer(b'"', data)]
            for begin in (b'"', b'"\\'):
                if (found := _PART.match(begin + data)) and found[1] == b'"':
                    self.ending[begin != b'"', found[0][len(begin) :]].append(token_id)
            for at in quotes:
                if (found := _PART.match(data, at)) and found[1] == b'"':
                    self.whole[found[0]].append(token_id)
            if len(quotes) > 2 and b"," in data:
                self.whole[b""].append(token_id)


class Names:
    """Reads an output token by token. A copy is cheap, and knows no more of what was copied."""

    def __init__(self, tokens: NameTokens, rule: NamesOnce) -> None:
        self._tokens = tokens
        self._begins = tuple(begin.encode() for begin in rule.begins)
        self._opens, self._closes = rule.opens.encode(), rule.closes.encode()
        # What begins JSON, or ends the reasoning before it.
        self._sought = (self._closes,) if rule.closes and not rule.opens else self._begins
        self._text = b""  # of a string that has begun, with its quote; or what may be sought
        # Names of each open object as they are spelled, with quotes; None of an array.
        self._open: tuple[frozenset[bytes] | None, ...] = ()
        self._is_name = False  # whether the string is one, or the next one is

    def take(self, token_id: int) -> bool:
        """Whether a name has come again in its object."""
        text, self._text = self._text + self._tokens.by_id[token_id], b""
        if self._opens.startswith(text):
            self._text = text
            return False
        if self._opens and text.startswith(self._opens):
            self._sought = (self._closes,)
        self._opens, comes_again = b"", False
        while text:
            if not self._open:
                text = self._found(text)
            elif found := _PART.search(text):
                text = text[found.end() :]
                comes_again |= self._read(found[0], found[1])
            else:
                break
        return comes_again

    def _found(self, text: bytes) -> bytes:
        """The text behind the first text that is sought."""
        places = [(at, -len(t), t) for t in self._sought if (at := text.find(t)) >= 0]
        if not places:
            self._text = text[-max(map(len, self._sought)) :]
            return b""
        at, _, sought = min(places)
        self._sought = self._begins if sought == self._closes else _BRACKETS
        if sought.endswith(_BRACKETS):
            self._read(sought[-1:], None)
        return text[at + len(sought) :]

    def _read(self, part: bytes, end: bytes | None) -> bool:
        """A string, with its end, or a sign. Whether it is a name that has come again."""
        is_name, names = self._is_name, self._open[-1] if self._open else None
        if end in (b"", b"\\"):
            self._text = part if is_name else b'"' + end
            return False
        self._is_name = part == b"{" or (part == b"," and names is not None)
        if part in _BRACKETS:
            self._open += (frozenset() if self._is_name else None,)
        elif part in (b"}", b"]"):
            self._open, self._sought = self._open[:-1], self._begins
        elif end and is_name and names is not None:
            self._open = (*self._open[:-1], names | {part})
            return part in names
        return False

    def forbid(self, mask: np.ndarray) -> None:
        """Take tokens with which a name comes again out of a grammar's mask, int32 `[words]`. Where
        none is left, all stay."""
        if self._open and (again := self._again(mask)):
            at, before = np.array(again, np.uint32), mask.copy()
            np.bitwise_and.at(mask.view(np.uint32), at >> 5, ~(np.uint32(1) << (at & 31)))
            if not mask.any():
                mask[:] = before

    def _again(self, mask: np.ndarray) -> list[int]:
        """Tokens with which a name comes again, all those of the mask among them."""
        tokens, text, names = self._tokens, self._text, self._open[-1] or ()
        tried = tokens.whole[b""][:]
        for name in (name for known in self._open for name in known or ()):
            tried += tokens.whole.get(name, ())
        found = [i for i in tried if mask[i >> 5] >> (i & 31) & 1 and copy(self).take(i)]
        is_escape = (len(text) - len(text.rstrip(b"\\"))) % 2 > 0
        for name in names if text and self._is_name else ():
            if name.startswith(text):
                found += tokens.ending.get((is_escape, name[len(text) :]), ())
        return found
