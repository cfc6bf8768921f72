"""`/openapi.json` against a served demo: schemathesis finds nothing that its table does not say."""

import os
import re
import subprocess
from collections.abc import Iterator
from hashlib import sha256
from pathlib import Path

import httpx
import pytest

from tests.certifying.factory import certify
from tests.e2e.serving import ROOT, Serving, start_serving
from tests.tethered import tethered

SCHEMATHESIS = ROOT / ".venv-clients/bin/schemathesis"
REJECTED = [400, 401, 403, 404, 405, 406, 409, 413, 415, 422, 428, 429, "5xx"]  # with 413
CALLER, ADMIN = "lpx_caller_of_the_description", "operator of the description"
KEYS = f"keys: [{{id: app, tenant: acme, sha256: {sha256(CALLER.encode()).hexdigest()}}}]"
LEAST_CASES = 50_000
# That run at once: threads of one would change Python's recursion limit under each other.
PARTS = 3

pytestmark = [
    pytest.mark.exhaustive,
    pytest.mark.clients,
    pytest.mark.timeout(1800),
    pytest.mark.skipif(not SCHEMATHESIS.exists(), reason="`make test-all` installs schemathesis"),
]


@pytest.fixture(params=["open", "keyed"])
def described(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[Serving, str]]:
    """A served demo without its model, which would take the time, and what schemathesis has to know
    of the demo: one for anyone, one with keys."""
    options = ["--cache-dir", str(tmp_path / "cache"), "--files-dir", str(tmp_path / "files")]
    options += ["--responses-keep-s", "3600", "--max-context", "64"]
    options += ["--executor", certify(eos_percent=50)]  # answers are short
    (tmp_path / "prices.yaml").write_text("currency: USD\nprices:\n  - device_second: 0.001\n")
    options += ["--prices", str(tmp_path / "prices.yaml")]
    auth = ""
    if request.param == "keyed":
        (tmp_path / "keys.yaml").write_text(KEYS)
        (tmp_path / "admin").write_text(ADMIN)
        options += ["--keys-file", str(tmp_path / "keys.yaml")]
        options += ["--admin-key-file", str(tmp_path / "admin")]
        auth = f"[auth.openapi]\ncallerKey.bearer = '{CALLER}'\nadminKey.bearer = '{ADMIN}'\n"
    server = start_serving(*options, log=tmp_path / "log")
    yield server, auth
    server.process.terminate()
    assert server.process.wait(timeout=240) == 0, (tmp_path / "log").read_text()[-4000:]


def test_schemathesis_finds_nothing(described: tuple[Serving, str], tmp_path: Path) -> None:
    server, auth = described
    config = tmp_path / "schemathesis.toml"
    expected = f"[checks.negative_data_rejection]\nexpected-statuses = {REJECTED}\n"
    config.write_text(f"seed = 1\n[generation]\ndeterministic = true\n{expected}{auth}")
    document = httpx.get(f"{server.url}/openapi.json").raise_for_status().json()
    paths = [path for path in document["paths"] if path != "/pause"]  # what comes later would wait
    runs = [
        started(server, config, "stateful", ("--exclude-path", "/pause")),
        *(
            started(server, config, "coverage,fuzzing", included(paths[part::PARTS]))
            for part in range(PARTS)
        ),
    ]
    told = [run.communicate()[0] for run in runs]
    failed = [said[-20_000:] for run, said in zip(runs, told, strict=True) if run.returncode]
    assert not failed, "\n".join(failed)
    cases = [re.search(r"([\d,]+) generated", said) for said in told]
    assert all(cases)
    assert sum(int(each[1].replace(",", "")) for each in cases if each) > LEAST_CASES


def included(paths: list[str]) -> tuple[str, ...]:
    return tuple(argument for path in paths for argument in ("--include-path", path))


def started(
    server: Serving, config: Path, phases: str, operations: tuple[str, ...]
) -> subprocess.Popen[str]:
    return subprocess.Popen(
        tethered(
            *(str(SCHEMATHESIS), "--config-file", str(config), "run", "--phases", phases),
            *("--no-color", "--suppress-health-check", "all", "--continue-on-failure"),
            *("--request-timeout", "120", "--workers", "1"),
            *("--exclude-checks", "positive_data_acceptance", "--max-examples", "15"),
            *operations,
            f"{server.url}/openapi.json",
        ),
        env={
            **os.environ,
            "SCHEMATHESIS_HOOKS": "tests.e2e.schema_checks",
            "PYTHONPATH": str(ROOT),
        },
        cwd=config.parent,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
