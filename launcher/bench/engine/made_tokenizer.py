"""A byte-level tokenizer of any vocabulary size, for models that were made up. Pure."""

import itertools
import json
from collections.abc import Iterator, Sequence
from string import ascii_lowercase

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
    added = [
        {
            "id": token_id,
            "content": f"<|{token_id}|>",
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
            "special": True,
        }
        for token_id in sorted(special)
    ]
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}
    return json.dumps(
        {
            "version": "1.0",
            "truncation": None,
            "padding": None,
            "added_tokens": added,
            "normalizer": None,
            "pre_tokenizer": {**byte_level, "use_regex": True},
            "post_processor": None,
            "decoder": {**byte_level, "use_regex": True},
            "model": {
                "type": "BPE",
                "dropout": None,
                "unk_token": None,
                "continuing_subword_prefix": None,
                "end_of_word_suffix": None,
                "fuse_unk": False,
                "byte_fallback": False,
                "vocab": vocab,
                "merges": [],
            },
        }
    )


def _words() -> Iterator[str]:
    for length in itertools.count(3):
        for letters in itertools.product(ascii_lowercase, repeat=length):
            yield _SPACE + "".join(letters)
