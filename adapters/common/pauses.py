"""Pauses of a process that has to answer at once."""

import gc
import sys

# Allocations between two collections; Python's own 700 are those of a request or two.
_YOUNG_OBJECTS = 10_000
# A computing thread keeps the interpreter this long. Python's own 5 ms are most of a step.
_SWITCH_S = 0.0005


def shorten_pauses() -> None:
    """Makes garbage collections rare and quick, and threads give way to each other sooner.

    Call this once all lasting objects are built: no collection looks at them any more.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(_YOUNG_OBJECTS)
    sys.setswitchinterval(_SWITCH_S)
