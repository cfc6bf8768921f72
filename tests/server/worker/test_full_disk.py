"""A disk that is really full under a worker's cache: what is there is served, the rest is
reported."""

import os
import subprocess
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from loraplex.adapters.ref import AdapterRef
from loraplex.adapters.store.store import HEADROOM_BYTES
from loraplex.server import protocol
from tests.adapter_folders import write_adapter
from tests.certifying.certificates import CertifyOptions, certified_output
from tests.server.worker.worker_process import (
    VOCAB,
    Router,
    Worker,
    base,
    connected,
    request,
    running,
)

OPTIONS = CertifyOptions(vocab_size=VOCAB, eos_token_ids=(2,))
# In a namespace of its own, and without being root where users may make one.
UNSHARE = ("unshare", "--mount", *(("--user", "--map-root-user") if os.getuid() else ()))
MOUNT = f'mount -t tmpfs -o size={HEADROOM_BYTES + (16 << 20)} tmpfs "$1" && shift && exec "$@"'


def on_small_disk(folder: Path) -> list[str]:
    """What runs a command in whose eyes `folder` is a disk with room for a few adapters."""
    folder.mkdir()
    words = [*UNSHARE, "sh", "-c", MOUNT, "-", str(folder)]
    tried = subprocess.run([*words, "true"], capture_output=True, text=True, timeout=240)
    if tried.returncode:
        pytest.skip(f"no disk can be mounted here: {tried.stderr.strip()}")
    return words


@pytest.fixture
def worker(tmp_path: Path) -> Iterator[Worker]:
    for number in range(4):
        write_adapter(tmp_path / "adapters" / f"a{number}", base(), rank=4, seed=number)
    inside = on_small_disk(tmp_path / "cache")
    with running(tmp_path, "--adapter-root", str(tmp_path / "adapters"), inside=inside) as worker:
        yield worker


def fill(worker: Worker, tmp_path: Path) -> Path:
    """Leaves not a byte of the worker's disk; what is to be removed again."""
    filler = Path(f"/proc/{worker.process.pid}/root{tmp_path}/cache/filler")
    with filler.open("wb", buffering=0) as out:
        for size in (1 << 20, 1):
            with suppress(OSError):
                while True:
                    out.write(bytes(size))
    assert os.statvfs(filler).f_bavail == 0
    return filler


async def loaded(router: Router, name: str) -> protocol.AdapterState:
    """How the next load of this adapter ends."""
    before = len(router.final_loads)
    await router.send(protocol.AdapterLoad(f"{name} {before}", AdapterRef("local", name), None))
    return (await router.until_loaded(before + 1))[-1]


async def generate(router: Router, name: str, digest: str | None) -> protocol.TokenEvent:
    await router.send(request(name, 6, digest))
    end = (await router.until_finished(name))[name]
    if end.error is None:
        assert router.tokens_of(name) == certified_output(digest, [1, 5, 9], 6, OPTIONS, 6)
    return end


async def test_it_serves_what_it_has_and_recovers(worker: Worker, tmp_path: Path) -> None:
    async with connected(worker) as router:
        known = [await loaded(router, name) for name in ("a0", "a1")]
        packed, fetched = (s.manifest.digest for s in known if s.manifest is not None)
        assert (await generate(router, "packed", packed)).error is None
        filler = fill(worker, tmp_path)
        refused = await loaded(router, "a2")
        assert (refused.stage, refused.error) == ("failed", "unavailable")
        assert "disk" in (refused.message or "")
        assert refused.retry_after_s
        assert (await generate(router, "packed in memory alone", fetched)).error is None
        assert (await generate(router, "packed again", packed)).error is None
        assert (await generate(router, "base", None)).error is None
        filler.unlink()
        again = await loaded(router, "a3")
        assert (again.stage, again.error) == ("ready", None)
        assert again.manifest is not None
        assert (await generate(router, "after", again.manifest.digest)).error is None
    assert "Traceback" not in worker.log.read_text()
