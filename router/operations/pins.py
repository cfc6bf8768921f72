"""Tells connected workers which adapters they keep on their devices."""

import contextlib

from router.names.aliases import Aliases
from router.workers.roster import Roster
from router.workers.session import WorkerLost


class Pins:
    """Implements `AliasListener`. A worker that connects later is told by `AdapterWorkers`."""

    def __init__(self, roster: Roster) -> None:
        self._roster = roster
        self._told: set[str] = set()

    def aliases_changed(self, aliases: Aliases) -> None:
        pins = aliases.pinned_digests()
        if pins == self._told:
            return
        self._told = pins
        for session in self._roster.sessions:
            with contextlib.suppress(WorkerLost):  # it is told when it is back
                session.pin(pins)
