"""The text side of adapters that add tokens: the base's tokenizer with theirs."""

import json
import sys
from collections.abc import Sequence
from functools import partial

import msgspec

from loraplex.adapters.common.recent import Recent
from loraplex.adapters.manifest import AdapterManifest, OwnToken
from loraplex.router.call import RequestError
from loraplex.router.text.model import TextModel
from loraplex.server.protocol import ModelCard

# A large tokenizer takes some 100 MB.
MAX_MODELS = 8

# Added tokens, and the size of a table that is smaller than the base's.
_Key = tuple[tuple[OwnToken, ...], int]


class AdapterModels:
    """Text models of adapters: made at the first use, in turn, and kept while in use."""

    def __init__(self) -> None:
        self._kept: Recent[_Key, TextModel] = Recent(MAX_MODELS)

    async def of(self, base: TextModel, manifest: AdapterManifest | None) -> TextModel:
        """The text model of an adapter. The base's own for adapters that change nothing of it.

        Raises RequestError (adapter_invalid) for tokens that the library gives other ids.
        """
        if manifest is None or not (manifest.added_tokens or manifest.table_size):
            return base
        key = manifest.added_tokens, manifest.table_size
        found = self._known(base, key)
        if found is None:
            # As a text that is too large for another beside it: one is made at a time.
            found = await base.turns.run_apart("text", sys.maxsize, partial(self._made, base, key))
        return found.taking(base.turns)

    def _made(self, base: TextModel, key: _Key) -> TextModel:
        """Makes the model of an adapter's tokens, or finds it. Raises as `of`."""
        found = self._known(base, key)  # another may have waited for the same
        if found is None:
            found = _made(base, *key)
            self._kept.put(key, found)
        return found

    def _known(self, base: TextModel, key: _Key) -> TextModel | None:
        found = self._kept.get(key)
        return None if found is None or found.base_card is not base.card else found


def _made(base: TextModel, added: Sequence[OwnToken], table_size: int) -> TextModel:
    card = base.card
    own = msgspec.structs.replace(
        card,
        tokenizer_json=_with_tokens(card, added),
        vocab_size=table_size or card.vocab_size,
    )
    try:
        model = TextModel(own, card)
    except ValueError as error:
        raise RequestError("adapter_invalid", str(error)) from error
    known = model.added_tokens()
    for token in added:
        if token.id not in known or known[token.id].content != token.content:
            message = f"the base's tokenizer cannot have {token.content!r} as token {token.id}"
            raise RequestError("adapter_invalid", message)
    return model


def _with_tokens(card: ModelCard, added: Sequence[OwnToken]) -> str:
    """The tokenizer's file with more tokens."""
    if not added:
        return card.tokenizer_json
    document = json.loads(card.tokenizer_json)
    tokens = [{name: getattr(each, name) for name in OwnToken.__struct_fields__} for each in added]
    document["added_tokens"] = [*(document.get("added_tokens") or ()), *tokens]
    return json.dumps(document)
