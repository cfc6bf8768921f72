"""A start asks for every kernel that steps need: one compiled later holds up all streams."""

import pytest

from tests.kernels.interpreter import run_uninterpreted
from tests.unchanged import unless_unchanged


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "gpu",
    ["windows", "experts", "states", "latents", "shared", "rounded weights", "fa3", "fa2"],
)
def test_no_step_needs_a_kernel_that_the_start_has_not_asked_for(gpu: str) -> None:
    read = ("server/kernels", "server/model", "tests/kernels", "tests/server/model")
    with unless_unchanged(f"late-kernels-{gpu}", *read):
        told = run_uninterpreted("tests.server.model.late_kernels", gpu)
        first, *cases = told.splitlines()
        assert int(first.removeprefix("start ")) > 50
        assert len(cases) > 20
        assert [line for line in cases if "_kernel" in line] == []
