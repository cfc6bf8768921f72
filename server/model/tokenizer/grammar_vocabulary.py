"""A base's tokens for grammars, from the files of its folder. No torch."""

from collections.abc import Collection
from pathlib import Path

from loraplex.adapters.grammar.vocabulary import Vocabulary, VocabularyError, make_vocabulary
from loraplex.server.model.checkpoint.checkpoint import CheckpointError
from loraplex.server.model.tokenizer.base_templates import template_tokens
from loraplex.server.model.tokenizer.base_tokenizer import read_tokenizer, special_token_settings


def read_vocabulary(folder: Path, vocab_size: int, eos: Collection[int]) -> Vocabulary:
    """Read the vocabulary that grammars are checked by. eos: the model's ends; where it has none,
    it is what the tokenizer's files call so. Raises VocabularyError.
    """
    try:
        tokenizer, text = read_tokenizer(folder)
        special = template_tokens(special_token_settings(folder))
        named = tokenizer.token_to_id(special.get("eos_token", ""))
    except CheckpointError as error:
        raise VocabularyError(str(error)) from None
    ends = [*eos] or ([] if named is None else [named])
    return make_vocabulary(text, vocab_size, ends)
