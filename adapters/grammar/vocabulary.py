"""A model's tokens as llguidance reads them: by their bytes."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

from llguidance import LLTokenizer

from loraplex.adapters.grammar.token_bytes import UnknownBytes, token_bytes


class VocabularyError(ValueError):
    """No grammar can be held to with this tokenizer; str() says why."""


class KnownTokens(NamedTuple):
    """by_id: bytes of all ids of the model. end_ids: tokens that llguidance allows where a grammar
    may end. specials: texts of the tokens that are no text in an answer, ends among them, by id.
    """

    by_id: list[bytes]
    end_ids: tuple[int, ...]
    specials: dict[int, bytes]


class Vocabulary(NamedTuple):
    """tokenizer: shared by all matchers."""

    tokenizer: LLTokenizer
    tokens: KnownTokens

    @property
    def size(self) -> int:
        """Of the model, which is that of masks."""
        return len(self.tokens.by_id)

    @property
    def end_ids(self) -> tuple[int, ...]:
        return self.tokens.end_ids

    @property
    def specials(self) -> dict[int, bytes]:
        return self.tokens.specials

    @property
    def mask_words(self) -> int:
        """int32 words of one mask."""
        return -(-self.size // 32)


class _TokenList:
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


def make_vocabulary(tokenizer_json: str, vocab_size: int, end_ids: Sequence[int]) -> Vocabulary:
    """As `read_tokens` and `vocabulary_of`, which take about a second for 128k tokens."""
    return vocabulary_of(read_tokens(tokenizer_json, vocab_size, end_ids))


def read_tokens(tokenizer_json: str, vocab_size: int, end_ids: Sequence[int]) -> KnownTokens:
    """vocab_size: of the model, at least one more than its highest token id.

    end_ids: the model's end tokens. Special tokens and ends are no text: a grammar names them as
    `<[id]>`. Raises VocabularyError.
    """
    ends = tuple(sorted({i for i in end_ids if 0 <= i < vocab_size}))
    if not ends:
        raise VocabularyError("the model has no end token, so no answer could end")
    try:
        by_id, specials = token_bytes(tokenizer_json, vocab_size)
    except UnknownBytes as error:
        raise VocabularyError(str(error)) from None
    return KnownTokens(by_id, ends, {i: by_id[i] for i in sorted({*specials, *ends})})


def vocabulary_of(tokens: KnownTokens) -> Vocabulary:
    """Raises VocabularyError."""
    wrapped = _TokenList(tokens.by_id, sorted(tokens.specials), tokens.end_ids[0])
    try:
        tokenizer = LLTokenizer(wrapped, eos_token=list(tokens.end_ids))  # type: ignore[arg-type]
    except ValueError as error:
        raise VocabularyError(f"llguidance cannot use the tokenizer: {error}") from None
    wrapped.greedy = tokenizer.greedy_tokenize
    return Vocabulary(tokenizer, tokens)
