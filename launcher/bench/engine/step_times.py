"""Times of single steps, from the engine's report of each. Pure but for the clock."""

import time

import numpy as np

from loraplex.server.engine.messages import StepOutput

_MASKS = 4  # of a step's phases


class StepTimes:
    """Of the steps in which all `batch` sequences decode. Call it with each step's report.

    tokens: of such a step.
    """

    def __init__(self, batch: int, tokens: int) -> None:
        self._batch, self._tokens = batch, tokens
        self._last: float | None = None
        self._steps: list[float] = []
        self._masks: list[float] = []
        self.compiled: list[float] = []

    def __call__(self, output: StepOutput) -> None:
        now = time.perf_counter()
        self.compiled += [grammar.seconds for grammar in output.compiled]
        work = output.work
        if work is None:
            return
        if work.sequences != self._batch or output.num_tokens != self._tokens:
            self._last = None
            return
        if self._last is not None:
            self._steps.append(now - self._last)
            self._masks.append(work.phases_s[_MASKS])
        self._last = now

    def step_s(self, percentile: float) -> float:
        """From one step's results to the next one's."""
        return float(np.percentile(self._steps, percentile)) if self._steps else 0.0

    def masks_s(self) -> float:
        """Median of the time for which the engine's thread waited for masks."""
        return float(np.median(self._masks)) if self._masks else 0.0

    def new_grammar_s(self) -> float:
        """Median of the time from a grammar never seen to its first mask."""
        return float(np.median(self.compiled)) if self.compiled else 0.0
