"""Keeps each name in the JSON of an output from standing twice in its object. Pure.

A grammar remembers no names. So masks lose the tokens that end a name which its object has, or
that begin one as only such names begin.
"""

import re
from collections import defaultdict
from collections.abc import Sequence
from copy import copy
from itertools import takewhile
from typing import Protocol, Self

import numpy as np

from loraplex.server.constraints.rules import mask_words
from loraplex.server.protocol import NamesOnce

_PART = re.compile(rb'"[^"\\]*(?:\\.[^"\\]*)*("|\\?\Z)|[{}\[\],]', re.DOTALL)
_BRACKETS = b"{", b"["


class NameMatcher(Protocol):
    """The methods of llguidance's LLMatcher that tell how names may go on."""

    def deep_copy(self) -> Self: ...

    def try_consume_tokens(self, tokens: list[int]) -> int: ...

    def rollback(self, num_tokens: int) -> bool: ...

    def unsafe_compute_mask_ptr(self, trg_pointer: int, trg_byte_size: int) -> None: ...


class NameTokens:
    """Tokens that may end names. by_id: the bytes of each token of the vocabulary.

    same: ids by their bytes. ending: ids by what they end a name with, and whether that stands
    behind a backslash. whole: ids by a name, or the begin of one, that lies in them; by b"": in
    which two names of one object may end; by a quote: behind which another name may follow.
    """

    def __init__(self, by_id: Sequence[bytes]) -> None:
        self.by_id = by_id
        self.same: dict[bytes, list[int]] = defaultdict(list)
        self.ending: dict[tuple[bool, bytes], list[int]] = defaultdict(list)
        self.whole: dict[bytes, list[int]] = defaultdict(list)
        for token_id, data in enumerate(by_id):
            self.same[data].append(token_id)
            if b'"' not in data:
                continue
            quotes = [found.start() for found in re.finditer(b'"', data)]
            for begin in (b'"', b'"\\'):
                if (found := _PART.match(begin + data)) and found[1] == b'"':
                    self.ending[begin != b'"', found[0][len(begin) :]].append(token_id)
            for at in quotes:
                if found := _PART.match(data, at):
                    self.whole[found[0]].append(token_id)
            if len(quotes) > 2 and b"," in data:
                self.whole[b""].append(token_id)
        self.whole[b'"'] = [i for i, data in enumerate(by_id) if b"," in data]

    def single(self, text: bytes) -> list[int]:
        """A token for each byte, up to one that no token is alone."""
        found = (self.same.get(bytes((byte,)), [-1])[0] for byte in text)
        return list(takewhile(lambda token_id: token_id >= 0, found))


class Names:
    """Reads an output token by token. A copy is cheap, and knows no more of what was copied."""

    def __init__(self, tokens: NameTokens, rule: NamesOnce) -> None:
        self._tokens = tokens
        self._begins = tuple(begin.encode() for begin in rule.begins)
        self._opens, self._closes = rule.opens.encode(), rule.closes.encode()
        # What begins JSON, or ends the reasoning before it.
        self._sought = (self._closes,) if rule.closes and not rule.opens else self._begins
        self._text = b""  # of a string that has begun, with its quote; or what may be sought
        # Of each open object: begins of names, with which no new one begins any more, then names.
        # Both are as they are spelled, with quotes. None of an array.
        self._open: tuple[dict[bytes, None] | None, ...] = ()
        self._is_name = False  # whether the string is one, or the next one is
        self._run_out = rule.run_out
        # Where the last name began; None where names may follow that were none there.
        self._begin: NameMatcher | None = None

    def take(self, token_id: int, matcher: NameMatcher | None = None) -> bool:
        """Whether a name has come again in its object, or must. matcher: takes the token next;
        without it begins of names do not become known as used up."""
        data = self._tokens.by_id[token_id]
        text, self._text = self._text + data, b""
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
                at, is_name = found.start() - len(text), self._is_name and found[0][:1] == b'"'
                text = text[found.end() :]
                if matcher is not None and is_name and self._run_out and -at <= len(data):
                    self._begin_name(matcher, data[: len(data) + at + 1])
                comes_again |= self._read(found[0], found[1])
                if matcher is not None and is_name and found[1] == b'"':
                    self._use_up()
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
            return is_name and part in (names or ())
        self._is_name = part == b"{" or (part == b"," and names is not None)
        if part in _BRACKETS:
            self._open += ({} if self._is_name else None,)
        elif part in (b"}", b"]"):
            self._open, self._sought = self._open[:-1], self._begins
        elif end and is_name and names is not None:
            self._open = (*self._open[:-1], {**names, part: None})
            return part in names
        return part == b"," and b'"' in (names or ())

    def _begin_name(self, matcher: NameMatcher, data: bytes) -> None:
        """Note the begin of an object's next name, behind the last token's begin."""
        self._begin = None
        if self._open[-1]:
            self._begin = matcher.deep_copy()
            self._begin.try_consume_tokens(self._tokens.single(data))
            self._use_up()

    def _use_up(self) -> None:
        """Note begins of the last name with which no new one begins.

        Names of a schema's list come in turn, and never where they have come. So where a name may
        come again by the grammar, no others are possible later than are possible here.
        """
        names, begin = self._open[-1], self._begin
        if begin is None or not names:
            return
        name = next(reversed(names))
        taken = begin.try_consume_tokens(self._tokens.single(name[1:]))
        if taken < len(name) - 1:
            begin.rollback(taken)
            self._begin = None
            return
        mask, ahead = np.empty(mask_words(len(self._tokens.by_id)), np.int32), copy(self)
        ahead._is_name, is_used_up, known = True, True, names
        for end in range(len(name) - 1, 0, -1):
            begin.rollback(1)
            if is_used_up:
                begin.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
                ahead._text = name[:end]
                is_used_up = not _without(mask, ahead._again(mask)).any()
                if is_used_up:
                    known = {name[:end]: None, **known}
                    ahead._open = (*self._open[:-1], known)
        self._open = ahead._open

    def forbid(self, mask: np.ndarray) -> None:
        """Take tokens with which a name comes again, or must, out of a grammar's mask, int32
        `[words]`. Where none is left, all stay."""
        if self._open and (again := self._again(mask)):
            left = _without(mask, again)
            if left.any():
                mask[:] = left

    def _again(self, mask: np.ndarray) -> list[int]:
        """Tokens with which a name comes again, all those of the mask among them."""
        tokens, text, names = self._tokens, self._text, self._open[-1] or ()
        tried = tokens.whole[b""][:]
        for name in (name for known in self._open for name in known or ()):
            tried += tokens.whole.get(name, ())
        found = [i for i in tried if mask[i >> 5] >> (i & 31) & 1 and self._ends_wrong(i)]
        is_escape = (len(text) - len(text.rstrip(b"\\"))) % 2 > 0
        for name in names if text and self._is_name else ():
            if name.startswith(text):
                rest = name[len(text) :]
                found += tokens.ending.get((is_escape, rest), []) or tokens.same.get(rest, [])
        return found

    def _ends_wrong(self, token_id: int) -> bool:
        """Say whether the token would end a name wrongly, see `take`. A token without a quote does
        not, within a string.
        """
        is_within = self._text and b'"' not in self._tokens.by_id[token_id]
        return not is_within and copy(self).take(token_id)


def _without(mask: np.ndarray, token_ids: list[int]) -> np.ndarray:
    """A copy, int32 `[words]`, that does not allow these tokens."""
    left, at = mask.copy(), np.array(token_ids, np.uint32)
    np.bitwise_and.at(left.view(np.uint32), at >> 5, ~(np.uint32(1) << (at & 31)))
    return left
