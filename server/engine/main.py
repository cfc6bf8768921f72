"""The engine process: `python -m loraplex.server.engine.main`, started by a worker.

It maps the worker's host arena, builds the executor, says EngineReady or EngineFailed, and steps
until the worker tells it to leave or is gone.
"""

import argparse
import logging
import os
import pkgutil
import signal
import socket
import sys
import threading
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, cast

import msgspec

from loraplex.adapters.base import Shard
from loraplex.adapters.common import extras
from loraplex.adapters.common.logs import log_to_stderr
from loraplex.adapters.common.pauses import shorten_pauses
from loraplex.adapters.grammar.deep_threads import STACK_BYTES, run_deep
from loraplex.server.config import ConfigError, EngineConfig, set_unset_variables
from loraplex.server.constraints.constraints import Constraints, make_constraints
from loraplex.server.engine.channel import WorkerChannel, WorkerGone
from loraplex.server.engine.executor import Executor, ExecutorLimits, MemoryLine
from loraplex.server.engine.group.group import Follower, GroupExecutor
from loraplex.server.engine.loop import EngineLoop, ExecutorLost
from loraplex.server.engine.memory.room import tokens_together
from loraplex.server.engine.messages import EngineFailed, EngineReady, StartProgress
from loraplex.server.engine.scheduling.scheduler import Scheduler
from loraplex.server.engine.scheduling.scheduler_config import SchedulerConfig
from loraplex.server.engine.shared_memory import begun_in, map_shared
from loraplex.server.model.tokenizer.grammar_vocabulary import read_vocabulary

log = logging.getLogger(__name__)

# A device call may hang: so long after the worker is gone the process ends in any case.
LEAVE_GRACE_S = 5.0


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="loraplex.server.engine.main", description=__doc__)
    parser.add_argument("--socket-fd", type=int, required=True, help="stream socket to the worker")
    parser.add_argument("--arena-fd", type=int, required=True, help="file of host memory")
    parser.add_argument("--config", required=True, help="EngineConfig as JSON")
    parser.add_argument("--shard", type=int, default=0, help="which device's part of the model")
    parser.add_argument("--meeting", help="file through which processes of one model meet")
    parser.add_argument(
        "--link-fd",
        type=int,
        action="append",
        default=[],
        help="stream socket to another process of the model; of all but the first, to the first",
    )
    parser.add_argument(
        "--executor",
        default="torch",
        help="torch, or MODULE:FACTORY[:TEXT]; FACTORY(config, memory, TEXT) makes an Executor",
    )
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns the exit status: 0 after Shutdown or with the worker gone, else 1."""
    options = parse(arguments)
    # A terminal's Ctrl-C reaches the whole group; the worker decides when the engine leaves.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    leaving = threading.Event()

    def leave_soon() -> None:
        if not leaving.wait(LEAVE_GRACE_S):
            os._exit(1)

    channel = WorkerChannel(socket.socket(fileno=options.socket_fd), leave_soon)
    try:
        # Matchers go as deep as grammars do, also when they take a token.
        return run_deep(partial(_serve, options, channel))
    finally:
        channel.close(flush_s=LEAVE_GRACE_S)
        leaving.set()


def _serve(options: argparse.Namespace, channel: WorkerChannel) -> int:
    try:
        config = msgspec.json.decode(options.config, type=EngineConfig)
        number = f" {options.shard}" if config.shards > 1 else ""
        log_to_stderr(written=config.log_format, text=f"engine{number}: %(levelname)s %(message)s")
        memory = _map_memory(options.arena_fd, config.host_arena_bytes)
        executor = _build(options, config, memory, channel)
    except ConfigError as error:
        channel.send(EngineFailed(str(error)))
        return 1
    except Exception as error:  # of any type: the worker gets the message
        lacking = isinstance(error, ModuleNotFoundError) and extras.sentence(error, "server")
        log.error("the engine cannot start", exc_info=None if lacking else error)
        channel.send(EngineFailed(lacking or f"{type(error).__name__}: {error}"))
        return 1
    if options.shard > 0:
        return _follow(options, executor)
    depth = 2 if config.device == "cuda" else 1
    scheduling = SchedulerConfig(
        max_waiting=config.max_waiting,
        batch_share=config.batch_step_share,
        step_target_s=config.step_target_ms / 1e3,
        prompt_share=config.prompt_share,
        max_draft=config.max_draft,
        draft_memory=config.draft_memory,
    )
    scheduler = Scheduler(
        executor.limits, scheduling, executor.stored_pages, executor.stored_snapshots
    )
    constraints = _constraints(config, executor.limits)
    begun = begun_in(memory)
    loop = EngineLoop(executor, scheduler, channel, depth, constraints, begun=begun)
    shorten_pauses()
    constraints.open()
    try:
        channel.send(_ready(executor, config))
        loop.run()
    except WorkerGone:
        log.info("the worker is gone")
    except ExecutorLost as error:
        log.error("%s", error)
        return 1
    finally:
        constraints.close()
        executor.close()
    return 0


def _constraints(config: EngineConfig, limits: ExecutorLimits) -> Constraints:
    set_unset_variables({"RUST_MIN_STACK": str(STACK_BYTES)})  # of llguidance's own threads
    ends = limits.eos_token_ids
    load = partial(read_vocabulary, Path(config.model_path), limits.vocab_size, ends)
    return make_constraints(config.grammar, limits, load)


def _build(
    options: argparse.Namespace, config: EngineConfig, memory: memoryview, channel: WorkerChannel
) -> Executor[Any]:
    """The worker hears from the first process how far the start is."""
    if options.executor != "torch":
        return _other_executor(options.executor, config, memory)
    report = None if options.shard else channel.send
    if report is not None:
        report(StartProgress("loading libraries"))
    # Not at the top: a process without a model needs no torch.
    from loraplex.server.model.executor import TorchExecutor

    if config.shards == 1:
        return TorchExecutor(config, memory, report=report)
    from loraplex.server.model.devices.group import ProcessGroup

    group = ProcessGroup(Shard(options.shard, config.shards), options.meeting, config.device)
    executor = TorchExecutor(config, memory, group=group, report=report)
    return executor if options.shard else GroupExecutor(executor, _links(options))


def _links(options: argparse.Namespace) -> list[socket.socket]:
    return [socket.socket(fileno=link) for link in options.link_fd]


def _follow(options: argparse.Namespace, executor: Any) -> int:
    """Run the commands of the group's first process until it has left. Returns the exit status."""
    (link,) = _links(options)
    shorten_pauses()
    try:
        Follower(executor, link).run()
        executor.close()
    except Exception as error:  # of any type: a step that fails here leaves the others waiting
        log.error("a step failed", exc_info=error)
        os._exit(1)
    return 0


def _map_memory(fd: int, nbytes: int) -> memoryview:
    """The host arena's `nbytes`, and what lies behind it."""
    size = os.fstat(fd).st_size
    if size < nbytes:
        raise ValueError(f"the host arena has {size} bytes, expected {nbytes} (host_arena_bytes)")
    return map_shared(fd, size)


def _ready(executor: Executor[Any], config: EngineConfig) -> EngineReady:
    limits = executor.limits
    arena_bytes = limits.arena_extents * limits.extent_bytes
    return EngineReady(
        total_pages=limits.num_pages,
        page_size=limits.page_size,
        max_rows=limits.max_rows,
        max_context=limits.max_context,
        arena_bytes=arena_bytes,
        extent_bytes=limits.extent_bytes,
        dtype=config.dtype,
        device=config.device,
        adapter_slots=limits.adapter_slots,
        shards=config.shards,
        memory=executor.memory,
        host_pages=limits.host_pages,
        disk_pages=limits.disk_pages,
        summary=(
            _cache_line(limits),
            *_lines_below(limits),
            f"adapters: {arena_bytes / 2**20:.0f} MiB, at most {limits.adapter_slots} at once",
            f"a step: at most {limits.max_rows} sequences, {limits.max_step_tokens} tokens",
            *_memory_lines(executor.memory),
            *executor.summary,
        ),
    )


def _lines_below(limits: ExecutorLimits) -> Iterator[str]:
    """How much is kept below the device, for a person."""
    pages, size, windows = limits.host_pages, limits.page_size, limits.page_windows
    if pages:
        on_host = tokens_together(pages, size, windows, each=size)
        on_disk = tokens_together(limits.disk_pages, size, windows, each=size)
        yield f"below it: {on_host} tokens in host memory, {on_disk} on disk"


def _memory_lines(memory: Iterable[MemoryLine]) -> Iterator[str]:
    """How the device's memory is split, for a person."""
    for where, name in (("device", "GPU memory"), ("host", "host memory"), ("disk", "disk")):
        lines = [line for line in memory if line.where == where]
        if lines:
            split = ", ".join(f"{line.name} {line.nbytes / 2**30:.2f} GiB" for line in lines)
            yield f"{name}: {split}"


def _cache_line(limits: ExecutorLimits) -> str:
    """How much the KV cache holds, for a person."""
    pages, size, windows = limits.num_pages, limits.page_size, limits.page_windows
    if not windows:
        return "KV cache: none, since each prompt is computed in one step"
    whole = tokens_together(pages, size, windows, each=size)
    line = f"KV cache: {whole} tokens ({pages} pages of {size}"
    if len(windows) > 1:
        line += f", {len(windows)} for the same tokens"
    long = tokens_together(pages, size, windows, each=limits.max_context)
    return f"{line}; {long} in sequences of {limits.max_context})" if long > whole else f"{line})"


def _other_executor(text: str, config: EngineConfig, arena: memoryview) -> Executor[Any]:
    """Executor that `MODULE:FACTORY[:TEXT]` makes. Raises ConfigError; so may the factory."""
    module, _, rest = text.partition(":")
    name, _, given = rest.partition(":")
    try:
        make = pkgutil.resolve_name(f"{module}:{name}")
    except (ImportError, AttributeError, ValueError) as error:
        wanted = "--executor: expected torch or MODULE:FACTORY[:TEXT]"
        raise ConfigError(f"{wanted}, got {text!r} ({error})") from None
    return cast(Executor[Any], make(config, arena, given))


if __name__ == "__main__":
    sys.exit(main())
