"""Sends connected workers the adapters that they keep on their devices."""

import contextlib

from loraplex.router.names.aliases import Aliases
from loraplex.router.policy.rollout import HeldContent
from loraplex.router.workers.fleet import Roster
from loraplex.router.workers.session import WorkerLost


class Pins:
    """Implements `AliasListener`. `AdapterWorkers` sends them to a worker that connects later."""

    def __init__(self, roster: Roster) -> None:
        self._roster = roster
        self._sent: set[HeldContent] = set()

    def aliases_changed(self, aliases: Aliases) -> None:
        pins = aliases.pins()
        if pins == self._sent:
            return
        self._sent = pins
        for session in self._roster.sessions:
            with contextlib.suppress(WorkerLost):  # it gets them when it is back
                session.pin(held.digest for held in pins if held.base == session.base)
