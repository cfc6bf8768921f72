"""A request's rules about the tokens that it may draw, apart from its grammar. Pure."""

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from loraplex.adapters.base import MAX_NEW_IDS
from loraplex.server.protocol import SamplingParams


def mask_words(vocab_size: int) -> int:
    """int32 words of one mask."""
    return -(-vocab_size // 32)


def step_words(vocab_size: int, num_ids: Iterable[int]) -> int:
    """Words of each mask of a step. vocab_size: of the base. num_ids: of each row that has a mask.

    There are as many as the logits of rows with new ids have columns, if one has such ids.
    """
    is_wide = any(each > vocab_size for each in num_ids)
    return mask_words(vocab_size + MAX_NEW_IDS if is_wide else vocab_size)


@dataclass(frozen=True, slots=True)
class TokenRules:
    """Masks are int32 `[ceil(vocab / 32)]`; bit i % 32 of word i // 32 stands for token i.

    ends: tokens that end the output. end_words: int64 `[n]`, words of a mask with bits of ends.
    end_bits: uint32 `[n]`, the bits of ends in these words. allowed: mask of `allowed_token_ids`
    and the ends, None = all. bad_words: as in SamplingParams. grammar_words: of the mask that a
    grammar fills: grammars are written in the base's tokens.
    """

    vocab_size: int
    ends: frozenset[int]
    end_words: np.ndarray
    end_bits: np.ndarray
    allowed: np.ndarray | None
    bad_words: tuple[tuple[int, ...], ...]
    grammar_words: int

    @classmethod
    def of(
        cls,
        sampling: SamplingParams,
        eos: Collection[int],
        vocab_size: int,
        of_base: int | None = None,
    ) -> "TokenRules":
        """Make the rules of one request's sampling parameters. eos: the worker's end tokens. All
        ids are below `vocab_size`. of_base: ids of the base, where these are fewer.
        """
        ends = frozenset(sampling.stop_token_ids)
        if not sampling.ignore_eos:
            ends |= {*eos, *sampling.end_token_ids}
        mask = _mask(ends, vocab_size)
        words = np.flatnonzero(mask)
        allowed = sampling.allowed_token_ids
        return cls(
            vocab_size=vocab_size,
            ends=ends,
            end_words=words,
            end_bits=mask.view(np.uint32)[words],
            allowed=_mask({*allowed, *ends}, vocab_size) if allowed else None,
            bad_words=sampling.bad_words,
            grammar_words=mask_words(of_base or vocab_size),
        )

    @property
    def memory(self) -> int:
        """The number of last tokens that decide about the next one."""
        return max((len(word) for word in self.bad_words), default=1) - 1

    def allow_all(self, row: np.ndarray) -> None:
        """Make it the mask of all tokens."""
        row.fill(-1)
        if self.vocab_size % 32:
            row[-1] = (1 << self.vocab_size % 32) - 1

    def apply(self, row: np.ndarray, may_end: bool, last: Sequence[int]) -> None:
        """Change a mask. may_end: whether ends are allowed. last: the last `memory` tokens of the
        output, or all tokens if there are fewer."""
        words = row.view(np.uint32)
        if may_end:
            words[self.end_words] |= self.end_bits
        else:
            words[self.end_words] &= ~self.end_bits
        if self.allowed is not None:
            row &= self.allowed
        for word in self.bad_words:
            if _is_begun(word, last):
                words[word[-1] >> 5] &= ~(np.uint32(1) << np.uint32(word[-1] & 31))

    def permits(self, token_id: int, last: Sequence[int]) -> bool:
        """Whether the token may come after the last `memory` tokens of the output. Ends: see
        `apply`."""
        if self.allowed is not None:
            word = int(self.allowed.view(np.uint32)[token_id >> 5])
            if not word >> (token_id & 31) & 1:
                return False
        return not any(word[-1] == token_id and _is_begun(word, last) for word in self.bad_words)


def _is_begun(word: tuple[int, ...], last: Sequence[int]) -> bool:
    """Whether only the last token of a bad word is to come."""
    begun = len(word) - 1
    return begun <= len(last) and tuple(last[len(last) - begun :]) == word[:-1]


def _mask(ids: Collection[int], vocab_size: int) -> np.ndarray:
    words = np.zeros(mask_words(vocab_size), dtype=np.uint32)
    at = np.array([*ids], dtype=np.int64)
    np.bitwise_or.at(words, at >> 5, np.uint32(1) << (at & 31).astype(np.uint32))
    return words.view(np.int32)
