"""Quiet oracles: no progress bars in the output of tests. Long tests of kernels run where what they
read has changed."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from transformers.utils import logging as transformers_logging

from tests.kernels.interpreter import hasten
from tests.unchanged import unless_file_unchanged

hasten()


@pytest.fixture(scope="module", autouse=True)
def _unless_unchanged(request: pytest.FixtureRequest) -> Iterator[None]:
    if "gpu_path" in request.path.name:
        yield from unless_file_unchanged(request, Path(__file__))
    else:
        yield


@pytest.fixture(autouse=True, scope="session")
def _quiet_oracles() -> None:
    transformers_logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    torch.set_num_threads(1)
