"""Other names of fields that bodies have: two names of one thing say it once. Pure."""

from collections.abc import Collection
from typing import Any, TypeVar

import msgspec

from loraplex.router.api.request.body import require, typed
from loraplex.router.api.request.known_elsewhere import check_unknown, same
from loraplex.router.call import RequestError

# By names that other servers have: what bodies here call the same.
ALIASES = {
    "max_completion_tokens": "max_tokens",
    "max_new_tokens": "max_tokens",
    "min_new_tokens": "min_tokens",
    "sampling_seed": "seed",
    "random_seed": "seed",
    "rid": "request_id",
    "extra_key": "cache_salt",
    "no_stop_trim": "include_stop_str_in_output",
}

T = TypeVar("T", bound=msgspec.Struct)


def aliases_of(fields: Collection[str]) -> dict[str, str]:
    """Names that mean one of these fields and are none of them."""
    return {name: own for name, own in ALIASES.items() if own in fields and name not in fields}


def typed_by_aliases(plain: dict[str, Any], kind: type[T], harmless: Collection[str]) -> T:
    """The typed body. harmless: fields that change nothing. Other unknown fields are refused unless
    they ask for nothing, and so are two names that say different things. Raises RequestError."""
    aliases = aliases_of(kind.__struct_fields__)
    found = {name: value for name, value in plain.items() if name not in aliases}
    spelled: dict[str, str] = {}
    for name, own in aliases.items():
        value, first = plain.get(name), found.get(own)
        said = value is not None and first is not None
        message = f"contradicts `{spelled.get(own, own)}`"
        require(not said or same(value, first), message, name)
        if value is not None and first is None:
            found[own], spelled[own] = value, name
    check_unknown(found, kind.__struct_fields__, harmless)
    try:
        return typed(found, kind)
    except RequestError as error:
        raise error.spelled(spelled) from None
