"""Published clients ask a live server for shapes and tools, unmodified."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.e2e.serving import ROOT, Serving

CLIENTS_PYTHON = ROOT / ".venv-clients/bin/python"
SCRIPTS = sorted(path.stem for path in (Path(__file__).parent / "clients").glob("of_*.py"))
# They send what the openai package or huggingface_hub sends, which have scripts of their own.
ON_OTHERS = (
    *("of_cohere", "of_hub"),
    *("of_agents", "of_guidance", "of_haystack", "of_instructor", "of_langchain", "of_litellm"),
    *("of_llama_index", "of_outlines", "of_pydantic_ai", "of_smolagents"),
)
NPM_CLIENTS = ROOT / ".venv-npm"
TIMEOUT_S = 240


@pytest.mark.clients
@pytest.mark.skipif(
    not CLIENTS_PYTHON.exists(), reason="`make test` makes the environment for these clients"
)
@pytest.mark.parametrize(
    "script",
    [
        pytest.param(script, marks=pytest.mark.exhaustive if script in ON_OTHERS else [])
        for script in SCRIPTS
    ],
)
def test_a_client_gets_what_it_asks_for(serving: Serving, script: str) -> None:
    """Each script is a module of `tests/e2e/clients`; it names the checks that failed."""
    passes(str(CLIENTS_PYTHON), "-m", f"tests.e2e.clients.{script}", serving.url)


@pytest.mark.clients
@pytest.mark.skipif(
    not (NPM_CLIENTS / "node_modules").exists(), reason="`make test` brings these packages"
)
def test_the_ai_sdk_gets_what_it_asks_for(serving: Serving) -> None:
    script = ROOT / "tests/e2e/clients/ai_sdk.mjs"
    passes("node", str(script), serving.url, str(NPM_CLIENTS))


def pinned(package: str, extra: str = "") -> str:
    """A requirement of the version that the other clients' environment has."""
    pins = (ROOT / "constraints.clients.txt").read_text().splitlines()
    version = next(pin.partition("==")[2] for pin in pins if pin.startswith(f"{package}=="))
    return f"{package}{extra}=={version}"


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("script", "package"),
    [
        ("proxied", pinned("litellm", "[proxy]")),
        ("on_semantic_kernel", "semantic-kernel==1.45.0"),
    ],
)
def test_a_large_client_gets_what_it_asks_for(
    serving: Serving, tmp_path: Path, script: str, package: str
) -> None:
    """In an environment of its own."""
    python = tmp_path / "venv/bin/python"
    subprocess.run([sys.executable, "-m", "venv", str(tmp_path / "venv")], check=True)
    pip = (str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check")
    subprocess.run([*pip, package, pinned("openai")], check=True)
    passes(str(python), "-m", f"tests.e2e.clients.{script}", serving.url)


def passes(*command: str) -> None:
    done = subprocess.run(
        command,
        cwd=ROOT,
        env=os.environ | {"PYTHONWARNINGS": "ignore"},
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.splitlines()[-1] == "all checks passed"
