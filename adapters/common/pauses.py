"""Pauses of a process that has to answer at once."""

import gc
import sys

# Allocations between two collections; Python's own 700 are those of a request or two.
_YOUNG_OBJECTS = 10_000
# For which a thread that computes keeps the interpreter from another that waits; Python's own 5 ms
# are most of a step.
_SWITCH_S = 0.0005


def shorten_pauses() -> None:
    """Once everything is built that lasts: no collection looks at it any more, and there are fewer,
    since requests leave few cycles. Threads give way to each other sooner."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(_YOUNG_OBJECTS)
    sys.setswitchinterval(_SWITCH_S)
