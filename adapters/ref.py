"""What a person may write to name an adapter. Pure."""

from typing import Literal

import msgspec

RefSource = Literal["hub", "local", "s3", "alias"]


class AdapterRef(msgspec.Struct, frozen=True):
    """A parsed reference. It names an adapter; it never identifies one (the digest does).

    source: `alias` is a name that the operator registered.
    revision: branch, tag or commit for `hub`; None = the default branch, or meaningless.
    """

    source: RefSource
    name: str
    revision: str | None = None
