"""Failures that say nothing of an adapter, and those that a rollout's guards count."""

from typing import get_args

import pytest

from loraplex.router.failures import DeadlinePassed, NoWorker, SequenceFailed, is_excused
from loraplex.server.protocol import ErrorCode

OF_THE_REQUEST = ("invalid_request", "invalid_image", "bad_grammar", "context_length")


@pytest.mark.parametrize("code", get_args(ErrorCode))
def test_what_a_worker_finds_wrong_with_a_request_is_no_fault_of_its_adapter(
    code: ErrorCode,
) -> None:
    assert is_excused(SequenceFailed(code, "why")) is (code in OF_THE_REQUEST)


def test_other_failures() -> None:
    assert is_excused(NoWorker("none", 1.0))
    assert not is_excused(DeadlinePassed())
