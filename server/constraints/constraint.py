"""The tokens that a sequence may draw next, by its grammar and its other token rules. Pure.

A matcher recurses as deep as its grammar, so masks are filled and drafts are looked at in threads
with a large stack (`DeepThreads`).
"""

from collections import deque
from collections.abc import Callable, Sequence
from copy import copy
from itertools import takewhile
from typing import Literal, NamedTuple, Protocol

import numpy as np

from loraplex.server.constraints.names import NameMatcher, Names
from loraplex.server.constraints.rules import TokenRules, mask_words
from loraplex.server.protocol import ThinkingBudget

ConstraintState = Literal["open", "over", "failed"]


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
