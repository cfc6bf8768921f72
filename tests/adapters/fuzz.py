"""Judges mutated adapters: `python -m tests.adapters.fuzz --count 10000 --seed 1`.

Each must be accepted or refused with documented codes, in little time and memory. A mutant that
crashes, hangs or grows ends the process with its number, from which it can be made again.
"""

import argparse
import faulthandler
import os
import random
import resource
import signal
import sys
import tempfile
from collections import Counter
from pathlib import Path

from loraplex.adapters.errors import AdapterError
from loraplex.adapters.judge import judge_folder
from loraplex.adapters.peft.validate import AdapterLimits
from tests.adapter_folders import small_base
from tests.adapters.fuzz_mutations import Files, mutate
from tests.adapters.spoils import write_good
from tests.documented_codes import VIOLATION_CODES

BASE = small_base()
MEMORY_BYTES = 512 << 20
CPU_SECONDS_EACH = 10
MAX_MESSAGE_CHARS = 2000
_KNOWN = VIOLATION_CODES | {"too_large"}


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--count", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--first", type=int, default=0)
    wanted = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        good = write_good(Path(name) / "good", BASE)
        files = {path.name: path.read_bytes() for path in good.iterdir()}
        _limit_memory()
        faulthandler.register(signal.SIGPROF, chain=True)  # shows where, then ends the process
        codes: Counter[str] = Counter()
        for number in range(wanted.first, wanted.first + wanted.count):
            folder = Path(name) / "mutant"
            _write(folder, mutate(files, random.Random(f"{wanted.seed}-{number}")))
            sys.stderr.write(f"\r{wanted.seed}-{number}")
            signal.setitimer(signal.ITIMER_PROF, CPU_SECONDS_EACH)
            codes.update(judge(folder))
    sys.stdout.write(f"{wanted.count} judged, {codes.pop('accepted', 0)} accepted\n")
    sys.stdout.writelines(f"{count:7} {code}\n" for code, count in codes.most_common())
    return 0


def judge(folder: Path) -> set[str]:
    """What is found in a mutant. Raises whatever is no documented answer."""
    try:
        judge_folder(folder, BASE, AdapterLimits())
    except AdapterError as error:
        found = {violation.code for violation in error.violations} or {str(error.code)}
        texts = [error.message, *(violation.message for violation in error.violations)]
        texts += [violation.where for violation in error.violations]
        if not found <= _KNOWN:
            raise AssertionError(f"not documented: {found - _KNOWN}") from error
        if not all(text.isprintable() and len(text) <= MAX_MESSAGE_CHARS for text in texts):
            raise AssertionError("a text that cannot be shown") from error
        return found
    return {"accepted"}


def _limit_memory() -> None:
    """What is used now, and a bounded amount more."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = pages * os.sysconf("SC_PAGE_SIZE") + MEMORY_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


def _write(folder: Path, files: Files) -> None:
    folder.mkdir(exist_ok=True)
    for path in folder.iterdir():
        path.unlink()
    for name, data in files.items():
        (folder / name).write_bytes(data)


if __name__ == "__main__":
    sys.exit(main())
