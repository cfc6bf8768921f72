"""Runs the batches of `--files-dir` in this router: claims them, watches them, cleans up."""

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable

from loraplex.router.batches.folder import Claims, FleetView, RouterNote
from loraplex.router.batches.row_shares import RowShares
from loraplex.router.batches.run import BatchParts, BatchRun
from loraplex.router.batches.state import BatchState
from loraplex.router.call import RequestError
from loraplex.router.files.store import folder_id, off_loop
from loraplex.router.files.stored_file import StoredAmount
from loraplex.router.lines.errors import BatchError

logger = logging.getLogger(__name__)

_TICK_S = 0.25
_LOOK_S = 1.0
_SWEEP_S = 60.0
_AGAIN_S = 30.0  # after a disk's fault
# What each holds in memory is an index of its lines.
_MAX_RUNNING = 64
_MAX_OF_TENANT = 4
# A pause between two live requests is not the end of live work.
_QUIET_S = 1.0


class BatchKeeper:
    """Starts, resumes and ends the batches of this router. live: when the last live request was
    there, on the loop's clock; now if one is. draining: whether the router is being stopped.
    stop_s: for lines in flight, then.
    """

    def __init__(
        self,
        parts: BatchParts,
        claims: Claims,
        view: FleetView,
        live: Callable[[], float],
        draining: Callable[[], bool],
        stop_s: float,
    ) -> None:
        self._parts = parts
        self._claims = claims
        self._view = view
        self._live = live
        self._draining = draining
        self._stop_s = stop_s
        self._runs: dict[str, BatchRun] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._not_before: dict[str, float] = {}
        self._woken = asyncio.Event()
        self._folder_id = ""
        self.stored = StoredAmount()

    @property
    def refusal(self) -> str | None:
        """Why files and batches are not served; None = they are."""
        if not self._folder_id:
            return "the folder of --files-dir is not ready"
        if self._view.has_other_folder(self._folder_id):
            return (
                "routers have different folders as --files-dir: a file of one would be unknown to "
                "the others; give all of them one shared folder"
            )
        return None

    @property
    def rows(self) -> RowShares:
        return self._parts.rows

    @property
    def running(self) -> int:
        return len(self._runs)

    def wake(self) -> None:
        """Looks for work at once: a batch was made, or its end asked for."""
        self._woken.set()

    def state(self, batch_id: str) -> BatchState | None:
        """The present state of a batch that runs here."""
        run = self._runs.get(batch_id)
        return None if run is None else run.state

    async def open(self) -> None:
        """Finds the folder's id. Raises RequestError of the disk."""
        self._folder_id = await off_loop(folder_id, self._parts.store.root)

    async def run(self) -> None:
        """Runs batches until cancelled."""
        looked = swept = 0.0
        while True:
            now = asyncio.get_running_loop().time()
            self._parts.rows.live = self._has_live_work(now) or self._view.live
            self._parts.wake_all()
            with contextlib.suppress(RequestError):  # of the disk; it is logged
                if self._woken.is_set() or now - looked >= _LOOK_S:
                    self._woken.clear()
                    looked = now
                    await self._look(now)
                if now - swept >= _SWEEP_S:
                    swept = now
                    await off_loop(self._sweep)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._woken.wait(), _TICK_S)

    def _has_live_work(self, now: float) -> bool:
        return now - self._live() < _QUIET_S

    async def _look(self, now: float) -> None:
        if not self._folder_id:
            await self.open()
        await self._view.tell(RouterNote(self._folder_id, self._has_live_work(now)))
        for batch_id, run in list(self._runs.items()):
            if not await self._claims.renew(batch_id):
                logger.error("batch %s: another router may have it; it is left", batch_id)
                run.leave()
        if self._draining():
            for run in self._runs.values():
                run.drain()
            return
        for tenant, batch_id in await off_loop(self._parts.folder.open_batches):
            run_here = self._runs.get(batch_id)
            if run_here is not None:
                await self._watch(run_here)
            elif self.refusal is None and self._not_before.get(batch_id, 0.0) <= now:
                await self._claim(tenant, batch_id)

    async def _watch(self, run: BatchRun) -> None:
        state = run.state
        if await self._is_cancelled(state.tenant, state.id):
            run.end("cancelled")
        elif state.expires_at <= time.time():
            run.end("expired")

    async def _is_cancelled(self, tenant: str, batch_id: str) -> bool:
        return await off_loop(self._parts.folder.cancel_asked, tenant, batch_id) is not None

    async def _claim(self, tenant: str, batch_id: str) -> None:
        tenants = [run.state.tenant for run in self._runs.values()]
        is_full = len(tenants) >= _MAX_RUNNING or tenants.count(tenant) >= _MAX_OF_TENANT
        if is_full and not await self._is_cancelled(tenant, batch_id):
            return
        if not await self._claims.take(tenant, batch_id):
            return
        state = await off_loop(self._parts.folder.find, tenant, batch_id)
        if state is None or state.is_over:
            is_noted = state is not None
            await off_loop(self._parts.folder.drop_open, batch_id, is_noted, time.time())
            await self._claims.give_back(batch_id)
            return
        run = self._runs[batch_id] = BatchRun(state, self._parts)
        self._tasks[batch_id] = asyncio.create_task(self._run(run))
        await self._watch(run)

    async def _run(self, run: BatchRun) -> None:
        batch_id = run.state.id
        try:
            await run.run()
        except (BatchError, RequestError) as error:
            logger.error("batch %s: it is tried again later: %s", batch_id, error)
            self._not_before[batch_id] = asyncio.get_running_loop().time() + _AGAIN_S
        except Exception:  # one batch must not end the others
            logger.exception("batch %s: it is tried again later", batch_id)
            self._not_before[batch_id] = asyncio.get_running_loop().time() + _AGAIN_S
        finally:
            del self._runs[batch_id], self._tasks[batch_id]
            await self._claims.give_back(batch_id)
            self.wake()

    def _sweep(self) -> None:
        store, folder, now = self._parts.store, self._parts.folder, time.time()
        files = nbytes = 0
        for tenant in store.tenants():
            store.sweep(tenant, folder.inputs_in_use(tenant), now)
            stored = store.stored(tenant)
            files, nbytes = files + stored.files, nbytes + stored.nbytes
        self.stored = StoredAmount(files, nbytes)

    async def close(self) -> None:
        """Stops the runs. Lines in flight have a moment; what they leave is run again later."""
        for run in self._runs.values():
            run.drain()
        if self._tasks:
            await asyncio.wait([*self._tasks.values()], timeout=self._stop_s)
        for run in list(self._runs.values()):
            run.leave()
        await asyncio.gather(*self._tasks.values(), return_exceptions=True)
        await self._view.leave()
