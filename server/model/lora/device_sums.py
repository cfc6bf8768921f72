"""Numbers that devices which share a model add up while an adapter is loaded.

No step is part of it, and nobody waits: numbers leave the device beside steps, and the host brings
the sums back when all devices have offered theirs.
"""

import torch

from loraplex.server.engine.executor import CopySums


class DeviceSums:
    """Sums over devices for one copy at a time."""

    def __init__(self, most: int, *, pinned: bool) -> None:
        """most: numbers of a copy."""
        self._digest = ""
        self._numbers: torch.Tensor | None = None
        self._room = torch.empty(most, pin_memory=pinned)
        self._host = self._room[:0]
        self._is_offered = False

    @property
    def are_awaited(self) -> bool:
        return self._numbers is not None

    def begin(self, digest: str, numbers: torch.Tensor) -> None:
        """numbers: float32 `[n]`, which become the sums. Queues on the current stream."""
        self._digest, self._numbers, self._is_offered = digest, numbers, False
        self._host = self._room[: len(numbers)]
        self._host.copy_(numbers, non_blocking=True)

    def offered(self) -> list[CopySums]:
        """This device's numbers, each once. To be asked once what `begin` queued is over."""
        if not self.are_awaited or self._is_offered:
            return []
        self._is_offered = True
        return [CopySums(self._digest, self._host.numpy().tobytes())]

    def end(self, sums: CopySums) -> None:
        """Queues on the current stream. Raises ValueError for what nobody waits for."""
        numbers = self._numbers
        is_awaited = numbers is not None and self._is_offered and sums.digest == self._digest
        if numbers is None or not is_awaited or len(sums.numbers) != self._host.nbytes:
            raise ValueError(f"no copy of {sums.digest} waits for these sums")
        if sums.numbers:
            self._host.copy_(torch.frombuffer(bytearray(sums.numbers), dtype=torch.float32))
            numbers.copy_(self._host, non_blocking=True)
        self._numbers = None
