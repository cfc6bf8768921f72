"""Sequences that a dead engine had begun, read from its memory."""

import os
import subprocess
import sys

import pytest

from loraplex.server.engine.begun import BegunSequences
from loraplex.server.engine.shared_memory import HostMemory

NEWEST = 4096
WRITES = """
import os, sys
from loraplex.server.engine.shared_memory import begun_in, map_shared
fd = int(sys.argv[1])
begun = begun_in(map_shared(fd, os.fstat(fd).st_size))
begun.begin(5)
begun.begin(6)
begun.take_back()
begun.begin(7)
os.abort()
"""


@pytest.mark.parametrize("nbytes", [0, 5, 3 << 12])
def test_the_dead_are_read_and_the_arena_is_left_alone(nbytes: int) -> None:
    memory = HostMemory(nbytes)
    memory.view[:] = b"x" * nbytes
    assert memory.begun.keys() == frozenset()
    command = [sys.executable, "-c", WRITES, str(memory.fd)]
    assert subprocess.run(command, pass_fds=[memory.fd]).returncode
    assert memory.begun.keys() == frozenset({5, 7})
    assert memory.view == b"x" * nbytes
    memory.begun.clear()
    assert memory.begun.keys() == frozenset()
    os.close(memory.fd)


def test_the_newest_are_kept() -> None:
    begun = BegunSequences(memoryview(bytearray(BegunSequences.NBYTES)))
    for key in range(NEWEST + 10):
        begun.begin(key)
    assert begun.keys() == frozenset(range(10, NEWEST + 10))


def test_what_waits_is_not_begun_however_many_began_before() -> None:
    begun = BegunSequences(memoryview(bytearray(BegunSequences.NBYTES)))
    for key in range(NEWEST):
        begun.begin(key)
    begun.begin(NEWEST)
    begun.take_back()
    assert begun.keys() == frozenset(range(1, NEWEST))
    begun.begin(NEWEST + 1)
    assert begun.keys() == frozenset({*range(1, NEWEST), NEWEST + 1})


def test_work_for_any_sequence_names_none() -> None:
    begun = BegunSequences(memoryview(bytearray(BegunSequences.NBYTES)))
    begun.begin(1)
    begun.mind_all(True)
    assert begun.keys() is None
    begun.mind_all(False)
    assert begun.keys() == frozenset({1})
