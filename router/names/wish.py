"""What somebody wants a name to mean. Pure."""

import msgspec

from adapters.ref import AdapterRef
from router.call import Secret
from router.names.owned_name import OwnedName
from router.names.registration import Origin
from router.policy.rollout import Declared, Guards


class Wish(msgspec.Struct, frozen=True):
    """A registration that somebody wants. replace: also if the name means something else now.

    pin: None = as the name is. token: None = the one that opens this reference already, if any.
    by: who wants it, for the history. once: not if the name is served already, whatever it means.
    load: to the device of every worker first. tool_format: None = as the name has it; "" = none.
    """

    name: OwnedName
    ref: AdapterRef
    origin: Origin
    pin: bool | None = None
    token: Secret | None = None
    replace: bool = False
    by: str = ""
    once: bool = False
    load: bool = False
    tool_format: str | None = None


class RolloutWish(msgspec.Struct, frozen=True):
    """Versions of a name and their weights, also its present one's if it is named.

    guards: None = no version goes back by itself; unset = as they are, or the usual ones.
    declared: what the adapters file says, if the wish is its.
    """

    versions: tuple[tuple[AdapterRef, int], ...]
    guards: Guards | None | msgspec.UnsetType = msgspec.UNSET
    by: str = ""
    declared: Declared | None = None
