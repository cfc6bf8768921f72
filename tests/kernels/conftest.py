"""The device that a kernel test runs on: the CPU under Triton's interpreter, or a GPU.

A file whose tests passed is skipped as long as that file, the kernels and all that it imports are
as they were.
"""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.kernels.interpreter import hasten
from tests.unchanged import kept_for, read_by

CONFTESTS = (Path(__file__), Path(__file__).parents[1] / "conftest.py")
_passed = set[str]()
hasten()


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.skipped or (report.when == "call" and report.passed):
        _passed.add(report.nodeid)


@pytest.fixture(scope="module", autouse=True)
def _unless_unchanged(request: pytest.FixtureRequest) -> Iterator[None]:
    """What is asked for by name, and what runs on a GPU, always runs."""
    options = request.config.option
    file: Path = request.path
    whole = not options.keyword and not any(file.name in one for one in request.config.args)
    if not whole or os.environ.get("TRITON_INTERPRET") != "1":
        yield
        return
    read = [*CONFTESTS, *read_by(file, "server/kernels")]
    kept = kept_for(f"{file.stem}-{options.markexpr.replace(' ', '-')}", read)
    if kept.exists():
        pytest.skip("the kernels and Triton are as when the tests of this file passed")
    yield
    mine = {item.nodeid for item in request.session.items if item.path == file}
    if mine <= _passed:
        kept.parent.mkdir(parents=True, exist_ok=True)
        kept.touch()


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> torch.device:
    name: str = request.param
    interpreted = os.environ.get("TRITON_INTERPRET") == "1"
    if name == "cpu" and not interpreted:
        pytest.skip("TRITON_INTERPRET=1 was not set when Triton was imported")
    if name == "cuda" and (interpreted or not torch.cuda.is_available()):
        pytest.skip("no CUDA device")
    return torch.device(name)
