"""A model's tokens as llguidance reads them: by their bytes."""

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from llguidance import LLTokenizer

from adapters.grammar.token_bytes import UnknownBytes, token_bytes


class VocabularyError(ValueError):
    """No grammar can be held to with this tokenizer; str() says why."""


class Vocabulary(NamedTuple):
    """tokenizer: shared by all matchers. size: of the model, which is that of masks.

    end_ids: tokens that llguidance allows where a grammar may end. specials: texts of the tokens
    that are no text in an answer, ends among them, by id.
    """

    tokenizer: LLTokenizer
    size: int
    end_ids: tuple[int, ...]
    specials: dict[int, bytes]

    @property
    def mask_words(self) -> int:
        """int32 words of one mask."""
        return -(-self.size // 32)


class _Tokens:
    """What LLTokenizer asks of a tokenizer."""

    is_tokenizer_wrapper = True
    bos_token_id = None

    def __init__(self, by_id: list[bytes], specials: Sequence[int], end_id: int) -> None:
        self.tokens = by_id
        self.special_token_ids = specials
        self.eos_token_id = end_id
        self.greedy: Callable[[str], list[int]] = lambda text: []

    def __call__(self, text: str) -> list[int]:
        """Tokens of text that a grammar forces: the longest at each place."""
        return self.greedy(text)


def _tokenizer(
    by_id: list[bytes], specials: Mapping[int, bytes], ends: tuple[int, ...]
) -> LLTokenizer:
    tokens = _Tokens(by_id, sorted(specials), ends[0])
    tokenizer = LLTokenizer(tokens, eos_token=list(ends))  # type: ignore[arg-type]
    tokens.greedy = tokenizer.greedy_tokenize
    return tokenizer


def make_vocabulary(tokenizer_json: str, vocab_size: int, end_ids: Sequence[int]) -> Vocabulary:
    """vocab_size: of the model, at least one more than its highest token id.

    end_ids: the model's end tokens. Special tokens and ends are no text: a grammar names them as
    `<[id]>`. Takes about a second for 128k tokens. Raises VocabularyError.
    """
    by_id, ends, names = _read(tokenizer_json, vocab_size, end_ids)
    try:
        tokenizer = _tokenizer(by_id, names, ends)
    except ValueError as error:
        raise VocabularyError(f"llguidance cannot use the tokenizer: {error}") from None
    return Vocabulary(tokenizer, vocab_size, ends, names)


def end_names(
    tokenizer_json: str, vocab_size: int, end_ids: Sequence[int]
) -> tuple[tuple[int, ...], dict[int, bytes]]:
    """end_ids and specials of the vocabulary, without making it. Raises VocabularyError."""
    return _read(tokenizer_json, vocab_size, end_ids)[1:]


def _read(
    tokenizer_json: str, vocab_size: int, end_ids: Sequence[int]
) -> tuple[list[bytes], tuple[int, ...], dict[int, bytes]]:
    """Bytes of all tokens, ends, and texts of those that are no text."""
    ends = tuple(sorted({i for i in end_ids if 0 <= i < vocab_size}))
    if not ends:
        raise VocabularyError("the model has no end token, so no answer could end")
    try:
        by_id, specials = token_bytes(tokenizer_json, vocab_size)
    except UnknownBytes as error:
        raise VocabularyError(str(error)) from None
    return by_id, ends, {i: by_id[i] for i in sorted({*specials, *ends})}


def byte_vocabulary(size: int, end_ids: tuple[int, ...], specials: dict[int, bytes]) -> Vocabulary:
    """The same special tokens, but text in single bytes, whose ids follow the others."""
    by_id = [specials.get(i, b"") for i in range(size)] + [bytes((i,)) for i in range(256)]
    return Vocabulary(_tokenizer(by_id, specials, end_ids), len(by_id), end_ids, specials)
