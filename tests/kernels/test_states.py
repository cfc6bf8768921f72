"""Kernels of states against the token-by-token definition in plain torch."""

import dataclasses
import os
from itertools import pairwise
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from msgspec.structs import replace

from loraplex.server.engine.plan import StateCopy
from loraplex.server.kernels.states.causal_conv import Runs, Singles, causal_conv
from loraplex.server.kernels.states.operands import (
    Convolution,
    GatedNorm,
    StateGates,
    StateHeads,
)
from loraplex.server.kernels.states.recurrence import delta_rule, gated_norm
from loraplex.server.model.linear.dense import DenseLinear
from loraplex.server.model.ops import ops_torch
from loraplex.server.model.ops.cuda import states_cuda
from loraplex.server.model.ops.ops import StepLayout
from loraplex.server.model.ops.row_states import RowStates, TokenSteps
from loraplex.server.model.spec.linear_spec import LinearSpec, Part
from loraplex.server.model.spec.state_spec import DeltaNetSpec, Mamba2Spec, ShortConvSpec, StateSpec
from loraplex.server.model.weight_source import (
    ShortConvWeights,
    StateWeights,
    delta_net_weights,
    mamba2_weights,
)
from tests.grids import sparse

ROWS = 5
NAN = float("nan")


def linear(role: Any, width: int, inputs: int = 8) -> LinearSpec:
    return LinearSpec(role, inputs, (Part(role, width),), "row" if role == "out" else "column")


def delta(
    keys: int, values: int, key_dim: int, value_dim: int, kernel: int, *, by_key_head: bool = False
) -> DeltaNetSpec:
    channels = 2 * keys * key_dim + values * value_dim
    mixed = linear("in", channels + values * value_dim)
    products = mixed, linear("gates", 2 * values), linear("out", 8, values * value_dim)
    heads = keys, values, key_dim, value_dim
    return DeltaNetSpec(*products, "delta", *heads, kernel, 1e-6, by_key_head)


def apart(of: DeltaNetSpec) -> DeltaNetSpec:
    """The same with z beside b and a, and betas up to 2."""
    mixed, gates = (
        linear("in", of.num_channels),
        linear("gates", 2 * of.value_heads + of.value_size),
    )
    return replace(of, mixed=mixed, gates=gates, gates_z=True, beta=2)


def conv(channels: int, kernel: int, *, bias: bool = False) -> ShortConvSpec:
    products = linear("in", 3 * channels), linear("out", 8, channels)
    return ShortConvSpec(*products, "conv", channels, kernel, bias)


def mamba(
    heads: int, groups: int, head_dim: int, state: int, kernel: int, **changes: Any
) -> Mamba2Spec:
    inner = heads * head_dim
    mixed = linear("in", 2 * inner + 2 * groups * state + heads)
    sizes = heads, groups, head_dim, state, kernel, 1e-6
    made = Mamba2Spec(mixed, linear("out", 8, inner), "mamba", *sizes, norm_size=inner // groups)
    return replace(made, **changes)


ODD, SMALL = delta(2, 6, 10, 12, 4), delta(3, 3, 4, 7, 2, by_key_head=True)
# Of no powers of two; of Qwen3.5, but for the number of heads.
SPECS: dict[str, StateSpec] = {
    "odd": ODD,
    "by-key-head": replace(ODD, by_key_head=True),
    "even": delta(1, 2, 128, 128, 4),
    "small": SMALL,
    "apart": apart(ODD),
    "conv": conv(37, 3),
    "conv-bias": conv(600, 2, bias=True),
    "mamba": mamba(6, 2, 12, 10, 4, factors=(0.7, 1.3, 0.8, 1.2, 0.6)),
    "mamba-even": mamba(2, 1, 64, 128, 4, bias=False, limits=(0.5, 1.0)),
    "mamba-plain": mamba(3, 3, 7, 20, 2, norm_size=None, gate_first=False),
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


def made_weights(spec: StateSpec, dtype: torch.dtype, device: torch.device) -> StateWeights:
    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, device=device)

    linears = tuple(
        DenseLinear(torch.zeros(each.out_features, each.in_features, dtype=dtype))
        for each in spec.linears
    )
    match spec:
        case DeltaNetSpec():
            weight = random(spec.num_channels, spec.kernel).to(dtype)
            decays = -random(spec.value_heads).abs() - 0.05, random(spec.value_heads)
            norm = random(spec.value_dim).to(dtype)
            return delta_net_weights(spec, linears, weight, decays, norm)
        case Mamba2Spec():
            bias = random(spec.num_channels).to(dtype) if spec.bias else None
            of_conv = random(spec.num_channels, spec.kernel).to(dtype), bias
            numbers = -random(spec.heads).abs() - 0.05, random(spec.heads), random(spec.heads)
            normed = None if spec.norm_size is None else random(spec.inner).to(dtype)
            return mamba2_weights(spec, linears, of_conv, numbers, normed)
        case ShortConvSpec():
            weight = random(spec.channels, spec.kernel).to(dtype)
            bias = random(spec.channels).to(dtype) if spec.bias else None
            return ShortConvWeights.of(spec, linears, weight, bias)


def widened(weights: StateWeights) -> StateWeights:
    """The same numbers in float32."""
    changes: dict[str, Any] = {"conv": widened_tuple(weights.conv)}
    if not isinstance(weights, ShortConvWeights):
        changes["norm"] = widened_tuple(weights.norm)
    return dataclasses.replace(weights, **changes)


def widened_tuple(of: Any) -> Any:
    return type(of)(
        *(
            each.float() if isinstance(each, torch.Tensor) and each.is_floating_point() else each
            for each in of
        )
    )


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


States = tuple[torch.Tensor, ...]


class Case(NamedTuple):
    weights: StateWeights
    products: tuple[torch.Tensor, ...]
    states: States

    def copies(self) -> States:
        return tuple(state.clone() for state in self.states)

    def defined(self, layout: StepLayout, states: States) -> torch.Tensor:
        """By the definition."""
        steps = TokenSteps.of(layout, ROWS, 0)
        for state in states:
            state.index_fill_(0, steps.begun, 0)
        moves = [phase.tokens for phase in steps.steps.phases]
        return ops_torch.mix_states(moves, self.products, self.weights, states)

    def by_kernels(self, layout: StepLayout, states: States) -> torch.Tensor:
        slices = [phase.tokens for phase in states_cuda.plan_states(layout, ROWS, 0).phases]
        return states_cuda.mix_states(slices, self.products, self.weights, states, self.products)


def made(spec: StateSpec, layout: StepLayout, dtype: torch.dtype) -> Case:
    """Rows that begin hold NaN."""
    device, tokens = layout.positions.device, len(layout.positions)
    products = tuple(
        torch.randn(tokens, each.out_features, device=device).to(dtype)
        for each in spec.linears[:-1]
    )
    states = tuple(
        torch.randn(ROWS + 1, *form.shape, device=device).to(torch.float32 if form.wide else dtype)
        for form in spec.states
    )
    for row, start in zip(layout.seq_rows, layout.starts, strict=True):
        if start == 0:
            for state in states:
                state[row] = NAN
        states[0][row, : max(0, spec.kernel - 1 - int(start))] = 0 if start else NAN
    return Case(made_weights(spec, dtype, device), products, states)


@pytest.mark.parametrize(
    ("name", "sizes", "dtype"),
    sparse([*STEPS], [*SPECS], [torch.float32, torch.float16]),
)
def test_as_the_definition(device: torch.device, name: str, sizes: str, dtype: torch.dtype) -> None:
    torch.manual_seed(3)
    layout = made_layout(STEPS[name], device)
    case = made(SPECS[sizes], layout, dtype)
    expected, found = case.copies(), case.copies()
    wanted, got = case.defined(layout, expected), case.by_kernels(layout, found)
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


@pytest.mark.parametrize(
    ("cuts", "name"),
    sparse([(0, 1, 2, 3, 11), (0, 10, 11), (0, 2, 9, 11)], ["odd", "conv", "mamba"]),
)
def test_a_prompt_in_chunks_is_the_whole_prompt(
    device: torch.device, cuts: tuple[int, ...], name: str
) -> None:
    torch.manual_seed(1)
    whole = made_layout(((2, 0, cuts[-1]),), device)
    case = made(SPECS[name], whole, torch.float32)
    states = case.copies()
    wanted = case.by_kernels(whole, states)
    chunked, found = case.copies(), []
    for begin, end in pairwise(cuts):
        rows = tuple(product[begin:end].contiguous() for product in case.products)
        layout = made_layout(((2, begin, end - begin),), device)
        found.append(case._replace(products=rows).by_kernels(layout, chunked))
    torch.testing.assert_close(torch.cat(found), wanted)
    for part, all_of_it in zip(chunked, states, strict=True):
        torch.testing.assert_close(part[2], all_of_it[2])


@pytest.mark.parametrize("name", ["odd", "conv", "mamba"])
def test_states_are_saved_within_slices(device: torch.device, name: str) -> None:
    """By the kernels and by the definition, each snapshot is the state of its tokens alone."""
    torch.manual_seed(2)
    spec = SPECS[name]
    slices = ((4, 3, 1), (2, 0, 9), (0, 5, 8), (1, 2, 3))
    saves = np.array([(1, 1, 5), (1, 4, 0), (1, 8, 2), (3, 4, 3)])
    layout = dataclasses.replace(made_layout(slices, device), saves=saves)
    case = made(spec, layout, torch.float32)
    model: Any = SimpleNamespace(states={7: spec.states}, state_inputs={})
    found = []
    plans: tuple[tuple[Any, Any, Any], ...] = (
        (ops_torch.mix_states, TokenSteps.of(layout, ROWS, 0).steps, ()),
        (states_cuda.mix_states, states_cuda.plan_states(layout, ROWS, 0), (case.products,)),
    )
    for operation, steps, kept in plans:
        states = RowStates(model, ROWS, torch.float32, device, snapshots=6)
        of = states.of(7)
        for state, before in zip(of, case.states, strict=True):
            state.copy_(before)
            state[2] = 0
        operation(states.walk(7, steps), case.products, case.weights, of, *kept)
        states.restore([StateCopy(0, 5), StateCopy(1, 0), StateCopy(3, 2), StateCopy(4, 3)])
        found.append(of)
    begins = (1, 1, 1, 18)
    for row, (place, position, _), begin in zip((0, 1, 3, 4), saves, begins, strict=True):
        start = int(layout.starts[place])
        part = made_layout(((int(layout.seq_rows[place]), start, position - start),), device)
        end = begin + position - start
        alone = case._replace(products=tuple(each[begin:end] for each in case.products))
        expected = case.copies()
        alone.defined(part, expected)
        for kind in range(len(expected)):
            for by in found:
                torch.testing.assert_close(by[kind][row], expected[kind][part.seq_rows[0]])


@pytest.mark.parametrize("name", ["odd", "conv", "mamba"])
def test_drafts_leave_no_trace_and_are_replayed(device: torch.device, name: str) -> None:
    """Beside a prompt and padding. Three rows have a draft, two of them and another one replays."""
    torch.manual_seed(4)
    spec, depth = SPECS[name], 3
    pads = ((ROWS, 0, 1, 0), (ROWS, 0, 1, 0))
    walks = ((4, 9, 3, 0), *pads, (2, 7, 1, 2), (0, 6, 4, 3), (3, 8, 2, 1))
    singles = [(row, start + i, 1) for row, start, n, _ in walks for i in range(n)]
    replays = [many if i == 0 else 0 for _, _, n, many in walks for i in range(n)]
    layout = made_layout((*singles, (1, 4, 6)), device)
    layout = dataclasses.replace(layout, replays=np.array([*replays, 0]))
    case = made(spec, layout, torch.float32)
    products, widths = case.products, tuple(product.shape[1] for product in case.products)
    model: Any = SimpleNamespace(states={0: spec.states}, state_inputs={0: widths})
    kept = [torch.randn((ROWS + 1) * depth, width, device=device) for width in widths]
    by: list[tuple[torch.Tensor, RowStates]] = []
    for operation in ("definition", "kernels"):
        states = RowStates(model, ROWS, torch.float32, device, depth=depth)
        for to, of in ((states.of(0), case.states), (states.inputs(0), kept)):
            for state, before in zip(to, of, strict=True):
                state.copy_(before)
        rest = case.weights, states.of(0)
        if operation == "definition":
            steps = TokenSteps.of(layout, ROWS, depth)
            both = [torch.cat((k[steps.replayed], p)) for k, p in zip(kept, products, strict=True)]
            found = ops_torch.mix_states(states.walk(0, steps.steps), both, *rest)
            found, keep = found[len(steps.replayed) :], steps.steps.keep
        else:
            plan = states_cuda.plan_states(layout, ROWS, depth)
            walked = states.walk(0, plan)
            found = states_cuda.mix_states(walked, products, *rest, states.inputs(0))
            keep = plan.keep
        states.keep(0, keep, products)
        by.append((found, states))
    (wanted, expected), (got, states) = by
    real = torch.from_numpy(np.repeat(layout.seq_rows, layout.num_new) != ROWS).to(device)
    torch.testing.assert_close(got[real], wanted[real], rtol=1e-4, atol=1e-4)
    for mine, theirs in zip(states.of(0), expected.of(0), strict=True):
        torch.testing.assert_close(mine[:ROWS], theirs[:ROWS], rtol=1e-4, atol=1e-4)
    for mine, theirs in zip(states.inputs(0), expected.inputs(0), strict=True):
        assert torch.equal(mine[:-depth], theirs[:-depth])
    alone = case.copies()
    first = case._replace(products=tuple(product[:1] for product in products))
    first.defined(made_layout(((4, 9, 1),), device), alone)
    for state, before in zip(states.of(0), alone, strict=True):
        torch.testing.assert_close(state[4], before[4], rtol=1e-4, atol=1e-4)


@pytest.mark.filterwarnings("ignore:overflow encountered in exp:RuntimeWarning")  # it is meant
def test_a_large_softplus_is_its_argument(device: torch.device) -> None:
    layout = made_layout(((0, 4, 1), (1, 5, 1)), device)
    case = made(SMALL, layout, torch.float32)
    mixed, gates = case.products
    case = case._replace(products=(mixed, gates * 200))
    wanted, got = case.defined(layout, case.copies()), case.by_kernels(layout, case.copies())
    torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-4)


# As Qwen3.5-9B has it, LFM2, Nemotron-H-8B, Granite 4 H Small, and Falcon-H1 34B.
WIDE: dict[str, StateSpec] = {
    "qwen3.5": delta(16, 32, 128, 128, 4),
    "lfm2": conv(2048, 3),
    "nemotron-h": mamba(128, 8, 64, 128, 4, limits=(0.001, float("inf"))),
    "granite-h": mamba(128, 1, 64, 128, 4),
    "falcon-h1": mamba(32, 2, 128, 256, 4, norm_size=None),
}


@pytest.mark.gpu
@pytest.mark.parametrize("name", WIDE)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_real_widths_on_a_gpu(name: str, dtype: torch.dtype) -> None:
    """Hold real widths against the definition on the same numbers in float32."""
    if os.environ.get("TRITON_INTERPRET") == "1" or not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    torch.manual_seed(5)
    slices = ((3, 9, 1), (0, 0, 1), (1, 700, 1), (2, 0, 300), (4, 64, 129))
    layout = made_layout(slices, torch.device("cuda"))
    case = made(WIDE[name], layout, dtype)
    products = tuple(product.float() for product in case.products)
    exact = tuple(state.float() for state in case.copies())
    wide = Case(widened(case.weights), products, exact)
    found = case.copies()
    wanted, got = wide.defined(layout, exact), case.by_kernels(layout, found)
    error = (got.float() - wanted).square().mean().sqrt() / wanted.square().mean().sqrt()
    of_states = (found[-1].float() - exact[-1])[:ROWS].norm() / exact[-1][:ROWS].norm()
    print(f"{name}, {dtype}: relative error {error:.2e}, of states {of_states:.2e}")
    most = 1e-5 if dtype == torch.float32 else 1.5e-2
    assert max(error, of_states) < most


def test_mismatches_are_refused() -> None:
    x, columns = torch.zeros(2, 12), torch.arange(8, dtype=torch.int32)
    slices = Singles(torch.zeros(2, dtype=torch.int32), torch.zeros(2, dtype=torch.int64))
    conv = Convolution(columns, torch.zeros(8, 4))
    state, out = torch.zeros(3, 3, 8), torch.zeros(2, 8)
    with pytest.raises(ValueError, match="columns must be int32"):
        causal_conv(x, conv._replace(columns=columns.long()), state, slices, out)
    with pytest.raises(ValueError, match=r"state must be \[rows, 3, 8\]"):
        causal_conv(x, conv, state[:, :2].contiguous(), slices, out)
    with pytest.raises(ValueError, match=r"factors must be int32 \[2, 8\]"):
        causal_conv(x, conv._replace(factors=columns), state, slices, out)
    with pytest.raises(ValueError, match="contiguous"):
        causal_conv(x.T, conv, state, slices, out)
    with pytest.raises(ValueError, match="output must be"):
        causal_conv(x, conv, state, slices, out[:1])
    heads, qkv = StateHeads(1, 2, 2, 2), torch.zeros(2, 8)
    memory, found = torch.zeros(3, 2, 2, 2), torch.zeros(2, 4)
    product, numbers = torch.zeros(2, 4), torch.zeros(2)
    gates = StateGates(columns[:4], numbers, numbers)
    with pytest.raises(ValueError, match="evenly"):
        delta_rule(qkv, heads._replace(keys=3), product, gates, memory, slices, found)
    with pytest.raises(ValueError, match="must be float32"):
        delta_rule(qkv, heads, product, gates, memory.half(), slices, found)
    with pytest.raises(ValueError, match="features in all"):
        delta_rule(qkv[:, :6], heads, product, gates, memory, slices, found)
    with pytest.raises(ValueError, match="gates must be of 2 tokens"):
        delta_rule(qkv, heads, torch.zeros(3, 4), gates, memory, slices, found)
    with pytest.raises(ValueError, match="gates must have 4 columns"):
        delta_rule(qkv, heads, product, gates._replace(columns=columns), memory, slices, found)
    with pytest.raises(ValueError, match="output must be"):
        delta_rule(qkv, heads, product, gates, memory, slices, found[:1])
    norm = GatedNorm(None, 1e-6, 3)
    with pytest.raises(ValueError, match="in groups of 3"):
        gated_norm(found, qkv, columns[:4], norm, found)
    with pytest.raises(ValueError, match="the output as the inputs"):
        gated_norm(found, qkv, columns[:4], norm._replace(size=2), found[:1])
    runs = Runs(torch.zeros(4, 3, dtype=torch.int32), 2)
    assert (slices.num_slices, runs.num_slices) == (2, 3)
