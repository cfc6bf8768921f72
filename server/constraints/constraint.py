"""The tokens that a sequence may draw next, by its grammar and its other token rules. Pure.

A matcher recurses as deep as its grammar, so masks are filled and drafts are looked at in threads
with a large stack (`DeepThreads`). A grammar remembers no names. So masks lose the tokens that end
a name which its object has, or that begin one as only such names begin.
"""

import re
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from copy import copy
from itertools import takewhile
from typing import Literal, NamedTuple, Protocol, Self

import numpy as np

from loraplex.server.constraints.rules import TokenRules, mask_words
from loraplex.server.protocol import NamesOnce, ThinkingBudget

_PART = re.compile(rb'"[^"\\]*(?:\\.[^"\\]*)*("|\\?\Z)|[{}\[\],]', re.DOTALL)
_BRACKETS = b"{", b"["

ConstraintState = Literal["open", "over", "failed"]


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


class GrammarMatcher(NameMatcher, Protocol):
    """The methods of llguidance's LLMatcher that are used."""

    def consume_token(self, sampled_token: int) -> bool: ...

    def is_error(self) -> bool: ...

    def get_error(self) -> str: ...

    def is_accepting(self) -> bool: ...

    def is_stopped(self) -> bool: ...

    def validate_tokens(self, tokens: list[int]) -> int: ...

    def compute_ff_bytes(self) -> bytes: ...

    def compute_ff_tokens(self) -> list[int]: ...


class Foresight(NamedTuple):
    """Facts about the tokens to come under a constraint.

    forced: tokens of the text that the grammar forces; other tokens of that text may be drawn.
    allowed: how many tokens of a draft may be drawn, one after the other.
    """

    forced: list[int]
    allowed: int


NO_FORESIGHT = Foresight([], 0)
_NEWEST = 0.5  # weight of the newest mask in a mean
# The cost of a mask, or of a look at a draft, above which there are no drafts.
COSTLY_S = 0.002


class Constraint:
    """Holds one sequence to its grammar and rules. For one thread at a time.

    matcher: has taken nothing yet; None = no grammar. min_tokens: length of the output from which
    ends are allowed.
    state: `over` when the output is complete and no further token is possible. `failed` when the
    output cannot become complete any more, or the matcher failed. problem: why it failed.
    costly: drafts of the output take too long to be looked at. too_slow: a mask took longer than
    one may. broken: a matcher of its grammar has failed, be it in a draft. Copies of a matcher
    share their lexer, and a lexer that has run out of its limits stays so.
    mask_s: processor time of a mask, a mean that fades. is_busy: some thread uses it, and no step
    may ask it for a mask. is_late: a step had to go on without its mask.
    consume: gives a matcher a token where that takes long. end: a token that masks of the grammar
    allow wherever an output may end, and hardly elsewhere; None = none is known. watches: of what
    neither grammar nor rules know.
    """

    def __init__(
        self,
        matcher: GrammarMatcher | None,
        rules: TokenRules,
        min_tokens: int,
        consume: Callable[[GrammarMatcher, int], object] | None = None,
        end: int | None = None,
        watches: "tuple[Names | Thinking, ...]" = (),
    ) -> None:
        self.state: ConstraintState = "open"
        self.problem = ""
        self.costly = self.too_slow = self.broken = False
        self.mask_s = 0.0
        self.is_busy = self.is_late = False
        self._matcher = matcher
        self._rules = rules
        self._min_tokens = min_tokens
        self._taken = 0
        self._last: deque[int] = deque(maxlen=rules.memory)
        self._noted: deque[int] = deque()  # tokens that are still to be taken
        self._consume, self._grammar_end, self._watches = consume, end, watches
        self._ready: np.ndarray | None = None  # the next token's mask
        # What it becomes with each token of the draft in flight.
        self._ahead: deque[tuple[int, Constraint]] = deque()
        self._look()

    @property
    def num_ids(self) -> int:
        """The number of ids that the sequence may draw without the constraint."""
        return self._rules.vocab_size

    @property
    def is_ready(self) -> bool:
        """Whether the next token's mask has been filled already."""
        return self._ready is not None

    @property
    def has_costly_masks(self) -> bool:
        return self.mask_s > COSTLY_S

    def keep(self, row: np.ndarray) -> None:
        """Keep what `fill` has written, for the next `fill`."""
        self._ready, self.is_late = row[: mask_words(self.num_ids)].copy(), False

    def took(self, seconds: float) -> None:
        """Processor time of a mask."""
        self.mask_s += (_NEWEST if self.mask_s else 1.0) * (seconds - self.mask_s)

    def note(self, token_id: int) -> None:
        """The output's next accepted token, for `catch_up` to take: that may take long."""
        self._noted.append(token_id)

    def catch_up(self, in_time: Callable[[], bool] = lambda: True) -> bool:
        """Take what has been noted, while there is time. Whether that is all."""
        while self._noted and in_time():
            self.take(self._noted.popleft())
        return not self._noted

    def take(self, token_id: int) -> ConstraintState:
        """Take the output's next accepted token. Returns the state after it."""
        if self.state != "open":
            return self.state
        if self._ahead and self._become_next(token_id):
            return self.state
        self._taken += 1
        self._last.append(token_id)
        try:
            for watch in self._watches:
                watch.take(token_id, self._matcher)
            if self._matcher is None or token_id in self._rules.ends:
                return self.state
            if self._consume is not None and self.has_costly_masks:
                self._consume(self._matcher, token_id)
            else:
                self._matcher.consume_token(token_id)
        except BaseException as error:
            self._broke(error)
        self._look()
        return self.state

    def matcher_to_ask(self, words: int) -> GrammarMatcher | None:
        """The matcher that gives the next token's mask, of `words` words.

        None: `fill` alone knows the mask.
        """
        is_grammars = self._rules.grammar_words == words and self.state == "open"
        return self._matcher if is_grammars and self._ready is None else None

    def fill(self, row: np.ndarray, is_asked: bool = False) -> None:
        """Write the mask of the next token, int32 `[words]`, contiguous. No id behind the last is
        allowed. is_asked: the row has what `matcher_to_ask` says.

        Unless the state is and stays `open`, the mask allows all tokens.
        """
        words = mask_words(self.num_ids)
        row[words:] = 0
        row = row[:words]
        if self._ready is not None:
            row[:], self._ready, self.is_late = self._ready, None, False
            return
        self.catch_up()
        if self.state == "open":
            self._fill(row, is_asked)
        if self.state != "open":
            self._rules.allow_all(row)

    def fill_ahead(
        self, draft: Sequence[int], rows: np.ndarray, in_time: Callable[[], bool]
    ) -> None:
        """Write the masks of the tokens that follow those of a draft, int32 `[len(draft), words]`.
        `fill` has been called. in_time: asked after each of them, whether it still counts.

        A mask of nothing ends the draft: what comes there is found out once it is the next token.
        """
        rows.fill(0)
        self._ahead.clear()
        place = self
        for token_id, row in zip(draft, rows, strict=True):
            if place.state == "open":
                place = place._after(token_id)
            if place.state == "open":
                place.fill(row)
                self.broken |= place.broken
            if place.state != "open" or not in_time():
                row.fill(0)
                return
            self._ahead.append((token_id, place))

    def foresee(self, draft: list[int], most: int) -> Foresight:
        """Foresee at most `most` tokens to come. The constraint does not change."""
        self.catch_up()
        if self.state != "open":
            return NO_FORESIGHT
        draft = self._permitted(draft[:most])
        if self._matcher is None:
            return Foresight([], len(draft))
        try:
            # A copy: forced text changes a matcher, and a matcher that fails stays so.
            copy = self._matcher.deep_copy()
            allowed = copy.validate_tokens(draft) if draft else 0
            forced = copy.compute_ff_tokens() if copy.compute_ff_bytes() else []
            self.broken |= copy.is_error()
        except BaseException as error:
            _check_kind(error)
            self.broken = True
        if self.broken:
            return NO_FORESIGHT
        return Foresight(self._permitted(forced[:most]), allowed)

    def give_up(self, problem: str) -> None:
        """Fail the constraint, since going on costs too much."""
        if self.state == "open":
            self._fail(problem)

    def _fill(self, row: np.ndarray, is_asked: bool) -> None:
        matcher, accepts = self._matcher, True
        if matcher is None:
            self._rules.allow_all(row)
        else:
            try:
                own = row[: self._rules.grammar_words]
                row[len(own) :] = 0
                if not is_asked:
                    matcher.unsafe_compute_mask_ptr(own.ctypes.data, own.nbytes)
                accepts = self._may_accept(own) and matcher.is_accepting()
            except BaseException as error:
                self._broke(error)
            self._look()
        # Without a grammar the device holds back ends until `min_tokens`.
        may_end = matcher is None or (accepts and self._taken >= self._min_tokens)
        self._rules.apply(row, may_end, list(self._last))
        for watch in self._watches:
            watch.forbid(row)
        if self.state == "open" and not row.any():
            if accepts:
                self.state = "over"
            else:
                self._fail("no token is left that the request allows")

    def _may_accept(self, own: np.ndarray) -> bool:
        """Whether the output may end here, by the mask: asking the matcher costs more."""
        end = self._grammar_end
        return end is None or bool(int(own[end >> 5]) >> (end & 31) & 1)

    def _permitted(self, token_ids: list[int]) -> list[int]:
        """The first tokens to come that no other rule forbids, and that do not end the output."""
        rules, known, watches = self._rules, [*self._last], [*map(copy, self._watches)]
        count = len(known)
        known += takewhile(lambda token_id: token_id not in rules.ends, token_ids)
        for end in range(count, len(known)):
            if not rules.permits(known[end], known[max(0, end - rules.memory) : end]):
                return known[count:end]
            if any(watch.take(known[end]) for watch in watches):
                return known[count:end]
        return known[count:]

    def _after(self, token_id: int) -> "Constraint":
        """Another one, which has taken one token more."""
        matcher = None if self._matcher is None else self._matcher.deep_copy()
        known = (self._min_tokens, self._consume, self._grammar_end)
        after = Constraint(matcher, self._rules, *known, tuple(map(copy, self._watches)))
        after._taken, after._last = self._taken, self._last.copy()
        after.take(token_id)
        return after

    def _become_next(self, token_id: int) -> bool:
        """Whether the token is the next one of the draft in flight. The matcher of the place behind
        the token is used from now on: it has been asked just what it would be asked without a
        draft."""
        expected, place = self._ahead.popleft()
        if expected != token_id:
            self._ahead.clear()
            return False
        self._matcher, self._taken, self._last = place._matcher, place._taken, place._last
        self._watches = place._watches
        return True

    def _look(self) -> None:
        """Bring the state up to date with the matcher's."""
        if self._matcher is None or self.state != "open":
            return
        if self._matcher.is_error():
            self.broken = True
            self._fail(self._matcher.get_error())
        elif self._matcher.is_stopped():
            self.state = "over"

    def _broke(self, error: BaseException) -> None:
        """Fail after an error of the matcher."""
        _check_kind(error)
        self.broken = True
        self._fail(str(error))

    def _fail(self, problem: str) -> None:
        self.state = "failed"
        self.problem = problem.replace("<non-verbose/>", "").strip()[:500]


def _check_kind(error: BaseException) -> None:
    """Raise `error` again unless a matcher raised it. llguidance's panics are no Exceptions."""
    if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
        raise error


class Thinking:
    """Bounds the reasoning of an output, token by token. A copy is cheap and independent."""

    def __init__(self, budget: ThinkingBudget) -> None:
        self._left = budget.tokens
        # What begins the reasoning, and what ends it; () once that is there.
        self._opens, self._closes = budget.opens, budget.closes
        self._last: tuple[int, ...] = ()

    @property
    def _forced(self) -> int | None:
        """The next token, where the reasoning must end."""
        if self._opens or self._left > 0 or not self._closes:
            return None
        sizes = range(len(self._closes) - 1, 0, -1)
        begun = next((n for n in sizes if self._last[-n:] == self._closes[:n]), 0)
        return self._closes[begun]

    def take(self, token_id: int, _matcher: object = None) -> bool:
        """Whether another token had to come."""
        forced = self._forced
        sought = self._opens or self._closes
        self._last = (*self._last, token_id)[-len(sought) :]
        self._left -= not self._opens
        if self._opens and self._last == sought:
            self._opens, self._last = (), ()
        elif self._last == sought:
            self._closes = ()
        return forced not in (None, token_id)

    def forbid(self, mask: np.ndarray) -> None:
        """Leave the token alone that must come in a mask, int32 `[words]`, if it allows it."""
        forced = self._forced
        if forced is not None and mask[forced >> 5] >> (forced & 31) & 1:
            mask[:] = 0
            mask.view(np.uint32)[forced >> 5] = 1 << (forced & 31)
