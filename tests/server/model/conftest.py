"""Quiet oracles: no progress bars in the output of tests."""

import pytest
import torch
from transformers.utils import logging as transformers_logging

from tests.kernels.interpreter import hasten

hasten()


@pytest.fixture(autouse=True, scope="session")
def _quiet_oracles() -> None:
    transformers_logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    torch.set_num_threads(1)
