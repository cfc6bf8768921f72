"""Values of commands' options from texts, or words about what was expected. Pure."""

import argparse
import math
from collections.abc import Callable
from typing import TypeVar

from loraplex.adapters.peft.validate import MAX_LORA_RANK

T = TypeVar("T")

_MOST_SHOWN = 80
# Beyond what a run can count, wait for or hold.
_MOST = 10**9
_SLOWEST, _FASTEST = 1e-3, 1e6


def worded(parse: Callable[[str], T]) -> Callable[[str], T]:
    """A type of argparse that shows the parser's sentence, a ValueError, as it is."""

    def read(text: str) -> T:
        try:
            return parse(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return read


def whole(low: int, high: int = _MOST) -> Callable[[str], int]:
    """A whole number within bounds, both included."""
    return worded(lambda text: _whole(text, low, high))


def wholes(low: int, high: int = _MOST) -> Callable[[str], tuple[int, ...]]:
    """Makes a type of argparse for whole numbers within bounds, with commas between."""
    return worded(lambda text: tuple(_whole(part, low, high) for part in text.split(",")))


def number(low: float, high: float = _MOST) -> Callable[[str], float]:
    """A number within bounds, both included."""
    return worded(lambda text: _number(text, low, high))


def above(low: float) -> Callable[[str], float]:
    """A number above a bound."""

    def read(text: str) -> float:
        value = _float(text)
        if not low < value <= _MOST:
            raise ValueError(f"expected a number above {low:g}, got {shown(text)}")
        return value

    return worded(read)


def rate(text: str) -> float:
    """Reads arrivals a second; `inf` = all at once."""
    value = _float(text)
    if not (_SLOWEST <= value <= _FASTEST or value == math.inf):
        bounds = f"{_SLOWEST:g} to {_FASTEST:g} or inf"
        raise argparse.ArgumentTypeError(f"expected {bounds} a second, got {shown(text)}")
    return value


lora_rank = whole(1, MAX_LORA_RANK)
lora_ranks = wholes(1, MAX_LORA_RANK)
# Of gaps between arrivals: their shape, 1 / burstiness^2, stays where it can be drawn from.
burstiness = number(0.01, 100.0)


def shown(text: str) -> str:
    return repr(text[:_MOST_SHOWN])


def _whole(text: str, low: int, high: int) -> int:
    try:
        value = int(text)
    except ValueError:
        value = low - 1
    if not low <= value <= high:
        is_open = high == _MOST and value < low
        bounds = f"of at least {low}" if is_open else f"from {low} to {high}"
        raise ValueError(f"expected a whole number {bounds}, got {shown(text)}")
    return value


def _float(text: str) -> float:
    """Reads a number; NaN, which is in no range, where the text is none."""
    try:
        return float(text)
    except ValueError:
        return math.nan


def _number(text: str, low: float, high: float) -> float:
    value = _float(text)
    if not low <= value <= high:
        is_open = high == _MOST and not value > high
        bounds = f"of at least {low:g}" if is_open else f"from {low:g} to {high:g}"
        raise ValueError(f"expected a number {bounds}, got {shown(text)}")
    return value
