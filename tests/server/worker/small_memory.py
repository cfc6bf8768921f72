"""A worker whose memory is too small for its adapters."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from loraplex.adapters.ref import AdapterRef
from loraplex.server import protocol
from tests.adapter_folders import write_adapter
from tests.server.worker.worker_process import Router, Worker, base, running


@contextmanager
def running_small(folders: pytest.TempPathFactory, adapters: int) -> Iterator[Worker]:
    """Adapters a0, a1, …; device memory for six of them, host memory for four."""
    root = folders.mktemp("adapters")
    for number in range(adapters):
        write_adapter(root / f"a{number}", base(), rank=1, seed=number)
    with running(
        folders.mktemp("worker"),
        *("--adapter-root", str(root)),
        *("--host-adapter-memory", "256KiB", "--adapter-memory", "384KiB"),
    ) as worker:
        yield worker


async def admit_all(router: Router, adapters: int) -> list[str]:
    """Their digests, in order."""
    names = [f"a{number}" for number in range(adapters)]
    await router.send(*(protocol.AdapterLoad(n, AdapterRef("local", n)) for n in names))
    states = await router.until_loaded(adapters)
    digests = {state.load_id: state.manifest.digest for state in states if state.manifest}
    return [digests[name] for name in names]
