"""Every kernel compiles for the GPUs that are served; the interpreter accepts more than that."""

import pytest
import torch

from loraplex.server.kernels.launch.compile_ahead import compiled_together
from loraplex.server.kernels.pointwise.add_norm import add_norm
from tests.kernels.batches import interpreted
from tests.kernels.interpreter import ROOT, run_uninterpreted
from tests.unchanged import unless_unchanged


@pytest.mark.exhaustive
@pytest.mark.parametrize("capability", ["90"])
def test_kernels_compile_without_a_gpu(capability: str) -> None:
    read = ("server/kernels", "server/model/linear", "tests/kernels")
    with unless_unchanged(f"compile-{capability}", *read):
        printed = run_uninterpreted("tests.kernels.compile_all", capability)
        kernels = (ROOT / "server" / "kernels").rglob("*.py")
        names = {
            line.split("(")[0].removeprefix("def ")
            for path in kernels
            for line in path.read_text(encoding="utf-8").splitlines()
            if line.startswith("def _") and "_kernel(" in line
        }
        assert names == set(printed.split())


def test_one_that_cannot_be_compiled_leaves_the_others_be() -> None:
    first, second = run_uninterpreted("tests.kernels.compile_broken").splitlines()
    assert first == "CompilationError _fill_kernel"
    assert second == "_fill_kernel _fill_kernel"


@interpreted
def test_launches_compute_nothing_while_kernels_are_compiled_together() -> None:
    y, hidden = torch.ones(2, 2, 16)
    add = (y, None, hidden, (torch.ones(16), 1e-5))
    with compiled_together():
        add_norm(*add, programmatic_launch=False)
    assert y.eq(1).all()
    assert hidden.eq(1).all()
    add_norm(*add, programmatic_launch=False)
    assert hidden.eq(2).all()
