"""An answer's token ids to its text, as they come. Pure.

D is the tokenizers library's `decode`, with or without special tokens. An answer's text is
D(prompt + answer) without its longest common prefix with D(prompt). So a character that the prompt
leaves unfinished belongs to the answer.
"""

from collections.abc import Sequence
from typing import Protocol

from loraplex.router.text.text_decoder import TextDecoder


class Tokens(Protocol):
    """Facts about the vocabulary that a detokenizer needs."""

    def token(self, token_id: int) -> str | None:
        """The token as the vocabulary spells it; None for ids that stand for nothing."""
        ...

    def is_special(self, token_id: int) -> bool:
        """Whether the token is left out of a text without special tokens."""
        ...

    def is_added(self, token_id: int) -> bool:
        """Whether the token was added to the model's own vocabulary."""
        ...


class Detokenizer:
    """The text of one answer. At first it stands before the prompt.

    skip_special_tokens, spaces_between_special_tokens: as in GenerationCall.
    """

    __slots__ = (
        *("_after_added", "_decoder", "_kept", "_known"),
        *("_skip_special", "_spaces", "_tokens"),
    )

    def __init__(
        self,
        tokens: Tokens,
        decoder: TextDecoder,
        skip_special_tokens: bool = True,
        spaces_between_special_tokens: bool = True,
    ) -> None:
        self._tokens = tokens
        self._decoder = decoder
        self._skip_special = skip_special_tokens
        self._spaces = skip_special_tokens or spaces_between_special_tokens
        self._after_added = False
        self._known = ""
        self._kept: frozenset[int] = frozenset()

    def keep(self, ids: frozenset[int]) -> None:
        """Makes special tokens part of the text from now on."""
        self._kept = ids

    def read_prompt(self, ids: Sequence[int]) -> None:
        """Reads the prompt, once, before any push. What settles nothing is not looked at, so that
        for most tokenizers the work does not grow with the prompt.
        """
        decoder = self._decoder
        count = self._begin(ids)
        for token in self._settled_end(ids[count:]):
            decoder.push(token)
        self._known = decoder.copy().flush() if decoder.holding else ""

    def push(self, token_id: int) -> str:
        """The text that the token makes certain."""
        return "" if self.is_left_out(token_id) else self.write(token_id)

    def write(self, token_id: int) -> str:
        """Gives the text as `push` does, of a token that is known not to be left out."""
        token = self._tokens.token(token_id)
        if token is None:
            return ""
        text = self._decoder.push(token)
        if not self._spaces:
            text = self._without_space(token_id, token, text)
        return self._new(text) if self._known else text

    def flush(self) -> str:
        """The text that was held back, at the end. Nothing may be pushed after it."""
        return self._new(self._decoder.flush())

    def held(self) -> str:
        """The text that a flush would give now."""
        return self.copy().flush() if self._decoder.holding else ""

    @property
    def holding(self) -> bool:
        """Whether text of tokens that were pushed may still come."""
        return self._decoder.holding

    def copy(self) -> "Detokenizer":
        twin = Detokenizer(self._tokens, self._decoder.copy(), self._skip_special, self._spaces)
        twin._after_added = self._after_added
        twin._known = self._known
        twin._kept = self._kept
        return twin

    def is_left_out(self, token_id: int) -> bool:
        if not self._skip_special or token_id in self._kept:
            return False
        return self._tokens.is_special(token_id)

    def _begin(self, ids: Sequence[int]) -> int:
        """Reads the first tokens; counts them until what is done at the start alone is over."""
        for count, token_id in enumerate(ids):
            if self._decoder.begun:
                return count
            token = self._written(token_id)
            if token is not None:
                self._decoder.push(token)
        return len(ids)

    def _settled_end(self, ids: Sequence[int]) -> list[str]:
        """The end of the prompt, from a token on before which it does not matter what was."""
        tokens: list[str] = []
        for token_id in reversed(ids):
            token = self._written(token_id)
            if token is not None:
                tokens.append(token)
                if self._decoder.settles(token):
                    break
        return tokens[::-1]

    def _written(self, token_id: int) -> str | None:
        return None if self.is_left_out(token_id) else self._tokens.token(token_id)

    def _new(self, text: str) -> str:
        """The new text, without what the end of the prompt alone would have given."""
        count = common_prefix(text, self._known)
        self._known = self._known[count:] if count == len(text) else ""
        return text[count:]

    def _without_space(self, token_id: int, token: str, text: str) -> str:
        """The text without the space between two added tokens, as in vLLM."""
        added, after = self._tokens.is_added(token_id), self._after_added
        self._after_added = added
        return token if added and after and text.lstrip(" ") == token.lstrip(" ") else text


def common_prefix(one: str, other: str) -> int:
    """Counts the characters that both begin with."""
    most = min(len(one), len(other))
    if one[:most] == other[:most]:
        return most
    return next(i for i in range(most) if one[i] != other[i])
