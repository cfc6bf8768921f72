"""Log-probabilities of the tokens of a message's text, as `/v1/responses` has them. Pure."""

from collections import deque
from collections.abc import Sequence

from loraplex.router.api.openai.chat import ChatTokenLogprob, TopLogprob, bytes_of
from loraplex.router.api.wire import finite
from loraplex.router.call import TextToken


class TextLogprobs:
    """Finds the tokens of a text among those of an answer, which has reasoning and calls, too.

    wanted: the likeliest tokens a place; None = nothing is reported.
    """

    def __init__(self, wanted: int | None) -> None:
        self._is_wanted = wanted is not None
        self._tokens: deque[TextToken] = deque()
        self._reasoning = 0
        self._owed = 0

    def add(self, tokens: Sequence[TextToken], num_reasoning: int) -> None:
        """The answer's next tokens. num_reasoning: of all that came, more are the reasoning's."""
        self._tokens.extend(tokens)
        self._reasoning += num_reasoning
        while self._tokens and self._reasoning:
            self._tokens.popleft()
            self._reasoning -= 1

    def take(self, piece: str) -> tuple[ChatTokenLogprob, ...]:
        """Those of the next piece of the text."""
        if not self._is_wanted:
            return ()
        found: list[ChatTokenLogprob] = []
        self._owed += len(piece)
        while self._tokens and self._owed > 0:
            token = self._tokens.popleft()
            self._owed -= len(token.text)
            if token.text or not token.special:
                found.append(_of(token))
        return tuple(found)


def _of(token: TextToken) -> ChatTokenLogprob:
    """Bytes are empty where they are not known."""
    raw = bytes_of(token.token) if token.raw is None else list(token.raw)
    top = [TopLogprob(t.text, finite(t.logprob), bytes_of(t.text) or []) for t in token.top]
    return ChatTokenLogprob(token.token, finite(token.logprob), raw or [], top)
