"""The offline engine's processes, one a device; run as a module it is one after the first."""

import argparse
import socket
import sys
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import msgspec
import torch

from loraplex.adapters.base import Shard
from loraplex.launcher.bench.engine.random_weights import STD, random_weights
from loraplex.server.config import EngineConfig
from loraplex.server.engine.executor import Executor
from loraplex.server.engine.group.group import Follower, GroupExecutor
from loraplex.server.model.devices.group import ProcessGroup
from loraplex.server.model.executor import TorchExecutor
from loraplex.server.model.lora.arena_weights import DTYPES
from loraplex.server.worker import tether

_MODULE = "loraplex.launcher.bench.engine.group"


def random_arena(config: EngineConfig) -> memoryview:
    """Makes the host arena, full of numbers of N(0, STD^2) in the run's dtype."""
    dtype = DTYPES[config.dtype]
    arena = torch.empty(config.host_arena_bytes // dtype.itemsize, dtype=dtype)
    arena.normal_(std=STD)
    return memoryview(arena.view(torch.uint8).numpy())  # type: ignore[arg-type]


def make_executor(
    config: EngineConfig, batches: Sequence[int] | None, undo: ExitStack
) -> Executor[Any]:
    """Starts an executor with random weights. batches: of decode graphs; None = a server's. undo:
    ends the processes that this starts."""
    arena = random_arena(config)
    if config.shards == 1:
        return TorchExecutor(config, arena, weights=random_weights, graph_batches=batches)
    folder = Path(undo.enter_context(tempfile.TemporaryDirectory()))
    meeting = str(folder / "meeting")
    links = [_start(config, batches, number, meeting, undo) for number in range(1, config.shards)]
    group = ProcessGroup(Shard(0, config.shards), meeting, config.device)
    executor = TorchExecutor(
        config, arena, group=group, weights=random_weights, graph_batches=batches
    )
    return GroupExecutor(executor, links)


def _start(
    config: EngineConfig,
    batches: Sequence[int] | None,
    number: int,
    meeting: str,
    undo: ExitStack,
) -> socket.socket:
    ours, theirs = socket.socketpair()
    arguments = [
        *("--config", msgspec.json.encode(config).decode()),
        *("--batches", msgspec.json.encode(batches).decode()),
        *("--shard", str(number)),
        *("--meeting", meeting),
        *("--link-fd", str(theirs.fileno())),
    ]
    with theirs:
        process = tether.spawn(_MODULE, arguments, pass_fds=(theirs.fileno(),))
    undo.callback(process.wait)
    undo.callback(process.kill)
    return ours


def main() -> int:
    parser = argparse.ArgumentParser(prog=_MODULE, description=__doc__)
    parser.add_argument("--config", required=True, help="EngineConfig as JSON")
    parser.add_argument("--batches", required=True, help="of decode graphs, as JSON")
    parser.add_argument("--shard", type=int, required=True)
    parser.add_argument("--meeting", required=True)
    parser.add_argument("--link-fd", type=int, required=True)
    given = parser.parse_args()
    config = msgspec.json.decode(given.config, type=EngineConfig)
    batches = msgspec.json.decode(given.batches, type=list[int] | None)
    group = ProcessGroup(Shard(given.shard, config.shards), given.meeting, config.device)
    executor = TorchExecutor(
        config, random_arena(config), group=group, weights=random_weights, graph_batches=batches
    )
    link = socket.socket(fileno=given.link_fd)
    Follower(executor, link).run()
    executor.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
