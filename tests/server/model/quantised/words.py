"""Numbers in int32 words, packed by the formats' descriptions and one number at a time."""

import numpy as np
import torch

# AutoAWQ's order: of a word's eight columns, lowest bits first.
AWQ_COLUMNS = (0, 2, 4, 6, 1, 3, 5, 7)


def in_words(numbers: torch.Tensor, bits: int) -> torch.Tensor:
    """`[rows, n]` -> int32 `[rows, ceil(n / per word)]`, the first number in the lowest bits."""
    per_word = 32 // bits
    rows, count = numbers.shape
    words = np.zeros((rows, -(-count // per_word)), np.uint32)
    for place, column in enumerate(numbers.numpy().astype(np.uint32).T):
        words[:, place // per_word] |= column << np.uint32(bits * (place % per_word))
    return torch.from_numpy(words.view(np.int32))


def in_awq_words(numbers: torch.Tensor) -> torch.Tensor:
    """`[rows, 8 n]` -> int32 `[rows, n]`."""
    words = np.zeros((numbers.shape[0], numbers.shape[1] // 8), np.uint32)
    columns = numbers.numpy().astype(np.uint32)
    for word in range(words.shape[1]):
        for place, column in enumerate(AWQ_COLUMNS):
            words[:, word] |= columns[:, 8 * word + column] << np.uint32(4 * place)
    return torch.from_numpy(words.view(np.int32))


def less_one(words: torch.Tensor, bits: int) -> torch.Tensor:
    """One less in each number, as GPTQ's first version stores zeros: whole words are subtracted."""
    ones = sum(1 << shift for shift in range(0, 32, bits))
    return torch.from_numpy((words.numpy().view(np.uint32) - np.uint32(ones)).view(np.int32))
