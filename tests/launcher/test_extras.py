"""loraplex without extras, and with each alone: commands run, or say which extra they need."""

import contextlib
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Mapping
from importlib.metadata import packages_distributions
from pathlib import Path

import httpx
import pytest

from loraplex.adapters.common import extras
from tests.launcher.fresh_environment import ROOT, linked
from tests.ports import free_port
from tests.tethered import tethered

TIMEOUT_S = 240.0
MODEL, POLITE = ROOT / "launcher/demo/model", ROOT / "launcher/demo/adapters/polite"
NOBODY = "http://127.0.0.1:9"
ALONE = ("router", "server", "serve", "traces", "plots", "s3", "convert", "eval")
# What an environment can do with an extra alone: Python, or a server and where it answers.
CODE = {
    "traces": "import loraplex.router.telemetry.otel",
    "plots": "from matplotlib import pyplot",
    "s3": "from loraplex.adapters.sources.enabled import open_sources; "
    "open_sources(s3_buckets=['models'])",
    "eval": "from loraplex.launcher.evaluation.scores import EvalLine, json_value; "
    "assert json_value('[1]', EvalLine(answer=[1]))",
    "convert": "import sys, torch; torch.save({'base_model.model.model.layers.0.self_attn.q_proj"
    ".lora_A.weight': torch.ones(2, 4), 'base_model.model.model.layers.0.self_attn.q_proj.lora_B"
    ".weight': torch.ones(4, 2)}, 'old/adapter_model.bin'); "
    "from loraplex.launcher.__main__ import main; "
    "main(['adapter', 'convert', 'old', '--out', 'new'])",
}
SERVERS = {
    "router": (["router", "--worker", "ws://127.0.0.1:9"], "/health/live"),
    "server": (["worker", str(MODEL)], "/health/ready"),
    "serve": (["serve", str(MODEL)], "/health/ready"),
}


def clean() -> dict[str, str]:
    return {k: v for k, v in os.environ.items() if not k.startswith(("LORAPLEX_", "PYTHON"))}


def tried(python: Path, folder: Path, *asked: list[str]) -> list[tuple[list[str], int, str]]:
    """Answers of an environment's commands. All helps are looked at, too."""
    done = subprocess.run(
        [python, "-P", str(ROOT / "tests/launcher/try_commands.py")],
        input=json.dumps(asked),
        capture_output=True,
        text=True,
        cwd=folder,
        env=clean(),
        timeout=TIMEOUT_S,
    )
    assert done.returncode == 0, done.stderr
    helps, answers = json.loads(done.stdout)
    assert len(helps) > 30
    assert all(text.startswith("usage: loraplex") for text in helps)
    assert not [said for _, _, said in answers if "Traceback" in said]
    return [(arguments, code, said) for arguments, code, said in answers]


def check_bare(python: Path, folder: Path) -> None:
    """Whatever needs no extra runs; everything else says which one."""
    batch = ["batch", "in", "--out", "out"]
    lacking = {
        "serve": [
            ["serve"],
            batch,
            ["info", str(MODEL)],
            ["bench", "decode", "--config", "llama-3.1-8b", "--dummy-weights"],
        ],
        "router": [["router", "--worker", "ws://127.0.0.1:9"], ["adapter", "check", str(POLITE)]],
        "server": [["worker", str(MODEL)]],
        "convert": [["adapter", "convert", str(POLITE), "--out", "new"]],
    }
    listing = ["adapter", "list", "--url", NOBODY]
    asked = [command for commands in lacking.values() for command in commands]
    free = (["--version"], ["info"], listing, [*batch, "--url", NOBODY])
    version, info, listed, lines, *refused = tried(python, folder, *free, *asked)
    assert version[1:] == (0, "loraplex 0.1.0\n")
    assert info[1] == 0
    assert "torch, tokenizers missing: run `pip install 'loraplex[serve]'`" in info[2]
    assert (listed[1], "no router answers" in listed[2]) == (1, True)
    assert (lines[1], "in cannot be read" in lines[2]) == (1, True)
    for command, code, said in refused:
        (extra,) = (name for name, commands in lacking.items() if command in commands)
        told = rf"loraplex: \w+ is not installed: run `pip install 'loraplex\[{extra}\]'`\n"
        assert code == 1, command
        assert re.fullmatch(told, said), (command, said)


def test_without_extras(tmp_path: Path) -> None:
    check_bare(linked(tmp_path / "bare"), tmp_path)


def serves(
    python: Path,
    folder: Path,
    arguments: list[str],
    health: str,
    environ: Mapping[str, str] | None = None,
) -> None:
    """The command runs until it answers there, and stops in peace."""
    port = free_port()
    place = ["--port", str(port), "--cache-dir", str(folder / "cache")]
    with (folder / "log").open("w+") as log:
        process = subprocess.Popen(
            tethered(str(python), "-P", "-m", "loraplex", *arguments, *place),
            cwd=folder,
            env=clean() | dict(environ or {}),
            stdout=log,
            stderr=subprocess.STDOUT,
        )
        try:
            deadline = time.monotonic() + TIMEOUT_S
            while not _answers(f"http://127.0.0.1:{port}{health}"):
                said = (folder / "log").read_text()
                assert process.poll() is None, said
                assert time.monotonic() < deadline, said
                time.sleep(0.05)
            process.terminate()
            assert process.wait(TIMEOUT_S) == 0
        finally:
            process.kill()
            process.wait(TIMEOUT_S)


def _answers(url: str) -> bool:
    with contextlib.suppress(httpx.TransportError):
        return httpx.get(url, trust_env=False).status_code == 200
    return False


def check_extra(python: Path, folder: Path, extra: str) -> None:
    if extra in SERVERS:
        serves(python, folder, *SERVERS[extra])
        return
    old = folder / "old"
    old.mkdir()
    config = {"peft_type": "LORA", "r": 2, "lora_alpha": 2, "target_modules": ["q_proj"]}
    (old / "adapter_config.json").write_text(json.dumps(config))
    done = subprocess.run(
        [python, "-P", "-c", CODE[extra]],
        cwd=folder,
        env=clean(),
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
    )
    assert done.returncode == 0, done.stderr


def test_with_the_extra_of_a_router(tmp_path: Path) -> None:
    worker, check, traced = tried(
        linked(tmp_path / "router", ("router",)),
        tmp_path,
        ["worker", str(MODEL)],
        ["adapter", "check", str(POLITE), "--base", "demo"],
        ["router", "--worker", "ws://127.0.0.1:9", "--otlp-endpoint", NOBODY],
    )
    assert worker[2] == "loraplex: torch is not installed: run `pip install 'loraplex[server]'`\n"
    assert check[1] == 0
    assert "pip install 'loraplex[traces]'" in traced[2]
    measured = subprocess.run(
        [
            tmp_path / "router/bin/python",
            "-m",
            "tools.demo.evaluate",
            "--messages",
            "1",
        ],
        cwd=ROOT,
        env=clean(),
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
    )
    assert (measured.returncode, measured.stdout) == (1, "")
    told = "loraplex: torch is not installed: run `pip install 'loraplex[dev]'`\n"
    assert measured.stderr == told


def test_modules_are_found_by_the_names_of_their_packages() -> None:
    """Where packages lack, only names can tell what brings a module."""
    brought = extras.brought_by_extras()
    assert set(ALONE) | {"gpu", "dev"} == set(brought)
    homes = {
        module: {name.lower() for name in names}
        for module, names in packages_distributions().items()
        if not module.startswith("_")
    }
    for extra in ALONE:
        for distribution in brought[extra]:
            for module in (m for m, names in homes.items() if distribution in names):
                if module not in ("functorch", "torchgen"):  # torch's, which nobody imports alone
                    assert f"loraplex[{extra}]" in extras.remedy(module, extra), module
    assert extras.remedy("flashinfer", "server") == "pip install 'loraplex[gpu]'"
    assert extras.remedy("yaml") == "pip install 'loraplex[router]'"
    assert extras.remedy("httpx") == "pip install loraplex"


def test_a_fault_of_ones_own_is_no_missing_package() -> None:
    for name in ("loraplex.router.gone", "loraplex", "asyncio.gone", None):
        assert extras.sentence(ModuleNotFoundError("no", name=name), "serve") is None


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    pip(sys.executable, "wheel", "--no-deps", "--wheel-dir", str(folder), str(ROOT))
    (built,) = folder.glob("*.whl")
    return built


def pip(python: Path | str, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [python, "-m", "pip", "--quiet", "--disable-pip-version-check", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, env=clean(), timeout=1500)
    assert done.returncode == 0, done.stderr[-4000:]
    return done


def installed(wheel: Path, folder: Path, extra: str) -> Path:
    subprocess.run([sys.executable, "-m", "venv", folder], check=True)
    what = f"{wheel}[{extra}]" if extra else str(wheel)
    pip(folder / "bin/python", "install", "-c", str(ROOT / "constraints.txt"), what)
    return folder / "bin/python"


@pytest.mark.exhaustive
def test_the_wheel_alone(wheel: Path, tmp_path: Path) -> None:
    python = installed(wheel, tmp_path / "bare", "")
    check_bare(python, tmp_path)
    done = subprocess.run([python.parent / "loraplex", "--version"], capture_output=True, text=True)
    assert done.stdout == "loraplex 0.1.0\n"


@pytest.mark.exhaustive
@pytest.mark.parametrize("extra", ALONE)
def test_the_wheel_with_one_extra(wheel: Path, tmp_path: Path, extra: str) -> None:
    check_extra(installed(wheel, tmp_path / extra, extra), tmp_path, extra)


@pytest.mark.exhaustive
def test_the_extra_for_gpus_can_be_had(wheel: Path) -> None:
    """Its gigabytes are not fetched: a plan is made of what would be."""
    limits = ("-c", str(ROOT / "constraints.txt"))
    pip(sys.executable, "install", "--dry-run", "--ignore-installed", *limits, f"{wheel}[gpu]")
