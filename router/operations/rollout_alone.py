"""Rolls versions back by this router's own counts while the store is away, and reports that later.

It holds for this router alone until then. The guards are the same; shares are only taken away.
"""

import logging
from collections.abc import Callable, Iterable

import msgspec

from loraplex.adapters.errors import AdapterError
from loraplex.router.names.aliases import Aliases
from loraplex.router.names.owned_name import OwnedName
from loraplex.router.names.registration import Registration
from loraplex.router.names.rollout_tally import RolloutTally, breaches
from loraplex.router.operations.rollouts import Rollouts
from loraplex.router.policy.rollout import Rollout
from loraplex.router.tenancy.records import AuditRecord

logger = logging.getLogger(__name__)


class _Verdict(msgspec.Struct):
    """before: the rollout as all know it. why: by digest of what was taken back of it."""

    before: Rollout
    why: dict[str, str]


class LoneGuard:
    """clock: Unix seconds. audit: hears of what is done without an operator."""

    def __init__(
        self,
        aliases: Aliases,
        rollouts: Rollouts,
        tally: RolloutTally,
        audit: Callable[[AuditRecord], None],
        clock: Callable[[], float],
    ) -> None:
        self._aliases = aliases
        self._rollouts = rollouts
        self._tally = tally
        self._audit = audit
        self._clock = clock
        self._verdicts: dict[OwnedName, _Verdict] = {}

    async def judge(self, rolling: Iterable[Registration]) -> None:
        for registration in rolling:
            async for digest, why in breaches(registration, self._tally.read_own):
                note = f"{why}; counted by one router, without Redis"
                assert registration.rollout is not None
                self._take_back(registration.key, registration.rollout, digest, note)

    async def report(self) -> None:
        """Makes its verdicts everybody's where all is as it was judged. Raises StoreDown.

        Who has set shares in the meantime has judged it, too, and what was counted is reported
        anyway.
        """
        if self._verdicts:
            await self._aliases.refresh()
        for name, verdict in list(self._verdicts.items()):
            there = self._aliases.get(name)
            if there is not None and there.rollout == verdict.before:  # the row was written anew
                for digest, why in verdict.why.items():
                    self._rollouts.take_back_here(name, digest, why)
            elif there is None or not self._is_kept(there, verdict):
                del self._verdicts[name]
                continue
            try:
                await self._rollouts.report(name, verdict.before)
            except AdapterError as error:
                logger.warning(
                    "adapter %s: its rollback is not reported yet: %s", name, error.message
                )
            else:
                del self._verdicts[name]

    def _is_kept(self, there: Registration, verdict: _Verdict) -> bool:
        if there.rollout is None or there.rollout.id != verdict.before.id:
            return False
        back = {v.digest: v.why for v in there.rollout.versions if v.rolled_back}
        return all(back.get(digest) == why for digest, why in verdict.why.items())

    def _take_back(self, name: OwnedName, before: Rollout, digest: str, why: str) -> None:
        self._rollouts.take_back_here(name, digest, why)
        self._verdicts.setdefault(name, _Verdict(before, {})).why[digest] = why
        logger.error("adapter %s: %.12s is rolled back here: %s", name, digest, why)
        action = f"rollback by guard: {why}"
        self._audit(AuditRecord(self._clock(), action, name.name, name.tenant, 200, "", ""))
