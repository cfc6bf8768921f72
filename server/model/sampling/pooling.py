"""From a prompt's hidden states to the numbers that a request wants of it.

A mean is summed up in float32 on the device, slice by slice: no hidden state is kept.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from loraplex.server.engine.plan import SeqSlice
from loraplex.server.model.ops.transfers import to_device, to_host
from loraplex.server.model.sampling.results import HostVectors
from loraplex.server.model.sampling.sampler import LogitsOf
from loraplex.server.model.steps.step import Step
from loraplex.server.protocol import VectorParams

# Places of tokens in the batch, int64 `[n]`, ascending -> their normed hidden states `[n, hidden]`.
HiddenOf = Callable[[np.ndarray], torch.Tensor]
# An adapter's slot, -1 = none -> the score head under it, `[classes, hidden]`; None = it has none.
HeadOf = Callable[[int], torch.Tensor | None]


@dataclass(frozen=True, slots=True)
class PooledSlice:
    """A slice that is computed for a vector. begin: its first token in the batch. prompt_len: set
    where the slice ends the prompt."""

    place: int
    piece: SeqSlice
    vector: VectorParams
    begin: int
    prompt_len: int | None

    @property
    def tokens(self) -> np.ndarray:
        """Places in the batch of tokens whose hidden states are needed, int64 `[n]`."""
        end = self.begin + self.piece.num_new
        return np.arange(self.begin if self.vector.pooling == "mean" else end - 1, end)


def pooled_slices(step: Step, prompt_len: np.ndarray) -> list[PooledSlice]:
    """List the slices of a step that vectors are made of. prompt_len: of each row of
    the executor.
    """
    found = []
    for place, piece in enumerate(step.slices):
        if piece.vector is not None:
            whole = int(prompt_len[piece.seq_row])
            is_last = piece.start + piece.num_new == whole
            begin = int(step.ends[place]) - piece.num_new + 1
            found.append(PooledSlice(place, piece, piece.vector, begin, whole if is_last else None))
    return found


class Pooler:
    """Pools vectors of all rows. A mean over a row's prompt begins with the prompt's
    first token.
    """

    def __init__(self, head_of: HeadOf, device: torch.device) -> None:
        self._head_of = head_of
        self._device = device
        self._sums: dict[int, torch.Tensor] = {}  # of rows whose prompt has more slices to come

    def pool(
        self, slices: Sequence[PooledSlice], hidden_of: HiddenOf, logits_of: LogitsOf
    ) -> tuple[HostVectors, ...]:
        found = list(self._means(slices, hidden_of))
        last = [s for s in slices if s.vector.pooling == "last" and s.prompt_len is not None]
        hidden, scored, by_logits = (
            [s for s in last if s.vector.kind == kind] for kind in ("hidden", "scores", "logits")
        )
        if hidden:
            found.append(_to_host(hidden, hidden_of(_ends(hidden))))
        for slot in dict.fromkeys(each.piece.adapter_slot for each in scored):
            of_slot = [each for each in scored if each.piece.adapter_slot == slot]
            found.append(_to_host(of_slot, self._scores(slot, hidden_of(_ends(of_slot)))))
        if by_logits:
            logits = logits_of(_ends(by_logits))
            for row, each in zip(logits, by_logits, strict=True):
                ids = to_device(np.array(each.vector.token_ids), self._device)
                found.append(_to_host([each], row[ids][None]))
        return tuple(found)

    def _scores(self, slot: int, hidden: torch.Tensor) -> torch.Tensor:
        """Compute the scores of a classifier. hidden: normed, `[n, hidden]`. Without a head no
        number is finite.
        """
        head = self._head_of(slot)
        if head is None:
            return hidden.new_full((len(hidden), 1), float("nan"))
        return torch.nn.functional.linear(hidden, head)

    def _means(self, slices: Iterable[PooledSlice], hidden_of: HiddenOf) -> Iterable[HostVectors]:
        for each in slices:
            if each.vector.pooling != "mean":
                continue
            row, piece = each.piece.seq_row, each.piece
            total = hidden_of(each.tokens).sum(0, dtype=torch.float32)
            before = self._sums.pop(row, None)
            if piece.start:
                if before is None:
                    raise RuntimeError("a mean whose first tokens were not computed")
                total = total + before
            if each.prompt_len is None:
                self._sums[row] = total
            else:
                yield _to_host([each], (total / each.prompt_len)[None])


def _ends(slices: Sequence[PooledSlice]) -> np.ndarray:
    return np.array([s.begin + s.piece.num_new - 1 for s in slices])


def _to_host(slices: Sequence[PooledSlice], values: torch.Tensor) -> HostVectors:
    return HostVectors([s.place for s in slices], to_host(values.float()))
