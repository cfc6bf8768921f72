"""Numbers of rows that steps are padded to, so that all they launch was launched at start. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

# Sequences of a captured step; from there on the products alone take longer than the host.
_MOST_DECODES = 1024
# Tokens of a captured step with prompts: these, and with small layers as many as make so many
# products of a token and a weight. With more the device needs longer than the host.
_MOST_TOKENS = 2048
_MOST_WORK = 250_000_000_000
# Of steps outside graphs.
_TOKENS_STEP = 128
MOST_PADDING = _TOKENS_STEP - 1
# Of one captured step. Steps of few tokens that have more are computed as they come.
MAX_PROMPTS = 64


@dataclass(frozen=True, slots=True)
class PromptRoom:
    """The most that the prompts of a captured step have: tokens, and pages of their contexts
    together; and how many prompts there are at most."""

    tokens: int
    pages: int
    prompts: int = MAX_PROMPTS


def graph_sizes(max_rows: int) -> tuple[int, ...]:
    """1, 2, 4, by eights to 256, then by 32 up to what `max_rows` sequences need, at most 1024:
    what pads a step is never more than an eighth of it from there on."""
    sizes = [1, 2, 4, *range(8, 256, 8), *range(256, _MOST_DECODES + 1, 32)]
    return sizes_up_to(sizes, max_rows)


def token_sizes(max_tokens: int, layer_weights: int, most_of_prompts: int) -> tuple[int, ...]:
    """Sizes of graphs of steps with prompts, up to what steps of `max_tokens` tokens need.

    Beyond the smallest size, padding is the smaller part of any step. layer_weights: how many a
    layer has. most_of_prompts: tokens that the prompts of a captured step can have at most; 0 gives
    no sizes.
    """
    most = max(_MOST_TOKENS, _MOST_WORK // layer_weights)
    # The largest takes what `row_sizes` makes of the tokens of any of its steps.
    most = min(most, most_of_prompts // _TOKENS_STEP * _TOKENS_STEP)
    sizes = [32, 64, 96, 128, *range(192, 1024, 64), *range(1024, 2048, 128)]
    sizes += [*range(2048, 4096, 256), *range(4096, max(max_tokens, _MOST_TOKENS) + 512, 512)]
    return sizes_up_to([size for size in sizes if size <= most], max_tokens)


def row_sizes(max_rows: int, max_tokens: int) -> tuple[int, ...]:
    """Rows of products outside graphs, up to `max_tokens`: those of decode graphs, and by 128.

    As many rows as sequences may want logits. A library's choice of kernel differs from one number
    of rows to the next.
    """
    few = graph_sizes(max(max_rows, _TOKENS_STEP))
    sizes = {*few, *range(_TOKENS_STEP, max_tokens, _TOKENS_STEP)}
    return tuple(sorted(size for size in sizes if size < max_tokens)) + (max_tokens,)


def sizes_up_to(sizes: Sequence[int], most: int) -> tuple[int, ...]:
    """The ascending `sizes` that steps of up to `most` need; the first in any case."""
    return tuple(size for i, size in enumerate(sizes) if i == 0 or sizes[i - 1] < most)


def padded_size(sizes: Sequence[int], wanted: int) -> int:
    """The smallest of `sizes`, ascending, that takes `wanted`; without sizes that itself."""
    return next(size for size in sizes if size >= wanted) if sizes else wanted


def padded(indices: np.ndarray, sizes: Sequence[int]) -> np.ndarray:
    """Pad indices to one of the sizes. indices: int64 `[n]`; the last is repeated up to one of the
    sizes. None stay none.
    """
    if not len(indices):
        return indices
    return np.pad(indices, (0, padded_size(sizes, len(indices)) - len(indices)), mode="edge")
