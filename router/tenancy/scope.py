"""Names that a key's patterns are matched with. Pure."""

from collections.abc import Callable, Sequence

from loraplex.adapters.ref import format_ref
from loraplex.router.call import AdapterChoice, MergedChoice, RequestError
from loraplex.router.tenancy.keys import Caller

# The name by which a choice is registered, if it is.
Registered = Callable[[AdapterChoice], str | None]


def names_of(choice: AdapterChoice, registered: Registered) -> tuple[str, ...]:
    """Names by which keys may open an adapter: a registered one's name, or a reference's full
    spelling, with and without @rev.
    """
    name = registered(choice)
    if name is not None:
        return (name,)
    if choice.ref.source == "alias":
        return (choice.ref.name,)
    full = format_ref(choice.ref)
    return (full,) if choice.ref.revision is None else (full, full.partition("@")[0])


def check_scope(
    caller: Caller,
    choice: AdapterChoice | MergedChoice | None,
    base_names: Sequence[str],
    registered: Registered,
    param: str,
) -> None:
    """Checks that a caller may use what a request names. Raises RequestError (forbidden) for what
    the caller's key does not open.

    The words alone decide: the answer does not show whether there is such an adapter.
    """
    if choice is None:
        if not caller.may_use(base_names):
            raise RequestError("forbidden", "this key does not open the base model", param=param)
        return
    members = choice.members if isinstance(choice, MergedChoice) else (choice,)
    for member in members:
        if not caller.may_use(names_of(member, registered)):
            message = f"this key does not open {member.adapter_id[:200]!r}"
            raise RequestError("forbidden", message, param=param)
