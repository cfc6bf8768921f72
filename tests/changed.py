"""Runs the long tests of the rooms that changed since the last commit which passed.

`python -m tests.changed`. `.cache/passed.json` holds that commit, and the files of tests that an
earlier run had no time for. Those go first. A machine without that file runs no long test, and
says so.
"""

import json
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path, PurePosixPath
from typing import NamedTuple

from tests.tethered import tethered

ROOT = Path(__file__).parents[1]
PASSED = ROOT / ".cache" / "passed.json"
TIME_S = 3600.0
AT_ONCE = 2
NO_TESTS = 5  # pytest's exit status where no test is selected
# Tests of these rooms do not lie at the mirrored path.
ELSEWHERE = {
    "server/kernels": "tests/kernels",
    "server/model/devices": "tests/server/model/sharding",
}
# Rooms and files that have tests in other rooms, too: mostly of whole servers and fleets. The first
# are in each answer's way.
BESIDES = {
    **dict.fromkeys(
        ("router/http", "router/generation", "router/workers", "server/worker"),
        ("tests/chaos", "tests/e2e"),
    ),
    **dict.fromkeys(
        (
            *("adapters/merge", "adapters/peft", "adapters/store"),
            *("deploy/boards", "launcher/worker_groups.py"),
            *("router/console", "router/names", "router/operations", "router/telemetry"),
            *("server/engine/group", "server/model/devices", "server/model/lora"),
            *("router/text", "server/model/quantisation", "server/model/sampling"),
            "server/model/tokenizer",
        ),
        ("tests/e2e",),
    ),
    **dict.fromkeys(
        ("server/model/linear", "server/model/ops"), ("tests/kernels", "tests/server/model/graphs")
    ),
    "constraints.txt": ("tests/kernels",),  # Triton's version
    "docs/guides": ("tests/loraplex",),
    "router/policy": ("tests/tools",),
    "server/kernels": ("tests/server/model",),
}


class Passed(NamedTuple):
    """The last commit that passed, and files of tests that it did not come to."""

    commit: str
    left: list[str]


def changed_paths(name_status: str) -> Iterator[str]:
    """Paths in the output of `git diff -M --name-status -z`, without files moved as they were."""
    fields = iter(name_status.split("\0"))
    for status in fields:
        if not status:
            return
        path = next(fields)
        if status[0] in "RC":
            path = next(fields)
        if status != "R100":
            yield path


def asked_by(path: str, folders: set[str]) -> Iterator[str]:
    """Files and folders of tests that a changed file asks for. folders: all below tests/."""
    file = PurePosixPath(path)
    if file.parts[0] == "tests":
        if file.name.startswith("test_"):
            yield path
        elif str(file.parent) in folders:
            yield str(file.parent)
        return
    rooms = [str(room) for room in (file, *file.parents) if room.parts]
    mirrored = (ELSEWHERE.get(room, f"tests/{room}") for room in rooms)
    yield from [folder for folder in mirrored if folder in folders][:1]
    yield from dict.fromkeys(folder for room in rooms for folder in BESIDES.get(room, ()))


def outermost(paths: Iterable[str]) -> list[str]:
    """Sorted paths, without those that lie in another."""
    kept: list[str] = []
    for path in sorted(set(paths), key=lambda path: PurePosixPath(path).parts):
        if not kept or PurePosixPath(kept[-1]) not in PurePosixPath(path).parents:
            kept.append(path)
    return kept


def files_of(collected: str) -> list[str]:
    """Files of the tests that `pytest --collect-only -q` names, in order."""
    names = (line.partition("::") for line in collected.splitlines())
    return list(dict.fromkeys(file for file, separator, _ in names if separator))


def git(*arguments: str) -> str:
    command = ["git", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout


def passed_before() -> Passed | None:
    if not PASSED.exists():
        return None
    passed = Passed(**json.loads(PASSED.read_text()))
    command = ["git", "cat-file", "-e", f"{passed.commit}^{{commit}}"]
    known = subprocess.run(command, cwd=ROOT, capture_output=True, check=False).returncode == 0
    return passed if known else None


def pytest_command(*arguments: str) -> list[str]:
    """Long tests, and those that draw: other examples than an ordinary run."""
    chosen = ["-m", "exhaustive or hypothesis", "--hypothesis-profile", "anew"]
    return [sys.executable, "-m", "pytest", "-q", *chosen, *arguments]


def collect(paths: Sequence[str]) -> list[str]:
    there = [path for path in paths if (ROOT / path).exists()]
    if not there:
        return []
    command = pytest_command("--collect-only", *there)
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode not in (0, NO_TESTS):
        sys.exit(f"{done.stdout}\n{done.stderr}")
    return files_of(done.stdout)


def run(file: str, deadline: float) -> int | None:
    """Runs a file's long tests. Gives pytest's exit status, or None where time was out."""
    if (left := deadline - time.monotonic()) <= 0:
        return None
    command = pytest_command("--durations=5", file)
    with subprocess.Popen(
        tethered(*command), cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as process:
        try:
            printed, _ = process.communicate(timeout=left)
        except subprocess.TimeoutExpired:
            process.kill()
            return None
    print(f"== long tests of {file}\n{printed}", flush=True)
    return process.returncode


def main() -> int:
    head, before = git("rev-parse", "HEAD").strip(), passed_before()
    left: list[str] = []
    failed: list[str] = []
    if before is None:
        print(f"no long test is run: {PASSED.relative_to(ROOT)} names no commit that passed")
    else:
        folders = {str(path.relative_to(ROOT)) for path in (ROOT / "tests").rglob("*/")}
        changed = changed_paths(git("diff", "-M", "--name-status", "-z", before.commit))
        rooms = outermost(test for path in changed for test in asked_by(path, folders))
        files = list(dict.fromkeys([*collect(before.left), *collect(rooms)]))
        print(f"long tests since {before.commit[:8]}: {' '.join(files) or 'none'}", flush=True)
        deadline = time.monotonic() + TIME_S
        with ThreadPoolExecutor(AT_ONCE) as pool:
            statuses = list(pool.map(lambda file: run(file, deadline), files))
        ended = dict(zip(files, statuses, strict=True))
        left = [file for file, status in ended.items() if status is None]
        failed = [file for file, status in ended.items() if status not in (0, None, NO_TESTS)]
    for file in left:
        print(f"not run, as {TIME_S / 60:.0f} minutes were over: {file}")
    for file in failed:
        print(f"failed: {file}")
    if failed:
        return 1
    PASSED.parent.mkdir(exist_ok=True)
    PASSED.write_text(json.dumps(Passed(head, left)._asdict()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
