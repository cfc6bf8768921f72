"""Speed of a change on a server of this machine, which the bench makes and starts: adapters that
nobody has seen, from a folder in memory or by HTTP to their first token; many at once; and what
running streams notice of loads."""

import argparse
import asyncio
import hashlib
import os
import shutil
import time
from collections.abc import AsyncIterator, Sequence
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from random import Random
from statistics import fmean, median
from tempfile import TemporaryDirectory, mkdtemp
from typing import Any

import httpx
import numpy as np

from loraplex.adapters.common.disk import read_at, write_at
from loraplex.adapters.content_check import LEAF_BYTES, buffer
from loraplex.adapters.peft.validate import WEIGHTS_FILE
from loraplex.adapters.safetensors.floats import Raw, fits
from loraplex.launcher.bench.commands import add_config, print_points, run_async
from loraplex.launcher.bench.engine.offline import check_device, model_folder
from loraplex.launcher.bench.errors import BenchError
from loraplex.launcher.bench.load.serve import send
from loraplex.launcher.bench.load.target import Target, model_of
from loraplex.launcher.bench.load.workload import Call
from loraplex.launcher.bench.report import Outcome, percentile
from loraplex.launcher.command_line import Parser
from loraplex.launcher.option_types import above, lora_ranks, whole
from loraplex.launcher.router_client import push
from loraplex.launcher.serving.plan import LOOPBACK
from loraplex.launcher.serving.serve import free_port
from loraplex.server.worker.process.sizing import heavy_threads
from tools.bench import cold
from tools.bench.make_model import Maker
from tools.bench.router import running, until_ready
from tools.bench.streams import StreamsPlan, steady
from tools.bench.windows import gaps_within

# Of each rank and way. One more comes before: with it the server learns the shape.
_EACH = 3
_START_S = 180.0
_PROMPT_TOKENS = 16
_MANY_RANK = 16
_WINDOWS = ("quiet", "loads", "quiet again")
# A window's streams do not end: where they repeat themselves, a step brings several tokens.
_STREAM_TOKENS = 8000


@dataclass(frozen=True, slots=True)
class ChangeTimes:
    """Milliseconds of a change to an adapter of this rank, medians of three; the floor and the
    host's part are the best of four.

    floor: hash, check, pack and copy of the bytes alone, on all cores. host: from the folder to
    host memory, in this process with as many threads as a worker has. first_token: from a request
    that names the folder to its first token. put: an upload's answer; put_first_token: and the
    first token after it, from the upload's begin. warm: a request whose adapter is there.
    """

    rank: int
    mb: float
    floor: float
    host: float
    first_token: float
    put: float
    put_first_token: float
    warm: float


@dataclass(frozen=True, slots=True)
class AtOnce:
    """Seconds until first tokens of requests that came at once, each for an adapter of its own."""

    adapters_at_once: int
    p50_s: float
    last_s: float


@dataclass(frozen=True, slots=True)
class Gaps:
    """Milliseconds between tokens of running streams. growth: of p99 over quiet windows."""

    window: str
    loads: int
    p50: float
    p99: float
    max: float
    p99_growth: float | None


@dataclass(frozen=True, slots=True)
class Made:
    """A model and adapters on disk, and how much is measured. folder: holds all of it."""

    folder: Path
    config: Path
    device: str
    ranks: tuple[int, ...]
    many: int
    streams: int
    seconds: float
    loads: int

    @property
    def adapters(self) -> Path:
        return self.folder / "adapters"

    def names(self, kind: str, count: int = _EACH + 1) -> list[str]:
        return [f"{kind}-{number}" for number in range(count)]

    def make(self) -> None:
        """Raises CheckpointError, OSError."""
        maker = Maker(self.config, "bfloat16", self.device, os.cpu_count() or 1)
        maker.model(self.folder / "model")
        for rank in self.ranks:
            names = self.names(f"local{rank}") + self.names(f"put{rank}")
            maker.adapters(self.adapters, names, "base", rank)
        others = self.names("many", self.many) + self.names("beside", self.loads)
        maker.adapters(self.adapters, others, "base", _MANY_RANK)

    def host_parts(self) -> dict[int, tuple[float, float]]:
        """By rank: the floor and the host's part, in milliseconds."""
        found = {}
        for rank in self.ranks:
            names = self.names(f"local{rank}")
            floor = min(_floor_s(self.adapters / name / WEIGHTS_FILE) for name in names)
            cores = heavy_threads(len(os.sched_getaffinity(0)))
            times = cold.measure(self.config, self.adapters, names, "bfloat16", 1, cores)
            found[rank] = 1e3 * floor, times.first_use_ms
        return found


def _floor_s(path: Path) -> float:
    """Seconds of all that has to be done with the bytes of a file, on all cores."""
    nbytes, cores = path.stat().st_size, len(os.sched_getaffinity(0))
    slab: Raw = np.zeros(nbytes, np.uint8)  # written to before, as a worker's memory is
    with (
        TemporaryDirectory(prefix="loraplex-floor-") as folder,
        path.open("rb") as source,
        (Path(folder) / "copy").open("wb") as target,
        ThreadPoolExecutor(cores) as threads,
    ):
        slab.fill(1)
        work = partial(_floor_leaf, source.fileno(), target.fileno(), slab)
        list(threads.map(int, range(cores)))
        started = time.perf_counter()
        list(threads.map(work, range(0, nbytes, LEAF_BYTES)))
        return time.perf_counter() - started


def _floor_leaf(source: int, target: int, slab: Raw, start: int) -> None:
    piece = buffer(min(LEAF_BYTES, len(slab) - start))
    read_at(source, piece.data, start)
    hashlib.sha256(piece.data).digest()
    fits(piece[: len(piece) // 2 * 2], "BF16", "bfloat16")
    slab[start : start + len(piece)] = piece
    write_at(target, piece.data, start)


class _Server:
    """A running server, and requests to it."""

    def __init__(self, made: Made, port: int) -> None:
        self.url = f"http://{LOOPBACK}:{port}"
        self.target = Target(self.url, "base")
        self._made = made
        self._random = Random("changes")
        self._uploading = httpx.Client(base_url=self.url, timeout=60.0, trust_env=False)

    async def first_token_s(self, model: str) -> float:
        """Asks for one token. Raises BenchError."""
        outcome = Outcome(model, True, 0.0)
        prompt = [self._random.randrange(100, 1000) for _ in range(_PROMPT_TOKENS)]
        await send(self.target, Call(0, 0.0, model, prompt, 1), outcome)
        if outcome.error is not None:
            raise BenchError(f"{model}: {outcome.error} {outcome.message}")
        return outcome.ttft_s

    def close(self) -> None:
        self._uploading.close()

    def push(self, name: str) -> float:
        """Seconds of an upload. Raises CommandError."""
        started = time.perf_counter()
        push(self._uploading, f"/v1/adapters/{name}", self._made.adapters / name)
        return time.perf_counter() - started

    async def change(self, rank: int, floor: float, host: float) -> ChangeTimes:
        local, puts, uploaded, warm = [], [], [], []
        for name in self._made.names(f"local{rank}"):
            model = model_of(name, registered=False)
            local.append(await self.first_token_s(model))
            warm.append(await self.first_token_s(model))
        for name in self._made.names(f"put{rank}"):
            puts.append(await asyncio.to_thread(self.push, name))
            uploaded.append(puts[-1] + await self.first_token_s(name))
        weights = self._made.adapters / f"local{rank}-0" / WEIGHTS_FILE
        found = (1e3 * median(times[1:]) for times in (local, puts, uploaded, warm))
        return ChangeTimes(rank, weights.stat().st_size / 1e6, floor, host, *found)

    async def at_once(self) -> AtOnce:
        models = [model_of(name, registered=False) for name in self._many]
        times = sorted(await asyncio.gather(*map(self.first_token_s, models)))
        return AtOnce(len(times), median(times), times[-1])

    @property
    def _many(self) -> list[str]:
        return self._made.names("many", self._made.many)

    async def gaps(self) -> AsyncIterator[Gaps]:
        """Yields gaps of streams before, beside and after loads. Raises BenchError."""
        made = self._made
        plan = StreamsPlan(
            target=self.target,
            names=(),
            stream_adapters=tuple(self._many),
            streams=made.streams,
            seconds=made.seconds,
            settle_s=0.0,
            stream_prompt=_PROMPT_TOKENS,
            stream_output=_STREAM_TOKENS,
            new_prompt=0,
            new_output=0,
            seed=0,
            registered=False,
        )
        gaps: dict[str, list[float]] = {}
        for window in _WINDOWS:
            async with steady(plan, self._random) as streams:
                begin = time.monotonic()
                await asyncio.gather(asyncio.sleep(made.seconds), self._load(window == "loads"))
                span = begin, time.monotonic()
                if any(stream.done.done() for stream in streams):
                    raise BenchError(f"streams ended in the window {window}: lower --seconds")
                times = [list(stream.answer.token_s) for stream in streams]
            gaps[window] = [gap for stream in times for gap in gaps_within(stream, *span)]
            if not gaps[window]:
                raise BenchError(f"no stream had two tokens in the window {window}")
        quiet = fmean(percentile(found, 99) for window, found in gaps.items() if window != "loads")
        for window, found in gaps.items():
            p50, p99 = (1e3 * percentile(found, p) for p in (50, 99))
            loads = made.loads if window == "loads" else 0
            growth = p99 - 1e3 * quiet if loads else None
            yield Gaps(window, loads, p50, p99, 1e3 * max(found), growth)

    async def _load(self, wanted: bool) -> None:
        """Loads adapters that nobody has seen, evenly over a window."""
        made = self._made
        async with asyncio.TaskGroup() as group:
            for name in made.names("beside", made.loads if wanted else 0):
                group.create_task(self.first_token_s(model_of(name, registered=False)))
                await asyncio.sleep(made.seconds / made.loads)


@asynccontextmanager
async def _served(made: Made) -> AsyncIterator[_Server]:
    port = free_port(LOOPBACK, 0)
    options = {
        "--port": port,
        "--device": made.device,
        "--model-name": "base",
        "--adapter-root": made.adapters,
        "--cache-dir": made.folder / "cache",
        "--executor": "torch",
    }
    words = [str(word) for option in options.items() for word in option]
    async with running("loraplex", "serve", str(made.folder / "model"), *words):
        server = _Server(made, port)
        await until_ready(server.url, 1, _START_S)
        await server.first_token_s("base")
        try:
            yield server
        finally:
            server.close()


async def _measure(made: Made, show: Any) -> None:
    host = made.host_parts()
    async with _served(made) as server:
        show([await server.change(rank, *host[rank]) for rank in made.ranks])
        show([await server.at_once()])
        show([gaps async for gaps in server.gaps()])


def add_arguments(parser: Parser) -> None:
    """Adds the model and how much is measured."""
    add_config(parser)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda")
    parser.add_argument(
        "--folder", type=Path, default=Path("/dev/shm"), help="for all files, which go at the end"
    )
    parser.add_argument("--rank", type=lora_ranks, metavar="N,…", default=(1, 8, 16, 64))
    parser.add_argument("--many", type=whole(1), default=64, help="adapters of rank 16 at once")
    parser.add_argument("--streams", type=whole(1), default=64, help="beside loads")
    parser.add_argument("--seconds", type=above(0), default=8.0, help="of a window")
    parser.add_argument("--loads", type=whole(1), default=40, help="in the window with loads")


def run(arguments: argparse.Namespace) -> None:
    """Raises BenchError, CheckpointError, CommandError, OSError."""
    check_device(arguments.device)
    folder = Path(mkdtemp(prefix="loraplex-changes-", dir=arguments.folder))
    config = model_folder(arguments.config)
    sizes = (arguments.rank, arguments.many, arguments.streams, arguments.seconds, arguments.loads)
    made = Made(folder, config, arguments.device, *sizes)
    try:
        # A process of its own: what it takes of the device is free before the server starts.
        with ProcessPoolExecutor(1, get_context("spawn")) as maker:
            maker.submit(made.make).result()
        run_async(_measure(made, partial(_show, as_json=arguments.json)))
    finally:
        shutil.rmtree(folder)


def _show(points: Sequence[Any], as_json: bool) -> None:
    print_points(points, as_json)
    print(flush=True)
