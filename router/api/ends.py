"""How the tokens that end an answer are shown. Pure."""

from collections.abc import Callable, Iterable

import msgspec


class EndToken(msgspec.Struct, frozen=True):
    """A token that ends an answer. token: its text."""

    id: int
    token: str


def end_tokens(ids: Iterable[int], text_of: Callable[[int], str]) -> list[EndToken]:
    """ids: as they are to be listed."""
    return [EndToken(i, text_of(i)) for i in ids]
