"""A Driver whose model several processes share, as the processes of an engine do."""

import contextlib
import signal
import socket
import subprocess
from pathlib import Path
from typing import Any

import torch

from loraplex.adapters.base import Shard
from loraplex.server.engine.group.group import GroupExecutor
from loraplex.server.engine.shared_memory import HostMemory
from loraplex.server.model.devices.group import ProcessGroup
from loraplex.server.model.executor import TorchExecutor
from loraplex.server.model.start import WeightsLoader
from loraplex.server.worker.process.engine_process import GroupPlace, spawn_process
from tests.server.model.driver import Driver

_LEAVE_S = 60.0


class GroupDriver(Driver):
    """The first process is this one. Only one group may live at a time."""

    def __init__(self, folder: Path, shards: int, meeting: Path, **changes: Any) -> None:
        self._shards, self._meeting = shards, str(meeting)
        self._end = contextlib.ExitStack()
        self._processes: dict[int, subprocess.Popen[bytes]] = {}
        super().__init__(folder, shards=shards, **changes)

    def make_executor(self, weights: WeightsLoader | None) -> Any:
        assert weights is None
        self._memory = HostMemory(self.config.host_arena_bytes)
        self.arena: Any = self._memory.view
        links = [self._start(number) for number in range(1, self._shards)]
        group = ProcessGroup(Shard(0, self._shards), self._meeting, self.config.device)
        executor = TorchExecutor(self.config, self._memory.view, group=group)
        return GroupExecutor(executor, links)

    def _start(self, number: int) -> socket.socket:
        ours, theirs = socket.socketpair()
        worker, engine = socket.socketpair()
        place = GroupPlace(number, self._meeting, (theirs.fileno(),))
        with theirs:
            process = spawn_process("torch", self.config, self._memory.fd, engine, place)
        self._processes[number] = process
        self._end.callback(worker.close)
        return ours

    def devices(self) -> list[TorchExecutor]:
        group: Any = self.executor
        return [group._executor]

    def close(self) -> None:
        self.executor.close()
        self._end.close()
        for process in self._processes.values():
            assert process.wait(_LEAVE_S) == 0

    def stop(self, number: int) -> None:
        """A process stands still."""
        self._processes[number].send_signal(signal.SIGSTOP)

    def kill(self, number: int) -> None:
        """With one process all end, as a worker ends a group."""
        first = self._processes.pop(number)
        for process in (first, *self._processes.values()):
            process.kill()
            process.wait()
        self._processes.clear()


def enough_gpus(count: int) -> bool:
    return torch.cuda.is_available() and torch.cuda.device_count() >= count
