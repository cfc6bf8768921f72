"""A registered name, and whose it is. Pure."""

import msgspec


class OwnedName(msgspec.Struct, frozen=True, order=True):
    """A registered name and its owner. tenant: whose name it is; "" = the fleet's, which callers of
    every tenant may use.

    Equal names of two tenants are two names, and mean nothing to each other.
    """

    name: str
    tenant: str = ""

    def __str__(self) -> str:
        """The one spelling, for store, metrics and operators. No reference is written so."""
        return f"{self.tenant}::{self.name}" if self.tenant else self.name
