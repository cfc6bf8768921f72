"""Shares a worker's capacity between its routers. Pure."""

from collections.abc import Mapping

# Of an equal share: what a router without work keeps, so that its next burst starts at once.
_IDLE_SHARE = 4


def share_credits(capacity: int, in_flight: Mapping[int, int]) -> dict[int, int]:
    """Sequences each router may have here, by connection; together at most `capacity`.

    Max-min fair: each router wants twice what it has in flight, and at least a part of an equal
    share. What nobody wants is divided equally. With more routers than capacity, some get none.
    """
    if not in_flight:
        return {}
    floor = max(1, capacity // (_IDLE_SHARE * len(in_flight)))
    wanted = {router: 2 * count + floor for router, count in in_flight.items()}
    shares: dict[int, int] = {}
    left = capacity
    by_wanted = sorted(wanted, key=lambda router: (wanted[router], router))
    for i, router in enumerate(by_wanted):
        shares[router] = min(wanted[router], left // (len(by_wanted) - i))
        left -= shares[router]
    for i, router in enumerate(by_wanted):
        extra = left // (len(by_wanted) - i)
        shares[router] += extra
        left -= extra
    return shares
