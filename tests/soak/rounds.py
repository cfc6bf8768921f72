"""One round of a soak: a fleet with everything on, under load and faults."""

import asyncio
import random
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from statistics import mean

import psutil

from loraplex.launcher.demo import adapter_paths
from loraplex.server.engine.drafts.source import DraftSource
from tests.certifying.factory import certify
from tests.chaos.faults import Faults
from tests.chaos.processes import Fleet, Served, Shape, engine_of
from tests.router.shared.redis_server import RedisServer, running_redis
from tests.soak.load import (
    MAX_TOKENS,
    MIN_TOKENS,
    ROLLED,
    ROLLED_FROM,
    SoakCertifier,
    SoakClients,
    Tally,
)
from tests.soak.seeing import save_seeing

# In the first half of a round processes die; in the second one they live, and are weighed.
KILLS = ("worker killed", "engine killed", "router killed", "engine frozen")
DEADLY = (*3 * KILLS, "rolling restart")  # which takes as long as many others
# Of a round, for each fault of its first half, at most.
TOKENS_A_DEATH = 100_000
GENTLE = (
    "router and worker parted",
    "parted one way",
    "network slow",
    "redis frozen",
    "redis slow",
)
LONGEST_S = 2.0
WORKER_OPTIONS = (
    *("--max-draft", "8", "--host-kv-memory", "16MiB", "--disk-kv", "64MiB"),
    *("--picture-memory", "256KiB", "--model-name", "loraplex/demo"),
    # Room in a step for a draft of each sequence.
    *("--max-running", "1024", "--max-step-tokens", "1024"),
)
# Too little for what is repeated.
KV_MEMORY = "60MiB"
# Metrics of workers that say whether what is on was used.
USED = (
    *("recalled_kv_pages_total", "accepted_draft_tokens_total", "preemptions_total"),
    "images_total",
)
# As long as a GPU's, so that many sequences are in each step.
STEP_S = 0.02
# A process is flat if its last part weighs at most this much more than the part before.
PARTS = 4
GROWTH_BYTES, GROWTH_SHARE = 8 << 20, 0.05


@dataclass(frozen=True)
class Round:
    """The part of a run that is asked for. tokens: how many certified ones end the round."""

    seed: int
    tokens: int
    clients: int
    workers: int = 2
    calm_s: float = 2.0


@dataclass
class Weights:
    """Bytes of each process that it shares with none, by name, in the order of their taking."""

    taken: dict[str, list[int]] = field(default_factory=dict)

    @property
    def enough(self) -> bool:
        """Whether each part of the time has a weight of every process."""
        return bool(self.taken) and all(len(held) >= PARTS for held in self.taken.values())

    def take(self, fleet: Fleet) -> None:
        for process in fleet.processes:
            parent, engine = psutil.Process(process.pid), engine_of(process)
            self._add(process.name, parent)
            if engine is not None:
                self._add(f"{process.name}'s engine", psutil.Process(engine))

    def _add(self, name: str, process: psutil.Process) -> None:
        self.taken.setdefault(name, []).append(process.memory_full_info().uss)

    def means(self) -> dict[str, list[int]]:
        """The mean weight of each process in each of `PARTS` parts of the time."""
        found = {}
        for name, held in self.taken.items() if self.enough else ():
            cuts = [len(held) * part // PARTS for part in range(PARTS + 1)]
            found[name] = [round(mean(held[a:b])) for a, b in pairwise(cuts)]
        return found


def growing(means: dict[str, list[int]], tokens: int) -> list[str]:
    """Names of processes that are not flat. tokens: of a part, which engines keep for drafts up to
    a bound of theirs.
    """
    kept = {name: tokens * DraftSource.TOKEN_BYTES for name in means if "engine" in name}
    return [
        f"{name} grew: {', '.join(str(mean >> 20) for mean in held)} MiB"
        for name, held in means.items()
        if held[-1] - held[-2] > max(GROWTH_BYTES, held[-2] * GROWTH_SHARE) + kept.get(name, 0)
    ]


class SoakFleet(Fleet):
    """Routers with uploads, files and batches, which all of them share, and a name to roll out."""

    def __init__(self, folder: Path, asked: Round, redis: RedisServer) -> None:
        paths = adapter_paths()
        roots = next(iter(paths.values())).parent
        options = {"eos_percent": SoakCertifier.eos_percent, "step_s": STEP_S}
        executor = ("--executor", certify(**options, check_bytes=True))
        model = folder / "seeing"
        save_seeing(model)
        served = Served(model, roots, tuple(paths), (*executor, *WORKER_OPTIONS), KV_MEMORY)
        shape = Shape(workers=asked.workers, served=served)
        super().__init__(
            *(folder, shape, redis),
            *("--drain-timeout-s", "240"),  # the longest answers outlast the default
            *("--upload-store", str(folder / "uploads"), "--files-dir", str(folder / "files")),
        )
        self.served = served


@dataclass(frozen=True)
class Outcome:
    """The result of a round. used: sums of `USED` since workers last died.
    weights: mean bytes of each process, by parts of the second half."""

    seconds: float
    tally: Tally
    faults: Counter[str]
    used: dict[str, float]
    weights: dict[str, list[int]]

    def problems(self) -> list[str]:
        return [*self.tally.problems, *growing(self.weights, self.tally.tokens // 2 // PARTS)]


async def run(asked: Round, folder: Path) -> Outcome:
    """Raises what a process or a check of the fleet itself raised."""
    began, dice = time.monotonic(), random.Random(asked.seed)
    async with running_redis() as redis:
        fleet = SoakFleet(folder, asked, redis)
        clients = SoakClients(fleet.routers, SoakCertifier(fleet.served), asked.seed)
        try:
            await fleet.start_all()
            await clients.learn()
            await clients.register(ROLLED, f"local:{ROLLED_FROM}")
            load = asyncio.create_task(clients.run(asked.clients, MIN_TOKENS, MAX_TOKENS))
            faults = Faults(fleet, dice, LONGEST_S)
            done, weights = Counter[str](), Weights()
            while not (load.done() or _is_half_over(asked, clients.tally.tokens, done.total())):
                done[await _disturb(faults, DEADLY, dice, asked.calm_s)] += 1
            end = clients.tally.tokens + asked.tokens // 2
            while not (load.done() or (clients.tally.tokens >= end and weights.enough)):
                done[await _disturb(faults, GENTLE, dice, asked.calm_s)] += 1
                weights.take(fleet)
            used = {name: await _sum(fleet, name) for name in USED}
            clients.stop()
            await load
        finally:
            await clients.close()
            await fleet.close()
    return Outcome(time.monotonic() - began, clients.tally, done, used, weights.means())


def _is_half_over(asked: Round, tokens: int, deaths: int) -> bool:
    return tokens >= asked.tokens // 2 and deaths >= asked.tokens // TOKENS_A_DEATH


async def _disturb(faults: Faults, kinds: Sequence[str], dice: random.Random, calm_s: float) -> str:
    """The fault that was done, and is over."""
    fault = dice.choice(kinds)
    await faults.do(fault)
    await asyncio.sleep(dice.uniform(0.0, calm_s))
    return fault


async def _sum(fleet: Fleet, name: str) -> float:
    return sum([await fleet.metric(worker, f"loraplex_worker_{name}") for worker in fleet.workers])
