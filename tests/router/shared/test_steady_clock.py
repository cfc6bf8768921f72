"""Time that does not jump, whatever is done to the machine's clock."""

import time
from collections.abc import Sequence
from hashlib import sha256
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loraplex.router.shared.memory_store import MemoryStore
from loraplex.router.shared.steady_clock import SteadyClock
from tests.router.fake_worker import BASE_NAME, FakeWorker
from tests.router.serving import running_router

DAY_S = 86400.0
KEY = "k" * 32


class Clocks:
    """Moved by hand."""

    def __init__(self) -> None:
        self.wall = 1e9
        self.monotonic = 5.0
        self.steady = SteadyClock(lambda: self.wall, lambda: self.monotonic)

    def move(self, seconds: float, jump: float = 0.0) -> None:
        self.monotonic += seconds
        self.wall += seconds + jump


steps = st.lists(st.tuples(st.floats(0, 1e4), st.floats(-1e6, 1e6)), max_size=30)


@given(steps)
def test_it_runs_at_about_the_pace_of_time(moves: Sequence[tuple[float, float]]) -> None:
    clocks = Clocks()
    for seconds, jump in moves:
        before = clocks.steady()
        clocks.move(seconds, jump)
        passed = clocks.steady() - before
        assert 0.9 * seconds - 1e-3 <= passed <= 1.1 * seconds + 1e-3


@pytest.mark.parametrize("jump", [-3600.0, 3600.0])
def test_it_finds_back_to_the_wall_clock(jump: float) -> None:
    clocks = Clocks()
    clocks.move(1.0, jump)
    for _ in range(100):
        clocks.move(400.0)
        clocks.steady()
    assert clocks.steady() == pytest.approx(clocks.wall, abs=1e-3)
    clocks.move(10.0)
    assert clocks.steady() == pytest.approx(clocks.wall, abs=1e-3)


@pytest.mark.parametrize("jump", [-DAY_S, DAY_S])
async def test_a_lease_lasts_as_long_as_it_was_given(jump: float) -> None:
    clocks = Clocks()
    store = MemoryStore(clocks.steady)
    await store.lease("routers", "a", b"", 10.0)
    await store.set("key", b"value", 10.0)
    clocks.move(8.0, jump)
    assert await store.leased("routers") == {"a": b""}
    assert await store.get("key") == b"value"
    clocks.move(4.0)
    assert await store.leased("routers") == {}
    assert await store.get("key") is None


@pytest.mark.parametrize("jump", [-DAY_S, DAY_S])
async def test_a_router_goes_on(
    tmp_path: Path, worker: FakeWorker, monkeypatch: pytest.MonkeyPatch, jump: float
) -> None:
    """Deadlines, quotas and idempotency keys hold as they did."""
    off = [0.0]
    real = time.time
    monkeypatch.setattr("time.time", lambda: real() + off[0])
    keys = tmp_path / "keys.yaml"
    digest = sha256(KEY.encode()).hexdigest()
    limits = "limits: {requests_per_minute: 2}"
    keys.write_text(f"keys:\n- id: app\n  sha256: {digest}\n  {limits}\n")
    body = {"model": BASE_NAME, "prompt": "x", "max_tokens": 4}
    async with running_router(tmp_path, worker, auth="keys", keys_file=keys) as router:

        async def ask(key: str) -> int:
            headers = {"Authorization": f"Bearer {KEY}", "Idempotency-Key": key}
            answer = await router.client.post("/v1/completions", json=body, headers=headers)
            return answer.status_code

        assert await ask("one") == 200
        off[0] = jump
        assert await ask("one") == 200
        assert len(worker.requests) == 1, "the kept answer was forgotten"
        assert await ask("two") == 200
        assert await ask("three") == 429, "the quota was filled anew"
