"""Rotations of queries and keys by positions, and factors of queries. Pure."""

from typing import Literal

import msgspec

RopeKind = Literal["default", "linear", "llama3", "yarn", "longrope", "proportional"]


class RopeSpec(msgspec.Struct, frozen=True):
    """Rotary embedding: `kind` as transformers names it, resolved to plain numbers.

    attention_factor multiplies cos and sin. original_context: tokens before
    scaling (llama3, yarn, longrope). rotary_dim: features of a head that turn, the first ones;
    None = all. interleaved: pairs are neighbours, `x[2 i]` and `x[2 i + 1]`; else halves,
    `x[i]` and `x[i + rotary_dim / 2]`. short_factors, long_factors (longrope): divide the
    frequencies, `[rotary_dim / 2]`; all tokens of a sequence beyond `original_context` take the
    long ones. Without long ones no sequence gets there. turning (proportional): of a whole head's
    pairs so many turn, those of the largest frequencies.
    """

    kind: RopeKind
    theta: float
    factor: float = 1.0
    original_context: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    attention_factor: float = 1.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    rotary_dim: int | None = None
    interleaved: bool = False
    short_factors: tuple[float, ...] = ()
    long_factors: tuple[float, ...] = ()
    turning: int = 0


class PositionScale(msgspec.Struct, frozen=True):
    """A factor of a query at a position: `1 + beta * ln(1 + position // context)` (Llama 4)."""

    beta: float
    context: int
