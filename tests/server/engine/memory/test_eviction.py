"""Eviction over traces: fewer bytes than LRU, and no trace on which it is much worse."""

import random
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import pytest

from loraplex.server.engine.memory.residency import MAX_REMEMBERED, AdapterArena, Worth
from tests.server.invariants import check_arena

ADAPTERS = 600
LENGTH = 12_000
EXTENTS = 160
SIZES = (1, 1, 2, 2, 4, 8)  # extents, as many small ones as published adapters have small ranks

Trace = Sequence[str]


@dataclass
class Replay:
    """An arena under a trace. A load takes a fixed time and a time for each extent."""

    sizes: dict[str, int]
    seconds: Callable[[str, int], float] = lambda digest, size: 0.2 + size
    arena: AdapterArena = field(default_factory=lambda: AdapterArena(EXTENTS, 1, EXTENTS))
    loaded: int = 0

    def use(self, digest: str) -> None:
        if self.arena.acquire(digest) is None:
            size = self.sizes[digest]
            assert self.arena.place(digest, (1,) * size) is not None
            self.arena.finish(digest, self.seconds(digest, size))
            self.loaded += size
            assert self.arena.acquire(digest) is not None
        self.arena.release(digest)

    def run(self, trace: Iterable[str]) -> "Replay":
        for digest in trace:
            self.use(digest)
        check_arena(self.arena)
        return self


def lru_bytes(trace: Trace, sizes: dict[str, int]) -> int:
    held: OrderedDict[str, int] = OrderedDict()
    loaded = 0
    for digest in trace:
        if digest not in held:
            loaded += sizes[digest]
            while sum(held.values()) + sizes[digest] > EXTENTS:
                held.popitem(last=False)
            held[digest] = sizes[digest]
        held.move_to_end(digest)
    return loaded


def sizes_of(trace: Trace) -> dict[str, int]:
    rng = random.Random(2)
    return {digest: rng.choice(SIZES) for digest in dict.fromkeys(trace)}


def zipf(rng: random.Random, length: int, exponent: float = 1.0) -> list[str]:
    names = [f"a{number}" for number in range(ADAPTERS)]
    rng.shuffle(names)
    return rng.choices(names, [(rank + 1) ** -exponent for rank in range(ADAPTERS)], k=length)


def with_scans(rng: random.Random) -> list[str]:
    """A steady popularity, and now and then two hundred adapters that are asked for once."""
    steady = zipf(rng, LENGTH)
    trace: list[str] = []
    for start in range(0, LENGTH, 500):
        trace += steady[start : start + 500]
        trace += [f"once{start}-{number}" for number in range(200)]
    return trace


def shifting(rng: random.Random, parts: int) -> list[str]:
    """Another popularity again and again."""
    return [digest for _ in range(parts) for digest in zipf(rng, LENGTH // parts)]


def sliding(rng: random.Random) -> list[str]:
    """Ten are in use, for some hundred uses, and never again."""
    return [f"a{number // 50 * 3 + rng.randrange(10)}" for number in range(LENGTH)]


def cyclic(rng: random.Random) -> list[str]:
    return [f"a{number % 200}" for number in range(LENGTH)]


@pytest.mark.parametrize(
    ("make", "share"),
    [
        (lambda rng: zipf(rng, LENGTH, 0.8), 0.95),
        (lambda rng: zipf(rng, LENGTH, 1.0), 0.9),
        (lambda rng: zipf(rng, LENGTH, 1.2), 0.85),
        (with_scans, 0.95),
        (lambda rng: shifting(rng, 4), 0.95),
        (lambda rng: shifting(rng, 12), 1.0),
        (sliding, 1.05),
        (cyclic, 1.0),
    ],
    ids=["zipf 0.8", "zipf 1.0", "zipf 1.2", "scans", "4 shifts", "12 shifts", "sliding", "cyclic"],
)
def test_bytes_loaded_against_lru(make: Callable[[random.Random], list[str]], share: float) -> None:
    trace = make(random.Random(1))
    sizes = sizes_of(trace)
    loaded, lru = Replay(sizes).run(trace).loaded, lru_bytes(trace, sizes)
    print(f"{loaded / lru:.3f} of LRU's bytes")
    assert loaded <= share * lru


def equal(seconds: Callable[[str, int], float] = lambda digest, size: 1.0) -> Replay:
    return Replay(dict.fromkeys((f"a{n}" for n in range(10_000)), 1), seconds)


HOT = [f"a{number}" for number in range(100)]


def held(replay: Replay, digests: Iterable[str]) -> int:
    return sum(replay.arena.stage(digest) == "ready" for digest in digests)


def test_a_scan_of_ten_times_the_room_pushes_out_nothing_that_was_used_more() -> None:
    replay = equal().run(HOT * 4)
    replay.run(f"a{number}" for number in range(1000, 1000 + 10 * EXTENTS))
    assert held(replay, HOT) == len(HOT)
    assert replay.arena.evictions["bytes"] == 10 * EXTENTS + len(HOT) - EXTENTS


def test_what_was_hot_goes_when_it_is_used_no_more() -> None:
    replay = equal().run(HOT * 100)
    other = [f"a{number}" for number in range(1000, 1150)]
    replay.run(other * 10)
    before = replay.loaded
    replay.run(other * 10)
    assert held(replay, other) == len(other)
    assert replay.loaded == before, "the old ones have made room for good"


def test_one_that_comes_and_goes_is_remembered() -> None:
    replay = equal().run(HOT * 3)
    for turn in range(6):
        replay.use("a9999")
        replay.run(f"a{number}" for number in range(1000 + 200 * turn, 1200 + 200 * turn))
    assert held(replay, ["a9999"]) == 1


def test_what_is_dear_to_load_stays_longer_but_not_for_ever() -> None:
    dear = set(HOT[80:])
    replay = equal(lambda digest, size: 1000.0 if digest in dear else 1.0).run(HOT)
    replay.run(f"a{number}" for number in range(1000, 1000 + 2 * EXTENTS))
    assert (held(replay, dear), held(replay, HOT)) == (20, 20)
    replay.run(f"a{number}" for number in range(2000, 2000 + 40 * EXTENTS))
    assert held(replay, dear) == 0


def test_a_large_one_that_loads_as_fast_a_byte_is_worth_no_less() -> None:
    worth = Worth()
    for digest, extents in (("large", 64), ("small", 1)):
        worth.loaded(digest, extents, 0.01 * extents)
        worth.used(digest, 2)
    assert list(worth.cheapest_first(["large", "small"], 2)) == ["large", "small"]
    worth.used("large", 2)
    assert list(worth.cheapest_first(["large", "small"], 2)) == ["small", "large"]


def test_memory_of_uses_is_bounded_and_the_forgotten_go_first() -> None:
    worth = Worth()
    worth.used("forgotten", 4)
    for number in range(MAX_REMEMBERED):
        worth.used(f"a{number}", 4)
    assert next(worth.cheapest_first([f"a{MAX_REMEMBERED - 1}", "forgotten"], 4)) == "forgotten"


def test_reasons_are_counted() -> None:
    arena = AdapterArena(4, 1, 3)
    for digest, runs in (("a", (1,)), ("b", (1,)), ("c", (1,))):
        assert arena.place(digest, runs) is not None
        arena.finish(digest)
    assert arena.place("d", (1,)) is not None
    arena.finish("d")
    arena.drop("d")
    assert arena.evictions == {"slots": 1, "order": 1}
    assert arena.place("e", (1, 1, 1)) is not None
    assert arena.evictions == {"slots": 1, "order": 1, "bytes": 1}
    arena.drop("e")
    assert arena.evictions["order"] == 1, "a load that was given up is no eviction"
