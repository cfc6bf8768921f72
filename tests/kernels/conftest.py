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
from tests.unchanged import unless_file_unchanged

hasten()


@pytest.fixture(scope="module", autouse=True)
def _unless_unchanged(request: pytest.FixtureRequest) -> Iterator[None]:
    yield from unless_file_unchanged(request, Path(__file__))


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> torch.device:
    name: str = request.param
    interpreted = os.environ.get("TRITON_INTERPRET") == "1"
    if name == "cpu" and not interpreted:
        pytest.skip("TRITON_INTERPRET=1 was not set when Triton was imported")
    if name == "cuda" and (interpreted or not torch.cuda.is_available()):
        pytest.skip("no CUDA device")
    return torch.device(name)
