"""The reference multiplies the inputs that the GPU path rounded.

An input that lies as near to one number as to the next becomes either's, by how a sum was added up.
So does each token's largest magnitude in int8, which lies at 127.5. One such input moves a
logprob by a hundredth, and hides smaller faults.
"""

from collections import deque

import pytest
import torch

from loraplex.server.kernels.linear.row_form import (
    FP8,
    FP8_MOST,
    RoundedRows,
    RowForm,
    quantise_reference,
)
from loraplex.server.model.linear.dense import DEFAULT, Way
from loraplex.server.model.linear.quantised import RoundedLinear
from tests.server.model.gpu_pair import Pair

# Of a scale, and of what the largest magnitude becomes: how far sums of float32 take an input.
NEAR = 3e-5


def share_rounding(pair: Pair, patch: pytest.MonkeyPatch) -> None:
    """Let the reference take what the GPU path rounded just before, in the same steps."""
    layers = pair.reference.executor._decoder.weights.layers
    of_reference = {id(linear) for layer in layers for linear in layer.linears}
    noted: deque[RoundedRows] = deque()
    run = RoundedLinear.run

    def run_noted(
        linear: RoundedLinear,
        x: torch.Tensor | RoundedRows,
        out: torch.Tensor | None = None,
        way: Way = DEFAULT,
    ) -> torch.Tensor:
        if id(linear) not in of_reference:
            noted.append(_copied(x, linear.form))
            return run(linear, x, out, way)
        assert isinstance(x, torch.Tensor)
        return linear.base.run(_taken(x, linear.form, noted.popleft()), out, way)

    patch.setattr(RoundedLinear, "run", run_noted)


def _copied(x: torch.Tensor | RoundedRows, form: RowForm) -> RoundedRows:
    if isinstance(x, torch.Tensor):
        return quantise_reference(x, form)
    return RoundedRows(x.numbers.clone(), x.scales.clone())


def _taken(x: torch.Tensor, form: RowForm, found: RoundedRows) -> torch.Tensor:
    """Return the values of the numbers, each of which must be x's own, or that of a border near x.

    x: `[rows, in_features]`. found: these rows in any order, and padding.
    """
    scales = found.scales.T.repeat_interleave(form.group or x.shape[1], dim=1)[:, : x.shape[1]]
    rows = torch.cdist(x, found.numbers.float() * scales).argmin(1)
    own = quantise_reference(x, form).scales
    torch.testing.assert_close(found.scales[:, rows], own, atol=0, rtol=NEAR)
    numbers, scales = found.numbers.float()[rows], scales[rows]
    exact, slack = x / scales, NEAR * form.largest
    assert (_rounded(exact - slack, form) <= numbers).all()
    assert (numbers <= _rounded(exact + slack, form)).all()
    return numbers * scales


def _rounded(exact: torch.Tensor, form: RowForm) -> torch.Tensor:
    if form.dtype == FP8:
        return exact.clamp(-FP8_MOST, FP8_MOST).to(FP8).float()
    return exact.round().clamp(-128, 127)
