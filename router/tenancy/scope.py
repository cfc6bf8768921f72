"""Names that a key's patterns are matched with. Pure."""

from collections.abc import Callable, Sequence

from loraplex.adapters.ref import format_ref
from loraplex.router.call import AdapterChoice, MergedChoice, RequestError
from loraplex.router.tenancy.keys import Caller

# The name by which a choice is registered, if it is.
Registered = Callable[[AdapterChoice], str | None]


def names_of(choice: AdapterChoice, registered: Registered, base: str = "") -> tuple[str, ...]:
    """Names by which keys may open an adapter: a registered one's name, or a reference's full
    spelling, with and without @rev. base: see `with_base`.
    """
    name = registered(choice)
    if name is not None:
        return with_base((name,), base)
    if choice.ref.source == "alias":
        return with_base((choice.ref.name,), base)
    full = format_ref(choice.ref)
    return with_base((full, full.partition("@")[0]) if choice.ref.revision else (full,), base)


def with_base(names: tuple[str, ...], base: str) -> tuple[str, ...]:
    """An adapter's names, also as `base:adapter`. base: "" = it is the only one, or not known."""
    return (*names, *(f"{base}:{name}" for name in names)) if base else names


def opens(caller: Caller, name: str, base: str | None) -> bool:
    """Whether a caller's key opens a registered adapter. base: see `with_base`; None = unknown."""
    return caller.may_use(with_base((name,), base or ""))


def check_scope(
    caller: Caller,
    choice: AdapterChoice | MergedChoice | None,
    base_names: Sequence[str],
    registered: Registered,
    param: str,
    base: str = "",
) -> None:
    """Checks that a caller may use what a request names. base: see `with_base`. Raises RequestError
    (forbidden) for what the caller's key does not open.

    The words alone decide: the answer does not show whether there is such an adapter.
    """
    if choice is None:
        if not caller.may_use(base_names):
            raise RequestError("forbidden", "this key does not open the base model", param=param)
        return
    members = choice.members if isinstance(choice, MergedChoice) else (choice,)
    for member in members:
        if not caller.may_use(names_of(member, registered, base)):
            message = f"this key does not open {member.adapter_id[:200]!r}"
            raise RequestError("forbidden", message, param=param)
