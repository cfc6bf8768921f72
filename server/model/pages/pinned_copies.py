"""Large tensors on their way from mapped files to a GPU, through memory that is pinned."""

from collections.abc import Callable, Mapping, Sequence
from itertools import cycle
from types import TracebackType
from typing import Any, Self

import torch
from torch.overrides import TorchFunctionMode

from loraplex.server.model.pages.pinned import pin, unpin

_BUFFERS = 2
_BUFFER_BYTES = 64 << 20
# For smaller tensors the driver's own buffers do as well.
_LEAST_BYTES = 1 << 20


class PinnedCopies(TorchFunctionMode):
    """Inside, torch's `copy_` and `to` bring large tensors of host memory to the device through
    pinned buffers: torch's threads read and cast into one while the device takes the other one.

    Numbers are the same as without it. They are there for what the current stream does next.
    """

    def __init__(self, device: torch.device, buffer_bytes: int = _BUFFER_BYTES) -> None:
        super().__init__()
        self._device = device
        self._buffers = torch.empty(_BUFFERS, buffer_bytes, dtype=torch.uint8)
        self._next = cycle(range(_BUFFERS))
        self._taken: dict[int, torch.cuda.Event] = {}  # by buffer, when the device has read it
        self._is_pinned = False

    def __enter__(self) -> Self:
        self._is_pinned = self._device.type == "cuda" and pin(self._buffers)
        super().__enter__()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        super().__exit__(kind, error, trace)
        if self._is_pinned:
            torch.cuda.synchronize(self._device)
            unpin(self._buffers)

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if len(args) != 2 or kwargs:
            return func(*args, **(kwargs or {}))
        first, second = args
        copies = func == torch.Tensor.copy_ and first.shape == second.shape
        if copies and self._brings(second, first.device):
            return self._bring(second, first)
        if func == torch.Tensor.to and self._brings(first, second):
            return self._bring(first, torch.empty_like(first, device=second))
        return func(*args)

    def _brings(self, source: torch.Tensor, where: torch.device | torch.dtype) -> bool:
        to_device = isinstance(where, torch.device) and where.type == self._device.type
        return to_device and source.device.type == "cpu" and source.nbytes >= _LEAST_BYTES

    def _bring(self, source: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        """Copy in pieces of whole rows. source, target: of one shape. Returns target."""
        rows = self._buffers.shape[1] // target[0].nbytes
        if not rows:
            for row, place in zip(source, target, strict=True):
                self._bring(row, place)
            return target
        for piece, place in zip(source.split(rows), target.split(rows), strict=True):
            self._bring_piece(piece, place)
        return target

    def _bring_piece(self, source: torch.Tensor, target: torch.Tensor) -> None:
        """source: no larger than a buffer, as target's dtype."""
        number = next(self._next)
        if number in self._taken:
            self._taken[number].synchronize()
        buffer = self._buffers[number, : target.nbytes].view(target.dtype).view(target.shape)
        target.copy_(buffer.copy_(source), non_blocking=True)
        if target.is_cuda:
            self._taken[number] = torch.cuda.current_stream(target.device).record_event()
