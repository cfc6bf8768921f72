"""The tokens that a sequence may draw next, by its grammar and its other token rules. Pure.

A matcher recurses as deep as its grammar, so masks are filled in threads with a large stack
(`DeepThreads`).
"""

from collections import deque
from typing import Literal, Protocol

import numpy as np

from server.constraints.rules import TokenRules, mask_words

ConstraintState = Literal["open", "over", "failed"]


class GrammarMatcher(Protocol):
    """The methods of llguidance's LLMatcher that are used."""

    def consume_token(self, sampled_token: int) -> bool: ...

    def is_error(self) -> bool: ...

    def get_error(self) -> str: ...

    def is_accepting(self) -> bool: ...

    def is_stopped(self) -> bool: ...

    def unsafe_compute_mask_ptr(self, trg_pointer: int, trg_byte_size: int) -> None: ...


class Constraint:
    """For one thread at a time.

    matcher: has taken nothing yet; None = no grammar. min_tokens: length of the output from which
    ends are allowed.
    state: `over` when the output is complete and no further token is possible. `failed` when the
    output cannot become complete any more, or the matcher failed. problem: why it failed.
    """

    def __init__(self, matcher: GrammarMatcher | None, rules: TokenRules, min_tokens: int) -> None:
        self.state: ConstraintState = "open"
        self.problem = ""
        self._matcher = matcher
        self._rules = rules
        self._min_tokens = min_tokens
        self._taken = 0
        self._last: deque[int] = deque(maxlen=rules.memory)
        self._look()

    @property
    def num_ids(self) -> int:
        """Those that its sequence may draw without it."""
        return self._rules.vocab_size

    def take(self, token_id: int) -> ConstraintState:
        """Take the output's next accepted token. Returns the state after it."""
        if self.state != "open":
            return self.state
        self._taken += 1
        self._last.append(token_id)
        if self._matcher is None or token_id in self._rules.ends:
            return self.state
        try:
            self._matcher.consume_token(token_id)
        except BaseException as error:
            self._broke(error)
        self._look()
        return self.state

    def fill(self, row: np.ndarray) -> None:
        """Write the mask of the next token, int32 `[words]`, contiguous. No id behind the last is
        allowed.

        Unless the state is and stays `open`, the mask allows all tokens.
        """
        words = mask_words(self.num_ids)
        row[words:] = 0
        row = row[:words]
        if self.state == "open":
            self._fill(row)
        if self.state != "open":
            self._rules.allow_all(row)

    def give_up(self, problem: str) -> None:
        """Fail: going on costs too much."""
        if self.state == "open":
            self._fail(problem)

    def _fill(self, row: np.ndarray) -> None:
        matcher, accepts = self._matcher, True
        if matcher is None:
            self._rules.allow_all(row)
        else:
            try:
                own = row[: self._rules.grammar_words]
                row[len(own) :] = 0
                matcher.unsafe_compute_mask_ptr(own.ctypes.data, own.nbytes)
                accepts = matcher.is_accepting()
            except BaseException as error:
                self._broke(error)
            self._look()
        # Without a grammar the device holds back ends until `min_tokens`.
        may_end = matcher is None or (accepts and self._taken >= self._min_tokens)
        self._rules.apply(row, may_end, list(self._last))
        if self.state == "open" and not row.any():
            if accepts:
                self.state = "over"
            else:
                self._fail("no token is left that the request allows")

    def _look(self) -> None:
        """Bring the state up to date with the matcher's."""
        if self._matcher is None or self.state != "open":
            return
        if self._matcher.is_error():
            self._fail(self._matcher.get_error())
        elif self._matcher.is_stopped():
            self.state = "over"

    def _broke(self, error: BaseException) -> None:
        """Fail after an error of the matcher. Panics of llguidance are not Exceptions."""
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise error
        self._fail(str(error))

    def _fail(self, problem: str) -> None:
        self.state = "failed"
        self.problem = problem.replace("<non-verbose/>", "").strip()[:500]
