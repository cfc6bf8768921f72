"""Addresses of servers, asked of `tests.suites.servers` in a process of its own."""

import json
import os
import runpy
import subprocess
import sys
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[3]
tethered = runpy.run_path(str(ROOT / "tests" / "tethered.py"))["tethered"]
DEMO = ROOT / "launcher" / "demo"


@cache
def _servers() -> "subprocess.Popen[str]":
    environ = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = tethered(sys.executable, "-m", "tests.suites.servers")
    pipe = subprocess.PIPE
    return subprocess.Popen(command, cwd=ROOT, env=environ, stdin=pipe, stdout=pipe, text=True)


def url_of(model: str, *options: str) -> str:
    """Where a server answers under that name, started with those options."""
    servers = _servers()
    print(json.dumps([model, *options]), file=servers.stdin, flush=True)
    answer = json.loads(servers.stdout.readline())  # type: ignore[union-attr]
    if "error" in answer:
        raise RuntimeError(answer["error"])
    return str(answer["url"])
