"""Kernels of states against the token-by-token definition in plain torch."""

import os
from dataclasses import replace
from itertools import pairwise
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from loraplex.server.engine.plan import StateCopy
from loraplex.server.kernels.states.causal_conv import causal_conv
from loraplex.server.kernels.states.delta_rule import DeltaGates, DeltaHeads, delta_rule
from loraplex.server.kernels.states.gated_norm import gated_norm
from loraplex.server.kernels.states.slices import Runs, Singles
from loraplex.server.model.linear.dense import DenseLinear
from loraplex.server.model.ops import delta_net, delta_net_cuda
from loraplex.server.model.ops.ops import StepLayout
from loraplex.server.model.ops.row_states import RowStates
from loraplex.server.model.ops.state_steps import TokenSteps
from loraplex.server.model.spec.linear_spec import LinearSpec, Part
from loraplex.server.model.spec.state_spec import DeltaNetSpec
from loraplex.server.model.weights import DeltaNetWeights, RmsNorm
from tests.grids import sparse

ROWS = 5
NAN = float("nan")
ODD: dict[str, Any] = {"keys": 2, "values": 6, "key_dim": 10, "value_dim": 12, "kernel": 4}
SMALL: dict[str, Any] = {"keys": 3, "values": 3, "key_dim": 4, "value_dim": 7, "kernel": 2}
# Of no powers of two; of Qwen3.5, but for the number of heads.
SIZES: dict[str, dict[str, Any]] = {
    "odd": ODD,
    "by-key-head": {**ODD, "by_key_head": True},
    "even": {"keys": 1, "values": 2, "key_dim": 128, "value_dim": 128, "kernel": 4},
    "small": {**SMALL, "by_key_head": True},
}
# Row, start and tokens of each slice, those of one token first.
STEPS: dict[str, tuple[tuple[int, int, int], ...]] = {
    "decodes": ((3, 9, 1), (0, 0, 1), (1, 1, 1), (2, 2, 1)),
    "prompts": ((0, 0, 2), (4, 0, 17), (2, 1, 3), (1, 30, 9)),
    "both": ((4, 7, 1), (ROWS, 0, 1), (ROWS, 0, 1), (1, 0, 5), (0, 2, 2), (3, 8, 19)),
    "chunks": ((2, 3, 33), (0, 0, 70), (1, 90, 32)),
    "scratch": ((ROWS, 0, 1), (ROWS, 0, 3)),
    "nothing": (),
}


def made_spec(
    keys: int, values: int, key_dim: int, value_dim: int, kernel: int, *, by_key_head: bool = False
) -> DeltaNetSpec:
    channels = 2 * keys * key_dim + values * value_dim
    mixed = LinearSpec("in", 8, (Part("mixed", channels + values * value_dim),), "column")
    gates = LinearSpec("gates", 8, (Part("gates", 2 * values),), "column")
    out = LinearSpec("out", values * value_dim, (Part("out", 8),), "row")
    sizes = (keys, values, key_dim, value_dim, kernel, 1e-6, by_key_head)
    return DeltaNetSpec(mixed, gates, out, "delta", *sizes)


def made_weights(spec: DeltaNetSpec, dtype: torch.dtype, device: torch.device) -> DeltaNetWeights:
    products = tuple(
        DenseLinear(torch.zeros(linear.out_features, linear.in_features, dtype=dtype))
        for linear in spec.linears
    )
    mixed, gates, out = products
    conv = torch.randn(spec.num_channels, spec.kernel, device=device).to(dtype)
    decay = -torch.rand(spec.value_heads, device=device) - 0.05
    bias = torch.randn(spec.value_heads, device=device)
    norm = RmsNorm(torch.randn(spec.value_dim, device=device).to(dtype), spec.epsilon)
    return DeltaNetWeights.of(spec, (mixed, gates, out), conv, (decay, bias), norm)


def made_layout(slices: tuple[tuple[int, int, int], ...], device: torch.device) -> StepLayout:
    rows, starts, counts = np.array(slices, dtype=np.int64).reshape(-1, 3).T.copy()
    positions = [start + i for _, start, n in slices for i in range(n)]
    nothing = torch.zeros(0, dtype=torch.int64)
    return StepLayout(
        num_decodes=int((counts == 1).sum()),
        seq_rows=rows,
        starts=starts,
        num_new=counts,
        token_rows=nothing,
        positions=torch.tensor(positions, dtype=torch.int64, device=device),
        page_table=nothing,
        long_rows=nothing,
    )


class Case(NamedTuple):
    weights: DeltaNetWeights
    mixed: torch.Tensor
    gates: torch.Tensor
    states: tuple[torch.Tensor, torch.Tensor]

    def copies(self) -> tuple[torch.Tensor, torch.Tensor]:
        window, memory = self.states
        return window.clone(), memory.clone()


def made(spec: DeltaNetSpec, layout: StepLayout, dtype: torch.dtype) -> Case:
    """Rows that begin hold NaN."""
    device, tokens = layout.positions.device, len(layout.positions)
    mixed = torch.randn(tokens, spec.mixed.out_features, device=device).to(dtype)
    gates = torch.randn(tokens, spec.gates.out_features, device=device).to(dtype)
    window_form, memory_form = spec.states
    window = torch.randn(ROWS + 1, *window_form.shape, device=device).to(dtype)
    memory = torch.randn(ROWS + 1, *memory_form.shape, device=device)
    for row, start, reached in zip(layout.seq_rows, layout.starts, layout.starts, strict=True):
        if start == 0:
            window[row], memory[row] = NAN, NAN
        window[row, : max(0, spec.kernel - 1 - int(reached))] = 0 if start else NAN
    return Case(made_weights(spec, dtype, device), mixed, gates, (window, memory))


def defined(layout: StepLayout, case: Case, states: tuple[torch.Tensor, ...]) -> torch.Tensor:
    """By the definition."""
    steps = TokenSteps.of(layout)
    for state in states:
        state.index_fill_(0, steps.begun, 0)
    moves = [phase.tokens for phase in steps.phases]
    return delta_net.delta_net(moves, case.mixed, case.gates, case.weights, states)


def by_kernels(layout: StepLayout, case: Case, states: tuple[torch.Tensor, ...]) -> torch.Tensor:
    slices = [phase.tokens for phase in delta_net_cuda.plan_states(layout)]
    return delta_net_cuda.delta_net(slices, case.mixed, case.gates, case.weights, states)


@pytest.mark.parametrize(
    ("name", "sizes", "dtype"),
    sparse([*STEPS], [*SIZES], [torch.float32, torch.float16]),
)
def test_as_the_definition(device: torch.device, name: str, sizes: str, dtype: torch.dtype) -> None:
    torch.manual_seed(3)
    spec = made_spec(**SIZES[sizes])
    layout = made_layout(STEPS[name], device)
    case = made(spec, layout, dtype)
    expected, found = case.copies(), case.copies()
    wanted = defined(layout, case, expected)
    got = by_kernels(layout, case, found)
    real = torch.from_numpy(np.repeat(layout.seq_rows, layout.num_new) != ROWS).to(device)
    near: dict[str, Any] = {"rtol": 1e-4, "atol": 1e-4}
    if dtype != torch.float32:
        near = {"rtol": 1e-2, "atol": 2e-2}
    torch.testing.assert_close(got[real], wanted[real], **near)
    assert got[~real].eq(0).all()
    for state, after, before in zip(found, expected, case.states, strict=True):
        torch.testing.assert_close(state[:ROWS], after[:ROWS], **near, equal_nan=True)
        torch.testing.assert_close(state[ROWS], before[ROWS], equal_nan=True)
        untouched = [row for row in range(ROWS) if row not in layout.seq_rows]
        assert torch.equal(state[untouched], before[untouched])


@pytest.mark.parametrize("cuts", [(0, 1, 2, 3, 11), (0, 10, 11), (0, 2, 9, 11)])
def test_a_prompt_in_chunks_is_the_whole_prompt(
    device: torch.device, cuts: tuple[int, ...]
) -> None:
    torch.manual_seed(1)
    spec = made_spec(**ODD)
    whole = made_layout(((2, 0, cuts[-1]),), device)
    case = made(spec, whole, torch.float32)
    states = case.copies()
    wanted = by_kernels(whole, case, states)
    chunked, found = case.copies(), []
    for begin, end in pairwise(cuts):
        chunk = made_layout(((2, begin, end - begin),), device)
        of = case._replace(
            mixed=case.mixed[begin:end].contiguous(), gates=case.gates[begin:end].contiguous()
        )
        found.append(by_kernels(chunk, of, chunked))
    torch.testing.assert_close(torch.cat(found), wanted)
    for part, all_of_it in zip(chunked, states, strict=True):
        torch.testing.assert_close(part[2], all_of_it[2])


def test_states_are_saved_within_slices(device: torch.device) -> None:
    """By the kernels and by the definition, each snapshot is the state of its tokens alone."""
    torch.manual_seed(2)
    spec = made_spec(**ODD)
    slices = ((4, 3, 1), (2, 0, 9), (0, 5, 8), (1, 2, 3))
    saves = np.array([(1, 1, 5), (1, 4, 0), (1, 8, 2), (3, 4, 3)])
    layout = replace(made_layout(slices, device), saves=saves)
    case = made(spec, layout, torch.float32)
    model: Any = SimpleNamespace(states={7: spec.states})
    found = []
    plans: tuple[tuple[Any, Any], ...] = (
        (delta_net.delta_net, TokenSteps.of(layout).phases),
        (delta_net_cuda.delta_net, delta_net_cuda.plan_states(layout)),
    )
    for operation, phases in plans:
        states = RowStates(model, ROWS, torch.float32, device, snapshots=6)
        of = states.of(7)
        for state, before in zip(of, case.states, strict=True):
            state.copy_(before)
            state[2] = 0
        operation(states.walk(7, phases), case.mixed, case.gates, case.weights, of)
        states.restore([StateCopy(0, 5), StateCopy(1, 0), StateCopy(3, 2), StateCopy(4, 3)])
        found.append(of)
    begins = (1, 1, 1, 18)
    for row, (place, position, _), begin in zip((0, 1, 3, 4), saves, begins, strict=True):
        start = int(layout.starts[place])
        part = made_layout(((int(layout.seq_rows[place]), start, position - start),), device)
        end = begin + position - start
        alone = case._replace(mixed=case.mixed[begin:end], gates=case.gates[begin:end])
        expected = case.copies()
        defined(part, alone, expected)
        for kind in range(2):
            for by in found:
                torch.testing.assert_close(by[kind][row], expected[kind][part.seq_rows[0]])


@pytest.mark.filterwarnings("ignore:overflow encountered in exp:RuntimeWarning")  # it is meant
def test_a_large_softplus_is_its_argument(device: torch.device) -> None:
    spec = made_spec(**SMALL)
    layout = made_layout(((0, 4, 1), (1, 5, 1)), device)
    case = made(spec, layout, torch.float32)
    case = case._replace(gates=case.gates * 200)
    expected, found = case.copies(), case.copies()
    wanted = defined(layout, case, expected)
    got = by_kernels(layout, case, found)
    torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_real_widths_on_a_gpu(dtype: torch.dtype) -> None:
    """Hold Qwen3.5-9B's widths against the definition on the same numbers in float32."""
    if os.environ.get("TRITON_INTERPRET") == "1" or not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    device = torch.device("cuda")
    torch.manual_seed(5)
    spec = made_spec(16, 32, 128, 128, 4)
    slices = ((3, 9, 1), (0, 0, 1), (1, 700, 1), (2, 0, 300), (4, 64, 129))
    layout = made_layout(slices, device)
    case = made(spec, layout, dtype)
    expected, found = case.copies(), case.copies()
    wide = (expected[0].float(), expected[1])
    of_conv, of_norm = case.weights.conv.float(), case.weights.norm
    norm = of_norm._replace(weight=of_norm.weight.float())
    weights = replace(case.weights, conv=of_conv, norm=norm)
    of_wide = Case(weights, case.mixed.float(), case.gates.float(), wide)
    wanted = defined(layout, of_wide, wide)
    got = by_kernels(layout, case, found)
    error = (got.float() - wanted).square().mean().sqrt() / wanted.square().mean().sqrt()
    of_states = (found[1] - wide[1])[:ROWS].norm() / wide[1][:ROWS].norm()
    print(f"{dtype}: relative error {error:.2e}, of states {of_states:.2e}")
    most = 1e-5 if dtype == torch.float32 else 1.5e-2
    assert max(error, of_states) < most


def test_mismatches_are_refused() -> None:
    x, columns = torch.zeros(2, 12), torch.arange(8, dtype=torch.int32)
    slices = Singles(torch.zeros(2, dtype=torch.int32), torch.zeros(2, dtype=torch.int64))
    weight, state, out = torch.zeros(8, 4), torch.zeros(3, 3, 8), torch.zeros(2, 8)
    with pytest.raises(ValueError, match="columns must be int32"):
        causal_conv(x, columns.long(), weight, state, slices, out)
    with pytest.raises(ValueError, match=r"state must be \[rows, 3, 8\]"):
        causal_conv(x, columns, weight, state[:, :2].contiguous(), slices, out)
    with pytest.raises(ValueError, match="contiguous"):
        causal_conv(x.T, columns, weight, state, slices, out)
    with pytest.raises(ValueError, match="output must be"):
        causal_conv(x, columns, weight, state, slices, out[:1])
    heads, qkv = DeltaHeads(1, 2, 2, 2), torch.zeros(2, 8)
    memory, found = torch.zeros(3, 2, 2, 2), torch.zeros(2, 4)
    gates = DeltaGates(
        torch.zeros(2, 4), torch.arange(4, dtype=torch.int32), torch.zeros(2), torch.zeros(2)
    )
    with pytest.raises(ValueError, match="evenly"):
        delta_rule(qkv, heads._replace(keys=3), gates, memory, slices, found)
    with pytest.raises(ValueError, match="must be float32"):
        delta_rule(qkv, heads, gates, memory.half(), slices, found)
    with pytest.raises(ValueError, match="features in all"):
        delta_rule(qkv[:, :6], heads, gates, memory, slices, found)
    with pytest.raises(ValueError, match="gates must be"):
        delta_rule(qkv, heads, gates._replace(product=out), memory, slices, found)
    with pytest.raises(ValueError, match="output must be"):
        delta_rule(qkv, heads, gates, memory, slices, found[:1])
    with pytest.raises(ValueError, match="in heads of 3"):
        gated_norm(found, qkv, columns[:4], torch.zeros(3), 1e-6)
    runs = Runs(torch.zeros(4, 3, dtype=torch.int32), 2)
    assert (slices.num_slices, runs.num_slices) == (2, 3)
