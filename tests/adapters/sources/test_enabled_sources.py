"""Which sources there are is the operator's choice; a missing extra is named."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from loraplex.adapters.sources.enabled import open_sources
from tests.adapters.refusals import refusal

ROOT = Path(__file__).parents[3]
WITHOUT_BOTO3 = """
import sys
sys.modules["boto3"] = None
from loraplex.launcher.__main__ import main
sys.argv = ["loraplex", *{arguments}]
main()
"""


def test_buckets_and_hosts_enable_their_sources() -> None:
    assert set(open_sources()) == {"hub", "local"}
    assert set(open_sources(s3_buckets=["models"])) == {"hub", "local", "s3"}
    assert set(open_sources(https_hosts=["a.test"])) == {"hub", "local", "https"}
    assert set(open_sources(modelscope_owners=["*"])) == {"hub", "local", "modelscope"}
    assert refusal(lambda: open_sources(https_hosts=["https://a.test"])) is not None


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"hub_owners": ["acme", "acme/sql"]}, "--hub-owner 'acme/sql'"),
        ({"s3_buckets": ["s3://models"]}, "--s3-bucket 's3://models'"),
        ({"s3_buckets": ["Models"]}, "--s3-bucket 'Models'"),
        ({"https_hosts": ["a b"]}, "--https-host 'a b'"),
        ({"modelscope_owners": ["a/b"]}, "--modelscope-owner 'a/b'"),
        ({"modelscope_endpoint": "modelscope.cn"}, "--modelscope-endpoint 'modelscope.cn'"),
        ({"roots": [Path("/no/such/folder")]}, "--adapter-root /no/such/folder"),
        ({"roots": [Path(__file__)]}, f"--adapter-root {__file__}"),
        ({"roots": [Path("x" * 5000)]}, "--adapter-root xxx"),
    ],
)
def test_what_could_never_serve_an_adapter_is_refused(options: Any, named: str) -> None:
    error = refusal(lambda: open_sources(**options))
    assert error is not None
    assert error.code == "bad_ref"
    assert error.message.startswith(named)


def run_without_boto3(*arguments: str) -> subprocess.CompletedProcess[str]:
    code = WITHOUT_BOTO3.format(arguments=list(arguments))
    return subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)


def test_a_missing_extra_is_named(tmp_path: Path) -> None:
    worker = ("worker", str(ROOT / "launcher/demo/model"), "--cache-dir", str(tmp_path))
    for arguments in (
        (*worker, "--port", "0", "--s3-bucket", "models"),
        ("adapter", "check", "s3:models/a", "--base", "demo"),
    ):
        done = run_without_boto3(*arguments)
        assert done.returncode == 1, done.stderr
        assert "pip install 'loraplex[s3]'" in done.stderr
        assert "Traceback" not in done.stderr


@pytest.mark.exhaustive
def test_nothing_else_needs_the_extra() -> None:
    done = run_without_boto3("adapter", "check", "launcher/demo/adapters/polite", "--base", "demo")
    assert done.returncode == 0, done.stderr
