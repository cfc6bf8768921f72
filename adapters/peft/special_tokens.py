"""Special tokens of a `tokenizer_config.json`, as transformers gives them to templates. Pure."""

from collections.abc import Mapping
from typing import Any

from loraplex.adapters.violations import shown

_KINDS = ("bos", "eos", "unk", "sep", "pad", "cls", "mask")
# In the order in which transformers adds those that a tokenizer does not have.
USUAL_TOKENS = tuple(f"{kind}_token" for kind in _KINDS)


def special_tokens(settings: Mapping[str, Any]) -> dict[str, str | None]:
    """By name, what the file says: the token's text, or None for no such token.

    Raises ValueError for a token that is neither text nor an object with `content`.
    """
    named = {
        key: value
        for key, value in settings.items()
        if key in USUAL_TOKENS or (key.endswith("_token") and isinstance(value, str))
    }
    extra = settings.get("extra_special_tokens")
    if isinstance(extra, dict):  # a list has no names
        named |= extra
    return {_well_formed(name): _text(name, value) for name, value in named.items()}


def _text(name: str, value: object) -> str | None:
    if isinstance(value, dict):  # an AddedToken
        value = value.get("content", value)
    if value is None:
        return None
    if isinstance(value, str):
        return _well_formed(value)
    raise ValueError(f"special token {shown(name)}: expected text, got {shown(value)}")


def _well_formed(text: str) -> str:
    """JSON can hold lone surrogates; frames cannot."""
    return text.encode("utf-8", "replace").decode()
