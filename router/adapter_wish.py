"""What somebody wants a name to mean. Pure."""

import msgspec

from adapters.ref import AdapterRef
from router.generation import Secret
from router.registration import Origin


class Wish(msgspec.Struct, frozen=True):
    """A registration that somebody wants. replace: also if the name means something else now.

    by: who wants it, for the history.
    """

    name: str
    ref: AdapterRef
    origin: Origin
    pin: bool = False
    token: Secret | None = None
    replace: bool = False
    by: str = ""
