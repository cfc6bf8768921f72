"""Random quantised matrices in every layout that the kernels read."""

from collections.abc import Callable

import torch

from loraplex.server.model.linear.packed import PackedWeight, packed

Make = Callable[[int, int], PackedWeight]
TABLE = torch.tensor([-1.0, *(number / 8 for number in range(-7, 8))])


def fp8(rows: int, columns: int) -> Make:
    """Blocks of so many rows and columns; 0 = all."""

    def make(out_features: int, in_features: int) -> PackedWeight:
        high, wide = rows or out_features, columns or in_features
        numbers = torch.randn(out_features, in_features).to(torch.float8_e4m3fn)
        shape = (-(-out_features // high), -(-in_features // wide))
        return PackedWeight(numbers, in_features, 0, wide, torch.rand(shape) + 0.5, rows=high)

    return make


def codes(
    bits: int,
    group: int,
    *,
    zeros: bool = False,
    table: bool = False,
    ordered: bool = False,
    dtype: torch.dtype = torch.float16,
) -> Make:
    """group: 0 = all inputs."""

    def make(out_features: int, in_features: int) -> PackedWeight:
        size = group or in_features
        numbers = torch.randint(0, 1 << bits, (out_features, in_features), dtype=torch.uint8)
        shape = (out_features, -(-in_features // size))
        scales = ((torch.rand(shape) + 0.5) / (1 if table else 1 << bits - 1)).to(dtype)
        least: torch.Tensor | int = 1 << bits - 1
        if zeros:
            least = torch.randint(0, 1 << bits, shape, dtype=torch.uint8)
        return PackedWeight(
            packed(numbers, bits),
            in_features,
            bits,
            size,
            scales,
            least,
            TABLE if table else None,
            torch.randperm(in_features) if ordered else None,
        )

    return make


LAYOUTS: dict[str, Make] = {
    "fp8-tensor": fp8(0, 0),
    "fp8-rows": fp8(1, 0),
    "fp8-blocks": fp8(32, 32),
    "fp8-wide-blocks": fp8(16, 128),
    "int4": codes(4, 32),
    "int4-zeros": codes(4, 16, zeros=True),
    "int4-order": codes(4, 32, zeros=True, ordered=True),
    "int4-rows": codes(4, 0, zeros=True, dtype=torch.bfloat16),
    "int4-wide": codes(4, 128, zeros=True),
    "nf4": codes(4, 64, table=True, dtype=torch.float32),
    "fp4-16": codes(4, 16, table=True, dtype=torch.float32),
    "int8-rows": codes(8, 0, dtype=torch.float32),
    "int8": codes(8, 32, zeros=True, ordered=True),
}
