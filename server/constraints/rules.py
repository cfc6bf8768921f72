"""What a request says of the tokens that it may draw, beside its grammar. Pure."""

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from server.protocol import SamplingParams


def mask_words(vocab_size: int) -> int:
    """int32 words of one mask."""
    return -(-vocab_size // 32)


@dataclass(frozen=True, slots=True)
class TokenRules:
    """Masks are int32 `[ceil(vocab / 32)]`; bit i % 32 of word i // 32 is that of token i.

    ends: tokens that end the output. every: all tokens. allowed: `allowed_token_ids` and the ends,
    None = all. bad_words: as in SamplingParams.
    """

    ends: frozenset[int]
    end_bits: np.ndarray
    every: np.ndarray
    allowed: np.ndarray | None
    bad_words: tuple[tuple[int, ...], ...]

    @classmethod
    def of(cls, sampling: SamplingParams, eos: Collection[int], vocab_size: int) -> "TokenRules":
        """eos: the worker's ends. Ids are below `vocab_size`."""
        ends = frozenset(sampling.stop_token_ids)
        if not sampling.ignore_eos:
            ends |= {*eos, *sampling.end_token_ids}
        allowed = sampling.allowed_token_ids
        return cls(
            ends=ends,
            end_bits=_bits(ends, vocab_size),
            every=_bits(range(vocab_size), vocab_size),
            allowed=_bits({*allowed, *ends}, vocab_size) if allowed else None,
            bad_words=sampling.bad_words,
        )

    @property
    def memory(self) -> int:
        """Tokens of the output that decide on the next one."""
        return max((len(word) for word in self.bad_words), default=1) - 1

    def apply(self, row: np.ndarray, may_end: bool, last: Sequence[int]) -> None:
        """Change a mask. may_end: whether ends are allowed. last: the last `memory` tokens of the
        output, or all of fewer."""
        if may_end:
            row |= self.end_bits
        else:
            row &= ~self.end_bits
        if self.allowed is not None:
            row &= self.allowed
        for word in self.bad_words:
            begun = len(word) - 1
            if begun <= len(last) and tuple(last[len(last) - begun :]) == word[:-1]:
                _clear(row, word[-1])


def _bits(ids: Iterable[int], vocab_size: int) -> np.ndarray:
    bits = np.zeros(32 * mask_words(vocab_size), dtype=np.uint8)
    bits[np.fromiter(ids, dtype=np.int64)] = 1
    return np.packbits(bits, bitorder="little").view("<i4").astype(np.int32)


def _clear(row: np.ndarray, token_id: int) -> None:
    row.view(np.uint32)[token_id >> 5] &= np.uint32(~(1 << (token_id & 31)) & 0xFFFFFFFF)
