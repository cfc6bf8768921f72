"""A byte-level tokenizer of any vocabulary size, for models that were made up. Pure."""

import itertools
from collections.abc import Iterator, Sequence
from string import ascii_lowercase

from tokenizers import AddedToken, Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE

from loraplex.adapters.byte_tokens import BYTE_OF_CHAR

_SPACE = "Ġ"  # how byte-level vocabularies spell a space before a word


def tokenizer_json(vocab_size: int, special: Sequence[int]) -> str:
    """Writes a `tokenizer.json`: every byte that the vocabulary has room for, then made-up
    words, so that every id has a text. special: ids that have none."""
    words = itertools.chain(BYTE_OF_CHAR, _words())
    vocab: dict[str, int] = {}
    for token_id in range(vocab_size):
        token = f"<|{token_id}|>" if token_id in special else next(words)
        vocab[token] = token_id
    tokenizer = Tokenizer(BPE(vocab, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    added = [AddedToken(f"<|{token_id}|>", special=True) for token_id in sorted(special)]
    tokenizer.add_special_tokens(added)
    return str(tokenizer.to_str())


def _words() -> Iterator[str]:
    for length in itertools.count(3):
        for letters in itertools.product(ascii_lowercase, repeat=length):
            yield _SPACE + "".join(letters)
