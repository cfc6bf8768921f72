"""An executor that draws some rows through random masks, to measure the masks' cost in a step."""

from collections.abc import Callable

import msgspec
import numpy as np

from server.engine.executor import AdapterCopy, CopyNews, Masks
from server.engine.plan import SeqSlice, SliceResult, StepPlan
from server.model.executor import TorchExecutor
from server.model.sampling.results import StepTicket


class RandomMasks:
    """Implements `server.engine.executor.Executor`: samples of rows below `count` get a mask of
    half the vocabulary each, filled anew for every step."""

    def __init__(self, executor: TorchExecutor, count: int) -> None:
        self._executor, self._count = executor, count
        self.limits, self.summary = executor.limits, executor.summary
        shape = (count, -(-self.limits.vocab_size // 32))
        bits = np.random.default_rng(0).integers(0, 2**32, shape, dtype=np.uint32)
        self._bits = bits.view(np.int32)

    def launch(self, plan: StepPlan, meanwhile: Callable[[], None] | None = None) -> StepTicket:
        slices = [self._constrained(piece) for piece in plan.slices]
        ticket = self._executor.launch(msgspec.structs.replace(plan, slices=slices), meanwhile)
        chosen = [i for i, piece in enumerate(slices) if piece.constrained]
        if chosen:
            bits = self._executor.mask_memory(len(chosen))
            bits[:] = self._bits[: len(chosen)]
            self._executor.constrain(ticket, Masks(chosen, bits))
        return ticket

    def _constrained(self, piece: SeqSlice) -> SeqSlice:
        if not piece.sample or piece.seq_row >= self._count:
            return piece
        return msgspec.structs.replace(piece, constrained=True)

    def mask_memory(self, count: int) -> np.ndarray:
        return self._executor.mask_memory(count)

    def constrain(self, ticket: StepTicket, masks: Masks) -> None:
        self._executor.constrain(ticket, masks)

    def collect(self, ticket: StepTicket) -> list[SliceResult]:
        return self._executor.collect(ticket)

    def drain(self) -> None:
        self._executor.drain()

    def start_copy(self, copy: AdapterCopy) -> None:
        self._executor.start_copy(copy)

    def poll_copies(self) -> list[CopyNews]:
        return self._executor.poll_copies()

    def close(self) -> None:
        self._executor.close()
