"""The product of each row with its expert's matrix: in one launch for all experts, or of few rows
without tensor cores.

A row is a token and one of its experts: row `token * top_k + k`. Rows lie where they are: a tile
gathers those of one expert. With few rows the time is that of reading the matrices, each once a
tile; a matrix of an expert that no row has is not read. Few rows seldom share an expert: small
programs then keep more reads of the matrices under way than tiles do.
"""

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl

from loraplex.server.kernels.launch.launch import dot_precision, follow
from loraplex.server.kernels.linear.matrix import PackedMatrix, Weight, form_of
from loraplex.server.kernels.linear.packed import BITS, PackedBlocks, load_numbers, multiply_packed
from loraplex.server.kernels.pointwise.gated import (
    ExpertActivation,
    activated,
    activated_alone,
    has_gate,
)

_MOST_ROWS_AT_ONCE = 4096

# With more rows, or where rows share experts, tiles read less.
_MOST_ROWS = 16
_BLOCK_N, _BLOCK_K = 4, 2048


@dataclass(frozen=True, slots=True)
class ExpertTiles:
    """Rows of a batch, sorted by expert and cut into tiles. experts: int32 `[rows]`, of each row.
    order: int32 `[rows]`, rows by expert, those of one in ascending order. tiles: int32
    `[max_tiles, 3]`: expert, first position in `order`, and how many of at most `tile_rows` rows
    there are, 0 = none: such tiles come last. top_k: rows of a token.
    """

    experts: torch.Tensor
    order: torch.Tensor
    tiles: torch.Tensor
    tile_rows: int
    top_k: int


def max_tiles(rows: int, tile_rows: int, experts: int) -> int:
    """The most that any choice of experts needs."""
    return rows // tile_rows + min(rows, experts)


def expert_tiles(
    chosen: torch.Tensor, experts: int, tile_rows: int, *, programmatic_launch: bool
) -> ExpertTiles:
    """Sort rows by expert, and cut them into tiles. chosen: int32 `[tokens, top_k]`, at least one,
    contiguous; `experts` is how many there are. The result is the same for the same choice;
    nothing waits for the device.
    """
    rows, device = chosen.numel(), chosen.device
    order = torch.empty(rows, dtype=torch.int32, device=device)
    most = max_tiles(rows, tile_rows, experts)
    tiles = torch.empty(most, 3, dtype=torch.int32, device=device)
    chunk = min(_MOST_ROWS_AT_ONCE, max(16, triton.next_power_of_2(rows)))
    _tiles_kernel[(experts,)](
        chosen,
        order,
        tiles,
        rows,
        most,
        TILE_ROWS=tile_rows,
        CHUNK=chunk,
        BLOCK_E=triton.next_power_of_2(experts + 1),
        PDL=programmatic_launch,
        num_warps=4 if chunk < _MOST_ROWS_AT_ONCE else 8,
        launch_pdl=programmatic_launch,
    )
    return ExpertTiles(chosen.view(-1), order, tiles, tile_rows, chosen.shape[1])


@triton.jit(do_not_specialize=["rows", "most_tiles"])
def _tiles_kernel(
    chosen_ptr: tl.tensor,
    order_ptr: tl.tensor,
    tiles_ptr: tl.tensor,
    rows: tl.tensor,
    most_tiles: tl.tensor,
    TILE_ROWS: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK_E: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    """A program takes an expert: it counts the rows of all, then places its own."""
    follow(PDL)
    mine = tl.program_id(0)
    e, i = tl.arange(0, BLOCK_E), tl.arange(0, CHUNK)
    counts = tl.zeros((BLOCK_E,), tl.int32)
    for first in range(0, rows, CHUNK):
        expert = tl.load(chosen_ptr + first + i, mask=first + i < rows, other=BLOCK_E - 1)
        counts += tl.histogram(expert, BLOCK_E)
    tiles = tl.where(e < BLOCK_E - 1, (counts + TILE_ROWS - 1) // TILE_ROWS, 0)
    count = tl.sum(tl.where(e == mine, counts, 0), axis=0)
    start = tl.sum(tl.where(e < mine, counts, 0), axis=0)
    placed = start
    for first in range(0, rows, CHUNK):
        expert = tl.load(chosen_ptr + first + i, mask=first + i < rows, other=BLOCK_E - 1)
        is_mine = (expert == mine).to(tl.int32)
        at = placed + tl.cumsum(is_mine, axis=0) - is_mine
        tl.store(order_ptr + at, first + i, mask=is_mine > 0)
        placed += tl.sum(is_mine, axis=0)
    tile_ptr = tiles_ptr + tl.sum(tl.where(e < mine, tiles, 0), axis=0) * 3
    for done in range(0, count, TILE_ROWS):
        tl.store(tile_ptr, mine)
        tl.store(tile_ptr + 1, start + done)
        tl.store(tile_ptr + 2, tl.minimum(count - done, TILE_ROWS))
        tile_ptr += 3
    if mine == tl.num_programs(0) - 1:
        for first in range(tl.sum(tiles, axis=0), most_tiles, CHUNK):
            tl.store(tiles_ptr + (first + i) * 3 + 2, 0, mask=first + i < most_tiles)


@dataclass(frozen=True, slots=True)
class GroupedShape:
    """Sizes of a tile of the grouped product. tile_rows: rows of a program, 16 at least; block_n,
    block_k: output features (of gate and up each, where both are computed) and input features of
    a step.
    """

    tile_rows: int
    block_n: int
    block_k: int
    num_warps: int
    num_stages: int


# By the rows that an expert has if all have as many: most, and the shape.
_SHAPES = (
    (0.2, GroupedShape(16, 64, 128, 4, 4)),
    (8, GroupedShape(16, 64, 128, 4, 3)),
    (20, GroupedShape(32, 64, 64, 4, 5)),
    (48, GroupedShape(64, 128, 64, 4, 4)),
    (None, GroupedShape(128, 128, 64, 8, 4)),
)
# Tiles that are computed side by side, so that they read the same matrices at the same time.
_TILES_ABREAST = tl.constexpr(8)


def grouped_shape(tokens: int, top_k: int, experts: int) -> GroupedShape:
    """The shape for a batch of `tokens` tokens."""
    each = tokens * top_k / experts
    return next(shape for most, shape in _SHAPES if most is None or each <= most)


def tokens_of_each_shape(top_k: int, experts: int) -> list[int]:
    """Numbers of tokens that between them take every shape, and one; the last may be more than a
    step's.
    """
    bounds = [most for most, _ in _SHAPES if most is not None]
    most = [max(1, int(bound * experts / top_k)) for bound in bounds]
    return sorted({1, *most, most[-1] + 1})


def grouped_product(
    x: torch.Tensor,
    weight: Weight,
    bias: torch.Tensor | None,
    tiles: ExpertTiles,
    shape: GroupedShape,
    activation: ExpertActivation | None = None,
    *,
    programmatic_launch: bool,
) -> torch.Tensor:
    """Multiply each row by the matrix of its expert. x: `[tokens, in]`, or `[rows, in]`,
    contiguous; weight: `[experts, out, in]`, or as many quantised matrices; bias: `[experts,
    out]` -> `[rows, out]`, float32 inside. activation: of gate and up, the halves of what is
    `out`: `[rows, out / 2]`; without gate of all. tiles: of these rows and of the shape's
    `tile_rows`. One kernel. Raises ValueError on a mismatch.
    """
    rows, features = len(tiles.order), weight.shape[-1]
    out = weight.shape[-2]
    numbers, others, features_of_all = weight, (x,) * 4, out
    if isinstance(weight, PackedMatrix):
        numbers, others, out = weight.numbers, weight.tensors, out // weight.matrices
    share = rows // len(x)
    if tiles.tile_rows != shape.tile_rows or share not in (1, tiles.top_k):
        raise ValueError(f"tiles of {tiles.tile_rows} rows of {rows}, {len(x)} inputs, {shape}")
    width = out // 2 if has_gate(activation) else out
    y = torch.empty(rows, width, dtype=x.dtype, device=x.device)
    _grouped_kernel[(triton.cdiv(width, shape.block_n) * len(tiles.tiles),)](
        x,
        (numbers, *others),
        features_of_all,
        x if bias is None else bias,
        y,
        tiles.order,
        tiles.tiles,
        len(tiles.tiles),
        SHARE=share,
        WIDTH=width,
        IN=features,
        BLOCK_M=shape.tile_rows,
        BLOCK_N=shape.block_n,
        BLOCK_K=shape.block_k,
        BIAS=bias is not None,
        ACTIVATION=activation,
        HALVES=2 if has_gate(activation) else 1,
        STAGES=shape.num_stages,
        PRECISION=dot_precision(x.dtype),
        FORM=form_of(weight),
        PDL=programmatic_launch,
        num_warps=shape.num_warps,
        num_stages=shape.num_stages,
        launch_pdl=programmatic_launch,
    )
    return y


@triton.jit(do_not_specialize=["num_tiles", "features_of_all"])
def _grouped_kernel(
    x_ptr: tl.tensor,
    weight: tl.tuple,
    features_of_all: tl.tensor,
    bias_ptr: tl.tensor,
    y_ptr: tl.tensor,
    order_ptr: tl.tensor,
    tiles_ptr: tl.tensor,
    num_tiles: tl.tensor,
    SHARE: tl.constexpr,
    WIDTH: tl.constexpr,
    IN: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BIAS: tl.constexpr,
    ACTIVATION: tl.constexpr,
    HALVES: tl.constexpr,
    STAGES: tl.constexpr,
    PRECISION: tl.constexpr,
    FORM: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    """A program takes some output features of a tile. weight: numbers, scales, zeros, table and
    order. SHARE: rows with the same input."""
    follow(PDL)
    BLOCKS: tl.constexpr = (WIDTH + BLOCK_N - 1) // BLOCK_N
    place = tl.program_id(0) % (_TILES_ABREAST * BLOCKS)
    first_tile = tl.program_id(0) // (_TILES_ABREAST * BLOCKS) * _TILES_ABREAST
    abreast = tl.minimum(num_tiles - first_tile, _TILES_ABREAST)
    tile_ptr = tiles_ptr + (first_tile + place % abreast) * 3
    count = tl.load(tile_ptr + 2)
    if count > 0:
        expert = tl.load(tile_ptr).to(tl.int64)
        m = tl.arange(0, BLOCK_M)
        n = place // abreast * BLOCK_N + tl.arange(0, BLOCK_N)
        row = tl.load(order_ptr + tl.load(tile_ptr + 1) + tl.minimum(m, count - 1)).to(tl.int64)
        of_x = x_ptr + (row // SHARE) * IN
        # Behind the last feature, and the last row, the last one is computed again.
        feature = expert * (HALVES * WIDTH) + tl.minimum(n, WIDTH - 1)
        if FORM[BITS] < 0:
            gate, up = _products(
                of_x, weight[0] + feature * IN, WIDTH * IN, IN, BLOCK_M, BLOCK_N, BLOCK_K, HALVES,
                PRECISION,
            )  # fmt: skip
        else:
            EVEN: tl.constexpr = IN % BLOCK_K == 0
            rows = (of_x, m < count, IN, weight[4])
            gate = _packed_product(
                weight, feature, features_of_all, rows,
                PackedBlocks(BLOCK_M, BLOCK_N, BLOCK_K, EVEN, STAGES, PRECISION, 1), FORM,
            )  # fmt: skip
            up = gate
            if HALVES == 2:
                up = _packed_product(
                    weight, feature + WIDTH, features_of_all, rows,
                    PackedBlocks(BLOCK_M, BLOCK_N, BLOCK_K, EVEN, STAGES, PRECISION, 1), FORM,
                )  # fmt: skip
        if BIAS:
            gate += tl.load(bias_ptr + feature).to(tl.float32)[None, :]
        if HALVES == 2:
            if BIAS:
                up += tl.load(bias_ptr + feature + WIDTH).to(tl.float32)[None, :]
            gate = activated(gate, up, ACTIVATION)
        elif ACTIVATION is not None:
            gate = activated_alone(gate, ACTIVATION)
        at = y_ptr + row[:, None] * WIDTH + n[None, :]
        live = (m < count)[:, None] & (n < WIDTH)[None, :]
        tl.store(at, gate.to(y_ptr.dtype.element_ty), mask=live)


@triton.jit
def _packed_product(
    weight: tl.tuple, feature: tl.tensor, end: tl.tensor, of_x: tl.tuple, blocks: PackedBlocks,
    FORM: tl.constexpr,
) -> Any:  # fmt: skip
    """As `_products`, of features of quantised matrices."""
    of_out = (weight[0], feature, end, of_x[2], weight[1], weight[2], weight[3])
    first = load_numbers(of_out, 0, FORM, blocks.inputs, 1, blocks.even)
    return tl.trans(multiply_packed(first, of_out, of_x, 0, of_x[2], blocks, FORM))


@triton.jit
def _products(
    of_x: tl.tensor,
    of_weight: tl.tensor,
    half: tl.tensor,
    IN: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    HALVES: tl.constexpr,
    PRECISION: tl.constexpr,
) -> tuple[Any, Any]:
    """Products of rows with features, and with those `half` numbers further on, float32 `[BLOCK_M,
    BLOCK_N]`. Weights are the left operand, of which tensor cores take 64 rows at once."""
    k = tl.arange(0, BLOCK_K)[None, :]
    first = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    second = first
    for step in tl.range(0, IN, BLOCK_K):
        if IN % BLOCK_K == 0:
            x = tl.load(of_x[:, None] + (step + k))
            w = tl.load(of_weight[:, None] + (step + k))
        else:
            live = step + k < IN
            x = tl.load(of_x[:, None] + (step + k), mask=live, other=0.0)
            w = tl.load(of_weight[:, None] + (step + k), mask=live, other=0.0)
        first = tl.dot(w, tl.trans(x), first, input_precision=PRECISION)
        if HALVES == 2:
            if IN % BLOCK_K == 0:
                w = tl.load(of_weight[:, None] + (half + step + k))
            else:
                w = tl.load(of_weight[:, None] + (half + step + k), mask=step + k < IN, other=0.0)
            second = tl.dot(w, tl.trans(x), second, input_precision=PRECISION)
    return tl.trans(first), tl.trans(second)


def rows_are_few(tokens: int, top_k: int, experts: int) -> bool:
    """Say whether `row_product` reads the matrices sooner than `grouped_product`."""
    rows = tokens * top_k
    return tokens == 1 or rows <= min(_MOST_ROWS, experts // 2)


def row_product(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    experts: torch.Tensor,
    activation: ExpertActivation | None = None,
    *,
    programmatic_launch: bool,
) -> torch.Tensor:
    """Multiply each row by the matrix of its expert, as `grouped_product` does. x: `[tokens, in]`,
    or `[rows, in]`, contiguous; weight: `[experts, out, in]`, contiguous; bias: `[experts, out]`;
    experts: int32 `[rows]` -> `[rows, out]`, or of a gated activation `[rows, out / 2]`. float32
    inside. One kernel.
    """
    rows, (_, out, features) = len(experts), weight.shape
    width = out // 2 if has_gate(activation) else out
    y = torch.empty(rows, width, dtype=x.dtype, device=x.device)
    _row_kernel[(rows * triton.cdiv(width, _BLOCK_N),)](
        x,
        weight,
        x if bias is None else bias,
        y,
        experts,
        SHARE=rows // len(x),
        WIDTH=width,
        IN=features,
        BLOCK_N=_BLOCK_N,
        BLOCK_K=_BLOCK_K if features % _BLOCK_K == 0 else _BLOCK_K // 2,
        BIAS=bias is not None,
        ACTIVATION=activation,
        HALVES=2 if has_gate(activation) else 1,
        PDL=programmatic_launch,
        num_warps=4,
        launch_pdl=programmatic_launch,
    )
    return y


@triton.jit(do_not_specialize_on_alignment=["experts_ptr"])
def _row_kernel(
    x_ptr: tl.tensor,
    weight_ptr: tl.tensor,
    bias_ptr: tl.tensor,
    y_ptr: tl.tensor,
    experts_ptr: tl.tensor,
    SHARE: tl.constexpr,
    WIDTH: tl.constexpr,
    IN: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BIAS: tl.constexpr,
    ACTIVATION: tl.constexpr,
    HALVES: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    """A program takes some output features of a row, with a gate those of gate and up.
    SHARE: rows with the same input."""
    follow(PDL)
    BLOCKS: tl.constexpr = (WIDTH + BLOCK_N - 1) // BLOCK_N
    row = (tl.program_id(0) // BLOCKS).to(tl.int64)
    n = tl.program_id(0) % BLOCKS * BLOCK_N + tl.arange(0, BLOCK_N)
    expert = tl.load(experts_ptr + row).to(tl.int64)
    # Behind the last feature the last one is computed again.
    feature = expert * (HALVES * WIDTH) + tl.minimum(n, WIDTH - 1)
    of_weight = weight_ptr + feature[:, None] * IN
    x_ptr += row // SHARE * IN
    gate = tl.zeros((BLOCK_N, BLOCK_K), tl.float32)
    up = gate
    for step in tl.range(0, IN, BLOCK_K):
        k = step + tl.arange(0, BLOCK_K)
        live = k < IN
        w = tl.load(of_weight + k[None, :], mask=live[None, :], other=0.0)
        x = tl.load(x_ptr + k, mask=live, other=0.0).to(tl.float32)[None, :]
        if HALVES == 2:
            second = of_weight + (WIDTH * IN + k)[None, :]
            w_up = tl.load(second, mask=live[None, :], other=0.0)
            up += w_up.to(tl.float32) * x
        gate += w.to(tl.float32) * x
    result = tl.sum(gate, axis=1)
    if BIAS:
        result += tl.load(bias_ptr + feature).to(tl.float32)
    if HALVES == 2:
        of_up = tl.sum(up, axis=1)
        if BIAS:
            of_up += tl.load(bias_ptr + feature + WIDTH).to(tl.float32)
        result = activated(result, of_up, ACTIVATION)
    elif ACTIVATION is not None:
        result = activated_alone(result, ACTIVATION)
    tl.store(y_ptr + row * WIDTH + n, result.to(y_ptr.dtype.element_ty), mask=n < WIDTH)
