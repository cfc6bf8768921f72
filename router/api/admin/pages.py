"""Pages of the list of adapters, as queries ask for them. Pure."""

from collections.abc import Mapping
from typing import NamedTuple

from loraplex.router.api.admin.adapters import parse_tenant
from loraplex.router.api.request.body import require

LIST_QUERY = ("tenant", "search", "after", "limit")
MAX_PAGE = 1000


class Page(NamedTuple):
    """A part of the list of adapters. search: a part of their names. after: `next` of the page
    before.
    """

    tenant: str | None
    search: str = ""
    after: str = ""
    limit: int = MAX_PAGE

    @property
    def is_whole(self) -> bool:
        """Whether the whole list is asked for."""
        return self == Page(self.tenant)


def parse_page(query: Mapping[str, str]) -> Page:
    """Reads which adapters to list from the query. Raises RequestError."""
    tenant, limit = parse_tenant(query), query.get("limit", str(MAX_PAGE))
    is_count = limit.isascii() and limit.isdecimal() and len(limit) <= 4
    require(is_count and 0 < int(limit) <= MAX_PAGE, f"expected 1 to {MAX_PAGE}", "limit")
    search, after = query.get("search", ""), query.get("after", "")
    require(search.isprintable() and after.isprintable(), "expected a name", "search")
    return Page(tenant, search, after, int(limit))
