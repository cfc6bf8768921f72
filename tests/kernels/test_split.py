"""Assembly that splits 4-bit codes or widens int8, by the PTX manual's instructions."""

import operator
import re
from collections.abc import Callable

import pytest
import torch

from loraplex.server.kernels.attention.pages import _WIDEN
from loraplex.server.kernels.linear.matrix import split_of_codes, split_of_table
from loraplex.server.model.linear.packed import packed
from loraplex.server.model.linear.quantised import in_runs

ALL = 0xFFFFFFFF
RUN = 8


def lop3(a: int, b: int, c: int, table: int) -> int:
    found = 0
    for bit in range(32):
        place = (a >> bit & 1) << 2 | (b >> bit & 1) << 1 | c >> bit & 1
        found |= (table >> place & 1) << bit
    return found


def prmt(a: int, b: int, selector: int) -> int:
    """A selector's last bit has the byte's sign in all bits."""
    source, found = (b << 32 | a).to_bytes(8, "little"), bytearray()
    for place in range(4):
        choice = selector >> 4 * place & 15
        byte = source[choice & 7]
        found.append((0xFF if byte & 0x80 else 0) if choice & 8 else byte)
    return int.from_bytes(found, "little")


def float16s(word: int) -> list[float]:
    return torch.tensor([word], dtype=torch.uint32).view(torch.float16).tolist()


def bfloat16s(word: int) -> list[float]:
    return torch.tensor([word], dtype=torch.uint32).view(torch.bfloat16).tolist()


def sub(a: int, b: int) -> int:
    rest = [x - y for x, y in zip(*map(float16s, (a, b)), strict=True)]
    return int(torch.tensor(rest, dtype=torch.float16).view(torch.uint32).item())


def fma(a: int, b: int, c: int) -> int:
    sums = [x * y + z for x, y, z in zip(*map(bfloat16s, (a, b, c)), strict=True)]
    return int(torch.tensor(sums, dtype=torch.bfloat16).view(torch.uint32).item())


INSTRUCTIONS: dict[str, Callable[..., int]] = {
    "mov": lambda a: a,
    "and": operator.and_,
    "xor": operator.xor,
    "shr": operator.rshift,
    "lop3": lop3,
    "prmt": prmt,
    "sub": sub,
    "fma": fma,
}


def run(assembly: str, word: int, results: int = 4) -> list[int]:
    """word: behind the results. Returns these, `$0` to `$3`."""
    registers = {f"${results}": word}

    def value(name: str) -> int:
        return registers[name] if name in registers else int(name, 0)

    for line in re.findall(r"^\s+([a-z].*);", assembly, re.MULTILINE):
        name, _, rest = line.partition(" ")
        target, *sources = re.split(r",\s*", rest)
        of = [value(source) for source in sources]
        found = INSTRUCTIONS[name.split(".")[0]](*of)
        registers[target] = found & ALL
    return [registers[f"${i}"] for i in range(results)]


def word_of(codes: list[int]) -> int:
    """Four bytes of a run of eight codes, as matrices hold them."""
    pairs = packed(torch.tensor([codes], dtype=torch.uint8), 4)
    word = in_runs(pairs, RUN).view(torch.int32).item()
    return int(word) & ALL


def test_bytes_of_int8() -> None:
    for first in range(-128, 128, 4):
        numbers = list(range(first, first + 4))
        word = int(torch.tensor(numbers, dtype=torch.int8).view(torch.uint32).item())
        found = run(_WIDEN.value, word, results=2)
        assert [value for word in found for value in float16s(word)] == numbers


CODES = [[0, 1, 2, 3, 4, 5, 6, 7], [15, 14, 13, 12, 11, 10, 9, 8], [3, 12, 7, 0, 15, 8, 1, 10]]


@pytest.mark.parametrize("zero", [0, 8, 15])
@pytest.mark.parametrize("codes", CODES)
def test_codes_less_a_zero(codes: list[int], zero: int) -> None:
    found = run(split_of_codes(zero), word_of(codes))
    values = [value for word in found for value in bfloat16s(word)]
    assert values == [code - zero for code in codes]


@pytest.mark.parametrize("codes", CODES)
def test_codes_of_a_table(codes: list[int]) -> None:
    table = (torch.randn(16) * 3).bfloat16()
    assembly = split_of_table(bytes(table.view(torch.uint8).tolist()))
    found = run(assembly, word_of(codes))
    values = [value for word in found for value in bfloat16s(word)]
    assert values == [table[code].item() for code in codes]
