"""llguidance's own threads have stacks as deep as the project's."""

import subprocess
import sys

PROGRAM = """
import re
from loraplex.adapters.grammar.deep_threads import STACK_BYTES, deep_executor

def sizes():
    for line in open("/proc/self/maps"):
        begin, end = re.match(r"([0-9a-f]+)-([0-9a-f]+)", line).groups()
        yield int(end, 16) - int(begin, 16)

before = sum(size >= STACK_BYTES for size in sizes())
executor = deep_executor(3)
print(sum(size >= STACK_BYTES for size in sizes()) - before)
"""


def test_stacks_of_native_threads() -> None:
    command = [sys.executable, "-c", PROGRAM]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert int(done.stdout) >= 1  # neighbours may be one mapping
