"""Published clients ask a live server for shapes and tools, unmodified."""

import os
import subprocess
from pathlib import Path

import pytest

from tests.e2e.serving import ROOT, Serving

CLIENTS_PYTHON = ROOT / ".venv-clients/bin/python"
SCRIPTS = sorted(path.stem for path in (Path(__file__).parent / "clients").glob("of_*.py"))
# They send what the openai package sends, which has a script of its own.
ON_OPENAI = (
    "of_agents",
    "of_haystack",
    "of_langchain",
    "of_litellm",
    "of_llama_index",
    "of_pydantic_ai",
)
TIMEOUT_S = 240


@pytest.mark.clients
@pytest.mark.skipif(
    not CLIENTS_PYTHON.exists(), reason="`make test` makes the environment for these clients"
)
@pytest.mark.parametrize(
    "script",
    [
        pytest.param(script, marks=pytest.mark.exhaustive if script in ON_OPENAI else [])
        for script in SCRIPTS
    ],
)
def test_a_client_gets_what_it_asks_for(serving: Serving, script: str) -> None:
    """Each script is a module of `tests/e2e/clients`; it names the checks that failed."""
    done = subprocess.run(
        [str(CLIENTS_PYTHON), "-m", f"tests.e2e.clients.{script}", serving.url],
        cwd=ROOT,
        env=os.environ | {"PYTHONWARNINGS": "ignore"},
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.splitlines()[-1] == "all checks passed"
