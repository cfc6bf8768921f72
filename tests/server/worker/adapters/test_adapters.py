"""Adapters through the real worker: loaded once, served rightly, refused with every reason."""

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from loraplex.adapters.ref import AdapterRef
from loraplex.server import protocol
from tests.adapter_folders import write_adapter
from tests.certifying.certificates import CertifyOptions, certified_output
from tests.server.worker.worker_process import (
    TIMEOUT_S,
    VOCAB,
    Router,
    Worker,
    base,
    connected,
    request,
    running,
)

OPTIONS = CertifyOptions(vocab_size=VOCAB, eos_token_ids=(2,))
ADAPTERS = 12
TOKEN = "hf_thisIsNobodysToken"


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("adapters")
    for number in range(ADAPTERS):
        rank = 1 + number % 5
        write_adapter(folder / f"a{number}", base(), rank=rank, seed=number)
    return folder


@pytest.fixture(scope="module")
def worker(tmp_path_factory: pytest.TempPathFactory, root: Path) -> Iterator[Worker]:
    """Host memory for four small adapters, device memory for six."""
    with running(
        tmp_path_factory.mktemp("worker"),
        *("--adapter-root", str(root)),
        *("--host-adapter-memory", "256KiB", "--adapter-memory", "384KiB"),
    ) as worker:
        yield worker


def fetches(worker: Worker) -> float:
    name = 'loraplex_worker_adapter_fetches_total{source="local"} '
    lines = worker.get("/metrics").text.splitlines()
    return sum(float(line.removeprefix(name)) for line in lines if line.startswith(name))


def load(name: str, number: int = 0, digest: str | None = None) -> protocol.AdapterLoad:
    return protocol.AdapterLoad(f"{name} {number}", AdapterRef("local", name), TOKEN, digest)


async def digest_of(router: Router, name: str) -> str:
    await router.send(load(name))
    async with asyncio.timeout(TIMEOUT_S):
        while True:
            for state in router.final_loads:
                if state.load_id == f"{name} 0":
                    assert state.manifest is not None, state
                    return state.manifest.digest
            await router.receive()


async def test_fifty_loads_of_one_adapter_fetch_once(worker: Worker) -> None:
    before = fetches(worker)
    async with connected(worker) as one, connected(worker) as two:
        await one.send(*(load("a0", number) for number in range(25)))
        await two.send(*(load("a0", number) for number in range(25)))
        states = await one.until_loaded(25) + await two.until_loaded(25)
        assert {state.stage for state in states} == {"ready"}
        manifests = {state.manifest.digest for state in states if state.manifest}
        assert len(manifests) == 1
        assert {state.load_id for state in one.final_loads} == {f"a0 {n}" for n in range(25)}
    assert fetches(worker) - before <= 1


async def test_every_adapter_answers_for_itself_whatever_must_be_evicted(
    worker: Worker,
) -> None:
    async with connected(worker) as router:
        names = [f"a{number}" for number in range(ADAPTERS)]
        digests = {name: await digest_of(router, name) for name in names}
        assert len(set(digests.values())) == ADAPTERS
        for turn in range(3):
            await router.send(
                *(request(f"{name}/{turn}", 6, digests[name]) for name in names),
                request(f"base/{turn}", 6),
            )
            asked = [f"{name}/{turn}" for name in [*names, "base"]]
            await router.until_finished(*asked)
            for name in [*names, "base"]:
                expected = certified_output(digests.get(name), [1, 5, 9], 6, OPTIONS, 6)
                assert router.tokens_of(f"{name}/{turn}") == expected, name
        status = await router.until_status(running=0)
        assert set(status.resident) <= set(digests.values())


async def test_a_killed_engine_serves_the_same_adapters_again(worker: Worker) -> None:
    async with connected(worker) as router:
        digest = await digest_of(router, "a3")
        await router.send(request("before", 4, digest))
        await router.until_finished("before")
        psutil.Process(worker.engine_pid).kill()
        await router.until_status(ready=False)
        await router.until_status(ready=True)
        await router.send(request("after", 4, digest))
        ended = await router.until_finished("after")
        assert ended["after"].error is None
        assert router.tokens_of("after") == router.tokens_of("before")


@pytest.mark.parametrize(
    ("name", "error"),
    [("no-such", "not_found"), ("../../etc", "bad_ref"), ("/etc", "forbidden")],
)
async def test_a_failed_load_says_why(worker: Worker, name: str, error: str) -> None:
    async with connected(worker) as router:
        await router.send(load(name))
        (state,) = await router.until_loaded(1)
        assert (state.stage, state.manifest) == ("failed", None)
        assert state.error in (error, "forbidden", "not_found", "bad_ref")
        assert state.message
    assert TOKEN not in worker.log.read_text()


async def test_all_violations_are_reported_at_once(worker: Worker, root: Path) -> None:
    folder = write_adapter(root / "bad", base())
    config = json.loads((folder / "adapter_config.json").read_text())
    config |= {
        "use_qalora": True,
        "layer_replication": [[0, 1]],
        "target_modules": ["q_proj", "v_proj"],
    }
    (folder / "adapter_config.json").write_text(json.dumps(config))
    async with connected(worker) as router:
        await router.send(load("bad"))
        (state,) = await router.until_loaded(1)
        assert (state.stage, state.error) == ("failed", "invalid")
        assert {"use_qalora", "layer_replication"} <= {
            violation.where for violation in state.violations
        }


async def test_another_digest_than_expected_is_a_violation(worker: Worker) -> None:
    async with connected(worker) as router:
        await router.send(load("a1", digest="0a" * 32))
        (state,) = await router.until_loaded(1)
        assert state.stage == "failed"


@pytest.mark.parametrize(
    ("lora_rank", "option"), [(200, "adapter_memory"), (140, "host_adapter_memory")]
)
async def test_an_adapter_larger_than_the_memory_is_refused_before_any_request(
    worker: Worker, root: Path, lora_rank: int, option: str
) -> None:
    targets = ("q_proj", "o_proj", "gate_proj", "down_proj")
    write_adapter(root / f"huge{lora_rank}", base(), rank=lora_rank, targets=targets)
    async with connected(worker) as router:
        await router.send(load(f"huge{lora_rank}"))
        (state,) = await router.until_loaded(1)
        assert (state.stage, state.error, state.violations) == ("failed", "too_large", ())
        assert f"option {option} to" in (state.message or "")


async def test_what_was_too_large_is_judged_again_with_more_memory(
    tmp_path: Path, root: Path
) -> None:
    write_adapter(root / "wide", base(), rank=120, targets=("gate_proj", "down_proj"))
    memory = ("--adapter-memory", "128KiB"), ("--adapter-memory", "4MiB")
    stages = []
    for options in (*memory, memory[0]):
        with running(tmp_path, "--adapter-root", str(root), *options) as worker:
            async with connected(worker) as router:
                await router.send(load("wide"))
                (state,) = await router.until_loaded(1)
                stages.append((state.stage, state.error))
    too_large = ("failed", "too_large")
    assert stages == [too_large, ("ready", None), too_large]
