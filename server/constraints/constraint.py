"""The tokens that one sequence may draw next: by its grammar, and by its request beside. Pure.

A matcher goes as deep as its grammar: whoever fills masks has a stack for it (`DeepThreads`).
"""

from collections import deque
from typing import Literal, Protocol

import numpy as np

from server.constraints.rules import TokenRules

ConstraintState = Literal["open", "over", "failed"]


class GrammarMatcher(Protocol):
    """What is used of llguidance's LLMatcher."""

    def consume_token(self, sampled_token: int) -> bool: ...

    def is_error(self) -> bool: ...

    def get_error(self) -> str: ...

    def is_accepting(self) -> bool: ...

    def is_stopped(self) -> bool: ...

    def unsafe_compute_mask_ptr(self, trg_pointer: int, trg_byte_size: int) -> None: ...


class Constraint:
    """For one thread at a time.

    matcher: before the output's first token; None = no grammar. min_tokens: so many the output has
    before its ends are allowed.
    state: `over` when no further token is possible and the output is what it must be; `failed` when
    it cannot become that any more, or the matcher failed. problem: why.
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

    def take(self, token_id: int) -> ConstraintState:
        """The output's next token. Returns the state after it."""
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
        """Write the mask of the next token, int32 `[ceil(vocab / 32)]`, contiguous: all tokens
        where the state is or becomes another than `open`."""
        if self.state == "open":
            self._fill(row)
        if self.state != "open":
            self._rules.allow_all(row)

    def give_up(self, problem: str) -> None:
        """It costs too much to go on."""
        if self.state == "open":
            self._fail(problem)

    def _fill(self, row: np.ndarray) -> None:
        matcher, accepts = self._matcher, True
        if matcher is None:
            self._rules.allow_all(row)
        else:
            try:
                matcher.unsafe_compute_mask_ptr(row.ctypes.data, row.nbytes)
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
        """What the matcher says of itself."""
        if self._matcher is None or self.state != "open":
            return
        if self._matcher.is_error():
            self._fail(self._matcher.get_error())
        elif self._matcher.is_stopped():
            self.state = "over"

    def _broke(self, error: BaseException) -> None:
        """Panics of llguidance's are no Exceptions."""
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise error
        self._fail(str(error))

    def _fail(self, problem: str) -> None:
        self.state = "failed"
        self.problem = problem.replace("<non-verbose/>", "").strip()[:500]
