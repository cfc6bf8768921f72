"""Pages that leave the device and come back: bit for bit, and in answers."""

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, cast

import pytest
import torch

from loraplex.server.engine.executor import PageCopies, PagesCopied
from loraplex.server.engine.plan import StateCopy
from loraplex.server.engine.shared_memory import map_shared
from loraplex.server.model.ops.row_states import RowStates
from loraplex.server.model.pages.page_copier import PageCopier
from tests.grids import beyond
from tests.server.model.engine import Engine
from tests.server.model.families.test_snapshots import Tried
from tests.server.model.ops.test_row_states import MODEL
from tests.server.model.sharding.processes import GroupDriver

pytestmark = [
    pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore:The following .*_pattern keys:RuntimeWarning"),
]
BELOW: dict[str, Any] = {"host_kv_memory": 4 << 20, "kv_memory": 1 << 19}


def shuffled(kind: int, count: int = 90) -> list[int]:
    return [3 + (i * i + kind * 31 * (i + 1)) % 90 for i in range(count)]


@pytest.fixture(scope="module")
def tried(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., Tried]]:
    """Bases with two adapters, by family and number of devices."""
    made: dict[str, Tried] = {}

    def find(row: str, shards: int = 1, **changes: Any) -> Tried:
        key = f"{row} {shards} {sorted(changes)}"
        if key not in made:
            made[key] = Tried(tmp_path_factory.mktemp("model"), row, shards, **BELOW, **changes)
        return made[key]

    yield find
    for each in made.values():
        each.driver.close()


def lose(tried: Tried, engine: Engine, kinds: range) -> None:
    for kind in kinds:
        engine.submit(tried.wish(shuffled(kind)))
        engine.run()


@pytest.mark.parametrize(
    ("row", "shards", "changes"),
    [
        ("llama3", 1, {}),
        ("llama3", 2, {}),
        ("gemma3", 1, {}),
        ("llama3", 1, {"kv_dtype": "int8"}),
        ("qwen3.5", 1, {}),
    ],
    ids=str,
)
def test_answers_after_pages_came_back(
    tried: Callable[..., Tried], row: str, shards: int, changes: dict[str, Any]
) -> None:
    """Of the base and of an adapter, as transformers and PEFT say. In int8, the same as before."""
    base = tried(row, shards, **changes)
    engine = base.engine(num_pages=60 * len(base.driver.executor.limits.page_windows))
    wishes = [base.wish(shuffled(0)), base.wish(shuffled(1), "rank16")]
    before = engine.answers(*wishes)
    lose(base, engine, range(2, 7))
    hits = engine.hits
    if changes:
        assert engine.answers(*wishes) == before
    else:
        base.ask(engine, *wishes)
    assert engine.hits - hits >= 100
    assert engine.scheduler.stats().swaps.recalled > 20
    engine.assert_at_rest()


def test_answers_after_a_preemption(tried: Callable[..., Tried]) -> None:
    base = tried("llama3")
    engine = base.engine(num_pages=44)
    wishes = [
        base.wish(shuffled(kind, 80), name, max_tokens=90)
        for kind, name in enumerate((None, "rank16"))
    ]
    base.ask(engine, *wishes)
    assert engine.scheduler.stats().preemptions
    assert engine.scheduler.stats().swaps.recalled


@pytest.mark.parametrize(
    ("row", "shards"), [("qwen3.5", 1), ("qwen3.5", 2), *beyond(1, [("lfm2", 1), ("granite-h", 1)])]
)
def test_answers_after_snapshots_came_back(
    tried: Callable[..., Tried], row: str, shards: int
) -> None:
    """The device keeps two snapshots: those of the first prompts are long overwritten."""
    base = tried(row, shards)
    assert base.driver.executor.limits.host_snapshots > 10
    engine = base.engine(num_snapshots=2)
    wishes = [base.wish(shuffled(0)), base.wish(shuffled(1), "rank16")]
    base.ask(engine, *wishes)
    lose(base, engine, range(2, 7))
    hits = engine.hits
    base.ask(engine, *wishes)
    assert engine.hits - hits == 2 * 88
    assert engine.scheduler.stats().state_swaps.recalled >= 2
    engine.assert_at_rest()


@pytest.mark.parametrize("shards", [1, 2])
def test_snapshots_of_an_earlier_start(shards: int, tmp_path: Path) -> None:
    """Written by one engine beside its pages, read by the next."""
    below = {"host_kv_memory": 1 << 20, "disk_kv": 32 << 20, "kv_folder": str(tmp_path / "kv")}
    base = Tried(tmp_path / "model", "qwen3.5", shards, **BELOW | below)
    lose(
        base, base.engine(num_pages=60, num_snapshots=2, host_snapshots=2, host_pages=90), range(9)
    )
    base.driver.close()
    again = base.driver.executor = base.driver.make_executor(None)
    assert len(again.stored_snapshots) > 4
    engine = base.engine(num_pages=60, num_snapshots=2)
    base.ask(engine, base.wish(shuffled(0)))
    assert engine.hits == 88
    assert engine.scheduler.stats().state_swaps.copied["read"] == 1
    base.driver.close()


@pytest.mark.parametrize("shards", [1, 2])
def test_pages_of_an_earlier_start(shards: int, tmp_path: Path) -> None:
    """Written by one engine, read by the next; a file that was changed is computed again."""
    below = {
        **BELOW,
        "host_kv_memory": 1 << 19,
        "disk_kv": 8 << 20,
        "kv_folder": str(tmp_path / "kv"),
    }
    base = Tried(tmp_path / "model", "llama3", shards, **below)
    engine = base.engine(num_pages=60)
    lose(base, engine, range(8))
    base.driver.close()
    again = base.driver.executor = base.driver.make_executor(None)
    assert len(again.stored_pages) > 30
    engine = base.engine(num_pages=60)
    base.ask(engine, base.wish(shuffled(0)))
    assert engine.hits >= 48
    assert engine.scheduler.stats().swaps.copied["read"] > 10
    for path in (tmp_path / "kv").rglob("*.page"):
        content = bytearray(path.read_bytes())
        content[-40] ^= 1
        path.write_bytes(content)
    lose(base, engine, range(20, 26))
    base.ask(engine, base.wish(shuffled(1)), base.wish(shuffled(2)))
    assert engine.scheduler.stats().swaps.failed["read"]
    base.driver.close()


def copied(copier: PageCopier, copies: PageCopies) -> None:
    copier.start(copies)
    found: list[PagesCopied] = []
    while not found:
        found = copier.poll()
    assert found == [PagesCopied(copies.number)]


NO_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
DEVICES = ["cpu", pytest.param("cuda", marks=[pytest.mark.gpu, NO_GPU])]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kept", [torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.int8])
@pytest.mark.parametrize("after_steps", [False, True])
def test_bits_are_the_same(device: str, kept: torch.dtype, after_steps: bool) -> None:
    """Any bits, NaN among them; neighbours in any order; with scales and without."""
    numbers = torch.randint(0, 256, (12, 64), dtype=torch.uint8).to(device)
    pools = [numbers.view(kept)]
    if kept is torch.int8:
        scales = torch.randint(0, 256, (12, 16), dtype=torch.uint8).to(device)
        pools.append(scales.view(torch.float32))
    slots, nbytes = 8, sum(pool.view(torch.uint8).shape[1] for pool in pools)
    memory = map_shared(-1, slots * nbytes + 5)
    copier = PageCopier(pools, memory, slots, None, after_steps=after_steps)
    before = [pool.view(torch.uint8).clone() for pool in pools]
    copied(copier, PageCopies(1, "out", (3, 4, 5, 9, 0), (6, 7, 2, 3, 0)))
    copied(copier, PageCopies(2, "in", (11, 1, 2, 7, 6), (6, 7, 2, 3, 0)))
    for pool, was in zip(pools, before, strict=True):
        now = pool.view(torch.uint8)
        assert torch.equal(now[[11, 1, 2, 7, 6]], was[[3, 4, 5, 9, 0]])
        assert torch.equal(now[[0, 3, 4, 5, 8, 9, 10]], was[[0, 3, 4, 5, 8, 9, 10]])
    copier.close()


@pytest.mark.parametrize("device", DEVICES)
def test_bits_of_snapshots_are_the_same(device: str) -> None:
    """Random bits fill the snapshots of all layers, in both forms."""
    states = RowStates(MODEL, 2, torch.bfloat16, torch.device(device), snapshots=4)
    of_rows = [state for layer in MODEL.states for state in states.of(layer)]
    for state in of_rows:
        state.copy_(torch.randn(state.shape))
    pools = states.snapshots()
    memory = map_shared(-1, 3 * sum(pool[0].nbytes for pool in pools))
    copier = PageCopier(pools, memory, 3, None, after_steps=True)
    states.save([StateCopy(0, 1), StateCopy(1, 2)])
    copied(copier, PageCopies(1, "out", (1, 2), (2, 0), of_states=True))
    for pool in pools:
        pool.zero_()
    copied(copier, PageCopies(2, "in", (3, 0), (2, 0), of_states=True))
    states.restore([StateCopy(2, 3)])
    assert all(torch.equal(state[2], state[0]) for state in of_rows)
    states.restore([StateCopy(2, 0)])
    assert all(torch.equal(state[2], state[1]) for state in of_rows)
    assert not any(pool[1:3].any() for pool in pools)
    copier.close()


@pytest.mark.gpu
@NO_GPU
def test_copies_beside_steps_do_not_wait_for_them() -> None:
    """On a device that is busy for long, `start` and `poll` return at once, and the copy ends
    before the steps do."""
    pool = torch.randint(0, 100, (64, 1 << 16), dtype=torch.int8, device="cuda")
    memory = map_shared(-1, 64 << 16)
    copier = PageCopier([pool], memory, 64, None, after_steps=False)
    sleep: Any = torch.cuda._sleep
    sleep(4_000_000_000)
    busy: Any = torch.cuda.current_stream().record_event()
    copied(copier, PageCopies(1, "out", tuple(range(64)), tuple(range(64))))
    assert not busy.query()
    torch.cuda.synchronize()
    copier.close()


@pytest.mark.exhaustive
def test_processes_copy_what_the_first_one_decides(tmp_path: Path) -> None:
    base = Tried(tmp_path / "model", "llama3", 2, **BELOW)
    base.driver.close()
    changes = {"snapshot_memory": 0, "max_step_tokens": 24, **BELOW}
    base.driver = GroupDriver(tmp_path / "model", 2, tmp_path / "meeting", **changes)
    engine = base.engine(num_pages=60)
    poll, plain = base.driver.executor.poll_copies, cast(Any, engine.executor)

    def wait_and_poll() -> Any:
        news = poll()
        if not news and engine.scheduler.swaps.is_copying:
            time.sleep(0.002)  # polls a condition, bounded by the harness's cycles
        return news

    plain._poll = wait_and_poll
    wishes = [base.wish(shuffled(0)), base.wish(shuffled(1), "rank16")]
    base.ask(engine, *wishes)
    lose(base, engine, range(2, 7))
    base.ask(engine, *wishes)
    assert engine.scheduler.stats().swaps.recalled > 20
    base.driver.close()
