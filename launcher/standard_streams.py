"""Stdout and stderr of a command, which may be closed, full, or unable to write a character."""

import io
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress


def open_streams() -> None:
    """Lets a closed stream take everything, and one that lacks a character write its code."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115
        elif isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


@contextmanager
def written_to_the_end() -> Iterator[None]:
    """Raises OSError if stdout does not take what was written."""
    try:
        try:
            yield
        finally:
            sys.stdout.flush()
    except OSError:
        # The interpreter's end writes what is left: it may not fail once more.
        with suppress(OSError, ValueError), open(os.devnull, "w") as sink:
            os.dup2(sink.fileno(), sys.stdout.fileno())
        raise
