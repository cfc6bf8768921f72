"""The base's tokenizer with an adapter's tokens."""

import asyncio

import pytest
from tokenizers import AddedToken, Tokenizer

from loraplex.adapters.manifest import AdapterManifest, OwnToken
from loraplex.router.text.model import AdapterModels
from tests.router.text.small_models import KINDS, text_model

NAME, TEXT = "<tool>", "a <tool> b<tool>"


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("normalized", [True, False])
def test_an_added_token_is_the_library_s(kind: str, normalized: bool) -> None:
    """A vocabulary may spell a token that is normalised otherwise: `▁<tool>`."""
    base = text_model(kind)
    size = base.card.vocab_size
    added = (OwnToken(size, NAME, normalized=normalized),)
    manifest = AdapterManifest(
        "d" * 64, "base", ("q_proj",), (8,), 1, "F32", added_tokens=added, table_size=size + 1
    )
    model = asyncio.run(AdapterModels().of(base, manifest))
    library = Tokenizer.from_str(base.card.tokenizer_json)
    library.add_tokens([AddedToken(NAME, normalized=normalized)])
    ids = library.encode(TEXT).ids
    assert size in ids
    assert model.encode(TEXT, add_special_tokens=True) == ids
    assert model.decode(ids) == library.decode(ids)
