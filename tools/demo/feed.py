"""Endless training batches, made on the fly in worker processes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from random import Random

import torch
from tokenizers import Tokenizer
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from tools.demo import encoding, mix
from tools.demo.recipe import PAD, Schedule

IGNORED = -100


def _worker_random(seed: int, stage: str) -> Random:
    info = get_worker_info()
    return Random(f"train:{seed}:{stage}:{info.id if info else 0}")


class BaseRows(IterableDataset[torch.Tensor]):
    """Documents end to end, cut into rows."""

    def __init__(self, tokenizer: Path, seed: int, rows: int, length: int) -> None:
        self.tokenizer, self.seed, self.rows, self.length = tokenizer, seed, rows, length

    def __iter__(self) -> Iterator[torch.Tensor]:
        tokenizer = Tokenizer.from_file(str(self.tokenizer))
        rng = _worker_random(self.seed, f"base:{self.length}")
        need, stream = self.rows * self.length, list[int]()
        while True:
            while len(stream) < need:
                stream += encoding.document_ids(tokenizer, mix.document(rng))
            yield torch.tensor(stream[:need], dtype=torch.int16).view(self.rows, self.length)
            stream = stream[need:]


class AdapterRows(IterableDataset[torch.Tensor]):
    """Prompts with answers, padded; the second plane holds the targets."""

    def __init__(self, tokenizer: Path, seed: int, plan: Schedule, task: str) -> None:
        self.tokenizer, self.seed, self.plan, self.task = tokenizer, seed, plan, task

    def __iter__(self) -> Iterator[torch.Tensor]:
        tokenizer = Tokenizer.from_file(str(self.tokenizer))
        rng = _worker_random(self.seed, self.task)
        rows, alike = self.plan.rows, self.plan.alike
        while True:
            pairs = [encoding.example(tokenizer, rng, self.task) for _ in range(rows * alike)]
            if alike > 1:
                pairs.sort(key=lambda pair: len(pair[0]) + len(pair[1]))
            for at in rng.sample(range(alike), alike) if alike > 1 else (0,):
                yield _padded(pairs[at * rows : (at + 1) * rows])


def _padded(pairs: list[tuple[list[int], list[int]]]) -> torch.Tensor:
    """int16 (2, rows, length): tokens, and targets where the answers are."""
    longest = max(len(prompt) + len(answer) for prompt, answer in pairs)
    longest = (longest + 31) // 32 * 32
    batch = torch.full((2, len(pairs), longest), IGNORED, dtype=torch.int16)
    batch[0] = PAD
    for at, (prompt, answer) in enumerate(pairs):
        start, end = len(prompt), len(prompt) + len(answer)
        batch[0, at, :end] = torch.tensor(prompt + answer, dtype=torch.int16)
        batch[1, at, start:end] = torch.tensor(answer, dtype=torch.int16)
    return batch


def batches(rows: IterableDataset[torch.Tensor], workers: int) -> Iterator[torch.Tensor]:
    """The batches of a stage."""
    return iter(
        DataLoader(
            rows, batch_size=None, num_workers=workers, prefetch_factor=8 if workers else None
        )
    )
