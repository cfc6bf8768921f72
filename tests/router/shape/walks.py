"""Random answers through the masks of a matcher."""

import random
from collections.abc import Sequence

import numpy as np
from llguidance import LLMatcher
from numpy.typing import NDArray

from loraplex.adapters.grammar.compile import compile_grammar
from loraplex.adapters.grammar.limits import GrammarLimits
from loraplex.adapters.grammar.vocabulary import Vocabulary
from tests.vocabularies import byte_vocabulary

# Bytes that end something: a walk takes them more often, so that it comes to its end.
_CLOSING = b'"]}'


class DeadEnd(AssertionError):
    """The masks led to where nothing may follow."""


def walk(
    matcher: LLMatcher,
    vocabulary: Vocabulary,
    tokens: Sequence[bytes],
    seed: int,
    most: int,
    begin: Sequence[int] = (),
) -> str | None:
    """A whole answer of at most so many tokens beyond `begin`, or None. tokens: bytes of each id.

    Every token that a mask allows may come. Later ones tend to close what is open. Raises DeadEnd.
    """
    rng = random.Random(seed)
    matcher = matcher.deep_copy()
    ends = set(vocabulary.end_ids)
    out = list(begin)
    if begin and not matcher.consume_tokens(out):
        raise DeadEnd(_shown(out, tokens))
    for step in range(most):
        allowed = _allowed(matcher)
        if not len(allowed):
            if matcher.is_accepting():
                return _text(out, tokens)
            raise DeadEnd(_shown(out, tokens))
        chosen = _chosen(rng, allowed, tokens, ends, step / most)
        if chosen in ends:
            return _text(out, tokens)
        out.append(chosen)
        if not matcher.consume_token(chosen) or matcher.is_error():
            raise DeadEnd(f"{matcher.get_error()} after {_shown(out, tokens)}")
        if matcher.is_stopped():
            return _text(out, tokens)
    return None


def _allowed(matcher: LLMatcher) -> NDArray[np.int64]:
    bits = np.unpackbits(np.frombuffer(matcher.compute_bitmask(), np.uint8), bitorder="little")
    return np.flatnonzero(bits)


def _chosen(
    rng: random.Random,
    allowed: NDArray[np.int64],
    tokens: Sequence[bytes],
    ends: set[int],
    progress: float,
) -> int:
    """Half of the later choices fall on an end or on what closes, where there is one."""
    if rng.random() < 0.1 + 0.8 * progress:
        some = allowed if len(allowed) < 512 else rng.sample(allowed.tolist(), 512)
        closing = [i for i in some if i in ends or (tokens[i] and tokens[i][0] in _CLOSING)]
        closing += [end for end in ends if end in allowed]
        if closing:
            return int(rng.choice(closing))
    return int(allowed[rng.randrange(len(allowed))])


def _text(ids: Sequence[int], tokens: Sequence[bytes]) -> str:
    return b"".join(tokens[i] for i in ids).decode()


def _shown(ids: Sequence[int], tokens: Sequence[bytes]) -> str:
    return repr(b"".join(tokens[i] for i in ids))


class Words:
    """A vocabulary and the bytes of its tokens."""

    def __init__(self, vocabulary: Vocabulary, tokens: list[bytes]) -> None:
        self.vocabulary = vocabulary
        self.tokens = tokens

    def answers(self, grammar: str, seeds: int, most: int, begin: str = "") -> list[str]:
        """Whole ones. begin: their first characters, token by character."""
        matcher = compile_grammar(self.vocabulary, grammar, GrammarLimits())
        ids = [self.tokens.index(character.encode()) for character in begin]
        found = (walk(matcher, self.vocabulary, self.tokens, s, most, ids) for s in range(seeds))
        return [text for text in found if text is not None]


BYTES = Words(byte_vocabulary(1, (0,), {0: b"</s>"}), [b"</s>", *(bytes((i,)) for i in range(256))])
