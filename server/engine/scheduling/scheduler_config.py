"""Bounds of the scheduler that no device sets. Pure."""

import msgspec


class SchedulerConfig(msgspec.Struct, frozen=True):
    """max_waiting: sequences not yet running. max_loading: adapters on their way at once, and as
    many again of those that come without being asked for.

    drain_after_s: how long a staged adapter waits for room before others must give way.
    """

    max_waiting: int = 1024
    max_loading: int = 8
    drain_after_s: float = 1.0
