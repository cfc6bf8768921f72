"""Inline assembly that takes 4-bit codes out of bytes, two codes in each, as bfloat16.

`$4` are four bytes. `$0` and `$1` become what their first codes stand for, `$2` and `$3` what their
second ones do; two bfloat16 lie in a register. Needs no Triton.
"""

import torch

# Between 128 and 256 the last bit of a bfloat16 is worth one: 0x4300 | code is 128 + code. Two
# codes that are 16 bits apart come at once.
_SPLIT = """{{
    .reg .b32 one, less, pair;
    mov.b32 one, 0x3f803f80;
    mov.b32 less, {0};
    prmt.b32 pair, $4, 0, 0x4140;
    lop3.b32 $0, pair, 0x000f000f, 0x43004300, 0xea;
    shr.u32 pair, pair, 4;
    lop3.b32 $2, pair, 0x000f000f, 0x43004300, 0xea;
    prmt.b32 pair, $4, 0, 0x4342;
    lop3.b32 $1, pair, 0x000f000f, 0x43004300, 0xea;
    shr.u32 pair, pair, 4;
    lop3.b32 $3, pair, 0x000f000f, 0x43004300, 0xea;
    fma.rn.bf16x2 $0, $0, one, less;
    fma.rn.bf16x2 $1, $1, one, less;
    fma.rn.bf16x2 $2, $2, one, less;
    fma.rn.bf16x2 $3, $3, one, less;
    }}"""


def split_of_codes(zero: int) -> str:
    """PTX that splits `code - zero`."""
    less = torch.tensor([-128 - zero] * 2, dtype=torch.bfloat16).view(torch.int32).item()
    return _SPLIT.format(f"0x{int(less) & 0xFFFFFFFF:08x}")


# Of the four codes in the lowest bits of `word` the lower and the upper bytes of their values. A
# permutation of bytes looks a code up among eight; which eight it is the code's last bit says.
_LOOK_UP = """
    and.b32 code, word, 0x7777;
    shr.u32 last, word, 3;
    lop3.b32 last, last, 0x1111, 0x8888, 0xea;
    prmt.b32 last, 0x8000, 0, last;
    prmt.b32 first, {0}, {1}, code;
    prmt.b32 second, {2}, {3}, code;
    lop3.b32 low, first, second, last, 0xd8;
    prmt.b32 first, {4}, {5}, code;
    prmt.b32 second, {6}, {7}, code;
    lop3.b32 high, first, second, last, 0xd8;
"""


def split_of_table(values: bytes) -> str:
    """The assembly that looks up codes. values: of the 16 as bfloat16, little-endian."""
    planes = values[::2] + values[1::2]
    words = [planes[at : at + 4][::-1].hex() for at in range(0, len(planes), 4)]
    look_up = _LOOK_UP.format(*(f"0x{word}" for word in words))
    return f"""{{
    .reg .b32 word, code, first, second, last, low, high;
    mov.b32 word, $4;{look_up}
    prmt.b32 $0, low, high, 0x6240;
    prmt.b32 $2, low, high, 0x7351;
    shr.u32 word, $4, 16;{look_up}
    prmt.b32 $1, low, high, 0x6240;
    prmt.b32 $3, low, high, 0x7351;
    }}"""
