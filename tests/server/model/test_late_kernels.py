"""A start asks for every kernel that steps need: one compiled later holds up all streams."""

from pathlib import Path

from tests.kernels.interpreter import run_uninterpreted


def test_no_step_needs_a_kernel_that_the_start_has_not_asked_for(tmp_path: Path) -> None:
    first, *cases = run_uninterpreted("tests.server.model.late_kernels", tmp_path).splitlines()
    assert int(first.removeprefix("start ")) > 50
    assert len(cases) > 20
    assert [line for line in cases if "_kernel" in line] == []
