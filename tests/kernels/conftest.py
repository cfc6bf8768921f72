"""The device that a kernel test runs on: the CPU under Triton's interpreter, or a GPU."""

import os

import pytest
import torch

from tests.kernels.interpreter import hasten

hasten()


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> torch.device:
    name: str = request.param
    interpreted = os.environ.get("TRITON_INTERPRET") == "1"
    if name == "cpu" and not interpreted:
        pytest.skip("TRITON_INTERPRET=1 was not set when Triton was imported")
    if name == "cuda" and (interpreted or not torch.cuda.is_available()):
        pytest.skip("no CUDA device")
    return torch.device(name)
