"""Draws the tokens of a step's rows, and the logprobs that requests asked for."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np
import torch

from loraplex.server.model.ops.memory import LOGITS_ROWS
from loraplex.server.model.ops.transfers import to_device, to_host
from loraplex.server.model.sampling.masks import ToDraw
from loraplex.server.model.sampling.results import HostLogprobs, PromptLogprobs
from loraplex.server.model.sampling.sampling import (
    Logprobs,
    RowSampling,
    Sampled,
    logprobs,
    ranks,
    sample,
)
from loraplex.server.model.steps.rows import Rows

# Places of tokens in the batch, int64 `[n]`, ascending -> their logits `[n, vocab]`.
LogitsOf = Callable[[np.ndarray], torch.Tensor]


def in_pieces(
    draw: Callable[[ToDraw], torch.Tensor], rows: ToDraw, at_once: int = LOGITS_ROWS
) -> torch.Tensor:
    """Call `draw` for at most so many rows at once, and join the results."""
    pieces = [slice(i, i + at_once) for i in range(0, len(rows), at_once)]
    return torch.cat([draw(rows.pick(piece)) for piece in pieces])


class TorchDraws:
    """Draw tokens with plain torch; implements `loraplex.server.model.sampling.sampler.Draws`."""

    def __init__(self, rows: Rows, parameters: RowSampling, at_once: int = LOGITS_ROWS) -> None:
        """Draw for rows with these parameters. at_once: rows that are computed together: a GPU's
        running sums depend on their number."""
        self._rows, self._parameters, self._at_once = rows, parameters, at_once

    def __call__(self, rows: ToDraw) -> torch.Tensor:
        return in_pieces(self._draw, rows, self._at_once)

    def _draw(self, rows: ToDraw) -> torch.Tensor:
        sampled = self.sampled(rows)
        return sampled.token_ids.masked_fill(sampled.failed, -1)

    def sampled(self, rows: ToDraw) -> Sampled:
        """Draw and append, and return the logits of the draw, too. For at most LOGITS_ROWS rows."""
        device = self._rows.device
        scores = rows.logits[to_device(rows.which, device)].float()
        asked = self._parameters.batch(self._rows, rows.seq_rows, rows.lengths, rows.masks)
        sampled = sample(scores, asked)
        on_device = to_device(rows.seq_rows, device), to_device(rows.lengths, device)
        self._rows.append(*on_device, sampled.token_ids)
        return sampled


class Draws(Protocol):
    def __call__(self, rows: ToDraw) -> torch.Tensor:
        """Draw and write behind what each row has. Returns int `[n]` on the device, -1 = no token
        could be chosen."""
        ...


@dataclass(frozen=True, slots=True)
class Drawn:
    """Tokens that were drawn, and their logprobs. token_ids: int `[rows]` on the device, -1 = no
    token could be chosen.
    """

    token_ids: torch.Tensor
    logprobs: tuple[HostLogprobs, ...]


@dataclass(frozen=True, slots=True)
class ScoredSlice:
    """A slice whose prompt tokens are scored. begin: its first token in the batch; predicted: how
    many of its positions predict a token of the prompt."""

    place: int
    seq_row: int
    start: int
    begin: int
    predicted: int


class Sampler:
    """Draws tokens for all rows; parameters lie in `rows` and `parameters`."""

    def __init__(
        self, rows: Rows, parameters: RowSampling, draws: Draws, at_once: int = LOGITS_ROWS
    ) -> None:
        """Draw by `draws`, and in torch. at_once: as of TorchDraws."""
        self.rows = rows
        self._at_once = at_once
        self.parameters = parameters
        self._draws = draws
        self._by_torch = TorchDraws(rows, parameters)

    def draw(self, rows: ToDraw, places: np.ndarray) -> Drawn:
        """Draw a token for each row. places: the slices' places in the step, int64 `[n]`. Logprobs
        are of the raw logits, whatever changes or masks them for the draw; where a row asks for
        processed ones, they are of the very logits that the draw used.
        """
        parts = self._alike(rows)
        if len(parts) == 1:
            return self._draw(parts[0][1], places)
        token_ids = torch.empty(len(rows), dtype=torch.int32, device=self.rows.device)
        logprobs: tuple[HostLogprobs, ...] = ()
        for chosen, part in parts:
            drawn = self._draw(part, places[chosen])
            at = to_device(chosen, self.rows.device)
            token_ids.index_copy_(0, at, drawn.token_ids.to(token_ids.dtype))
            logprobs += drawn.logprobs
        return Drawn(token_ids, logprobs)

    def _alike(self, rows: ToDraw) -> list[tuple[np.ndarray, ToDraw]]:
        """Rows that choose from equally many ids and have logprobs of one kind; their places."""
        found = []
        for at, part in rows.alike(self.parameters.vocab_size):
            processed = self.parameters.processed[part.seq_rows]
            if processed.all() or not processed.any():
                found.append((at, part))
                continue
            found += [(at[kind], part.pick(kind)) for kind in (processed, ~processed)]
        return found

    def _draw(self, rows: ToDraw, places: np.ndarray) -> Drawn:
        """Draw for rows as `_alike` finds them."""
        if self.parameters.processed[rows.seq_rows[0]]:
            return self._draw_processed(rows, places)
        token_ids = self._draws(rows)
        counts = self.parameters.logprobs[rows.seq_rows]
        wanted = np.flatnonzero(counts >= 0)
        scored, device = [], self.rows.device
        for i in range(0, wanted.size, LOGITS_ROWS):
            part = wanted[i : i + LOGITS_ROWS]
            chosen = token_ids[to_device(part, device)].long().clamp(min=0)
            logits = rows.logits[to_device(rows.which[part], device)].float()
            scored.append(self._scored(logits, chosen, rows.seq_rows[part], places[part]))
        return Drawn(token_ids, tuple(scored))

    def _draw_processed(self, rows: ToDraw, places: np.ndarray) -> Drawn:
        """Draw in torch, whose logits are at hand."""
        token_ids, scored = [], []
        for i in range(0, len(rows), self._at_once):
            piece = slice(i, i + self._at_once)
            found = self._by_torch.sampled(rows.pick(piece))
            token_ids.append(found.token_ids.masked_fill(found.failed, -1))
            own = found.logits, found.token_ids, rows.seq_rows[piece], places[piece]
            scored.append(self._scored(*own))
        return Drawn(torch.cat(token_ids), tuple(scored))

    def _scored(
        self, logits: torch.Tensor, chosen: torch.Tensor, seq_rows: np.ndarray, places: np.ndarray
    ) -> HostLogprobs:
        """Compute the logprobs of rows that ask for some. logits: float32 `[n, vocab]`; chosen:
        int64 `[n]`, the tokens that were drawn.
        """
        counts = self.parameters.logprobs[seq_rows]
        found = logprobs(logits, chosen, int(counts.max()), self.parameters.listed(seq_rows))
        return HostLogprobs(
            places.tolist(),
            counts.tolist(),
            self.parameters.num_listed[seq_rows].tolist(),
            _logprobs_to_host(found),
        )

    def score(self, piece: ScoredSlice, logits_of: LogitsOf) -> PromptLogprobs:
        count = max(int(self.parameters.prompt_logprobs[piece.seq_row]), 0)
        first = piece.start + 1
        targets = self.rows.tokens[piece.seq_row, first : first + piece.predicted].long()
        listed = self.parameters.listed(np.array([piece.seq_row]))
        parts = []
        for offset in range(0, piece.predicted, LOGITS_ROWS):
            end = min(offset + LOGITS_ROWS, piece.predicted)
            logits = logits_of(np.arange(piece.begin + offset, piece.begin + end)).float()
            ids = targets[offset:end]
            own = None if listed is None else listed.expand(len(ids), -1)
            found = replace(logprobs(logits, ids, count, own), ranks=ranks(logits, ids))
            parts.append(_logprobs_to_host(found))
        return PromptLogprobs(piece.place, to_host(targets), tuple(parts))


def _logprobs_to_host(values: Logprobs) -> Logprobs:
    chosen, top_ids, top = map(to_host, (values.chosen, values.top_ids, values.top))
    ranked, listed = (
        None if more is None else to_host(more) for more in (values.ranks, values.listed)
    )
    return Logprobs(chosen, top_ids, top, ranked, listed)
