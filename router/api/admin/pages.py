"""Pages of the list of adapters, as queries ask for them. Pure."""

from collections.abc import Mapping
from typing import NamedTuple

from loraplex.router.api.admin.adapters import parse_tenant
from loraplex.router.api.request.body import require, whole_number

LIST_QUERY = ("tenant", "search", "after", "limit")
MAX_PAGE = 1000


class Page(NamedTuple):
    """A page of adapters. search: a part of their names. after: `next` of the page before."""

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
    tenant = parse_tenant(query)
    limit = whole_number(query.get("limit", str(MAX_PAGE)), 1, MAX_PAGE, "limit")
    search, after = query.get("search", ""), query.get("after", "")
    require(search.isprintable(), "expected a name", "search")
    require(after.isprintable(), "expected a name", "after")
    return Page(tenant, search, after, limit)
