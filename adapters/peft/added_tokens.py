"""Tokens that an adapter's tokenizer files add to the base's. Pure.

The base's tokenizer gives each new token the next free id. So does the adapter's, which was made of
it: tokens that lie otherwise are of another tokenizer.
"""

from collections.abc import Iterable, Mapping
from typing import Any

from loraplex.adapters.base import BaseSpec
from loraplex.adapters.manifest import OwnToken
from loraplex.adapters.violations import Findings, shown

MAX_ADDED_TOKENS = 4096
MAX_ADDED_BYTES = 128 << 10


def listed_token(token_id: int, entry: object) -> OwnToken:
    """An entry of `added_tokens_decoder`. One that is no token has no text."""
    fields: Mapping[str, Any] = entry if isinstance(entry, dict) else {}
    content = fields.get("content")
    flags = ("special", "lstrip", "rstrip", "single_word", "normalized")
    return OwnToken(
        token_id,
        content if isinstance(content, str) else "",
        **{name: fields.get(name) is True for name in flags},
    )


class AddedTokens:
    """Collects them from files, the one that says most of a token first."""

    def __init__(self, base: BaseSpec, findings: Findings) -> None:
        self._base, self._findings = base, findings
        self._found: dict[int, OwnToken] = {}
        self._by_text: dict[str, int] = {}

    def read(self, name: str, tokens: Iterable[OwnToken], *, may_add: bool = True) -> None:
        """name: of the file. may_add: whether its tokens are added ones. Each must be the base's or
        a new one, by its id and, where the base's are known, by its text."""
        known, size = self._base.tokens, self._base.num_tokens
        wrong: list[tuple[int, str]] = []
        beyond: list[int] = []
        for token in tokens:
            there = known.get(token.content) if known else None
            if there == token.id if known else token.id < size or not size:
                continue
            if known and may_add and there is None and size <= token.id < self._base.most_ids:
                if not self._take(token):
                    wrong.append((token.id, token.content))
            elif token.id >= size and there is None:
                beyond.append(token.id)
            else:
                wrong.append((token.id, token.content))
        if beyond:
            self._refuse(name, sorted(set(beyond)))
        elif wrong:
            message = f"{name} has other tokens than the base: {shown(sorted(wrong)[:4])}"
            self._findings.add("other_tokenizer", name, message)

    def _take(self, token: OwnToken) -> bool:
        """Whether it is new, or said before."""
        before = self._found.setdefault(token.id, token)
        same_id = self._by_text.setdefault(token.content, token.id)
        return bool(token.content) and before.content == token.content and same_id == token.id

    def _refuse(self, name: str, ids: list[int]) -> None:
        size, most = self._base.num_tokens, self._base.most_ids
        served = f"; ids {size} to {most - 1} are served"
        message = f"{name} adds tokens to the base's {size}: ids {shown(ids[:8])}{served}"
        self._findings.add("added_tokens", name, message)

    def all(self) -> tuple[OwnToken, ...]:
        """By id. Raises nothing: what is wrong with all together is added to the findings."""
        found = tuple(token for _, token in sorted(self._found.items()))
        size, where = self._base.num_tokens, "tokenizer.json"
        if found and [token.id for token in found] != [*range(size, size + len(found))]:
            ids = shown([token.id for token in found][:8])
            message = f"added tokens have the ids {ids}, and not those from {size} on without a gap"
            self._findings.add("added_tokens", where, message)
        nbytes = sum(len(token.content.encode("utf-8", "replace")) for token in found)
        if len(found) > MAX_ADDED_TOKENS or nbytes > MAX_ADDED_BYTES:
            most = f"at most {MAX_ADDED_TOKENS} of {MAX_ADDED_BYTES} bytes together are served"
            message = f"{len(found)} tokens of {nbytes} bytes are added; {most}"
            self._findings.add("added_tokens", where, message)
        return found
