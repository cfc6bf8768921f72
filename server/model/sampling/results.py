"""Results of a launched step that are still to be collected: tensors on their way to the host."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from loraplex.server.engine.plan import SeqSlice, SliceResult
from loraplex.server.model.routed_experts import HostRouted
from loraplex.server.model.sampling.masks import ToDraw
from loraplex.server.model.sampling.sampling import Logprobs
from loraplex.server.model.steps.drafts import joined
from loraplex.server.protocol import TokenLogprob


@dataclass(frozen=True, slots=True)
class HostLogprobs:
    """Logprobs of one step's tokens, by place in the step. counts: alternatives that each wants;
    lists: ids that each has listed."""

    places: list[int]
    counts: list[int]
    lists: list[int]
    values: Logprobs


@dataclass(frozen=True, slots=True)
class PromptLogprobs:
    """Log-probabilities of one slice's prompt. token_ids: those predicted, int64 `[n]`."""

    place: int
    token_ids: torch.Tensor
    parts: tuple[Logprobs, ...]


@dataclass(frozen=True, slots=True)
class HostVectors:
    """Vectors of one step and one width: float32 `[n, width]`, on the way to the host.

    places: one for each vector.
    """

    places: list[int]
    values: torch.Tensor

    def by_place(self) -> dict[int, bytes | None]:
        """Return the vectors as bytes, by place in the step. None: not all of a vector's numbers
        are finite.
        """
        values = self.values.numpy().astype("<f4", copy=False)
        finite = np.isfinite(values).all(axis=1)
        return {
            place: values[i].tobytes() if finite[i] else None for i, place in enumerate(self.places)
        }


@dataclass(frozen=True, slots=True)
class Held:
    """Draws of a launched step, of which some wait for masks.

    rows: all that sample, in order; places: theirs in the step, int64 `[n]`. Which of them wait for
    masks, and which are to be drawn, the former and others in one draw: bool `[n]`. token_ids: int
    `[n]` on the device, what the rest has chosen.
    """

    rows: ToDraw
    places: np.ndarray
    waiting: np.ndarray
    chosen: np.ndarray
    token_ids: torch.Tensor


@dataclass(slots=True)
class StepTicket:
    """A launched step: results by place in the step, and how places map to the plan's slices.

    samples: place of each sampled row. token_ids: int `[samples]`, -1 = none could be chosen.
    done: the device's event, None where launching computed. held: None once all has been drawn.
    with_drafts: the plan's slices, where some have drafts: then `order` is of what `spread` makes
    of them.
    """

    order: list[int]
    samples: list[int]
    token_ids: torch.Tensor | None
    logprobs: tuple[HostLogprobs, ...]
    prompt_logprobs: tuple[PromptLogprobs, ...]
    done: torch.cuda.Event | None
    held: Held | None = None
    vectors: tuple[HostVectors, ...] = ()
    routed: HostRouted | None = None
    with_drafts: Sequence[SeqSlice] = ()

    def ready(self) -> bool:
        return self.held is None and (self.done is None or self.done.query())

    def results(self) -> list[SliceResult]:
        """Waits for the device. One result per slice, in the plan's order."""
        if self.held is not None:
            raise RuntimeError("the step was collected before its masks came")
        if self.done is not None:
            self.done.synchronize()
        tokens: dict[int, int] = {}
        failed = set()
        if self.token_ids is not None:
            for place, token in zip(self.samples, self.token_ids.tolist(), strict=True):
                if token < 0:
                    failed.add(place)
                else:
                    tokens[place] = token
        logprobs: dict[int, TokenLogprob] = {}
        for found in self.logprobs:
            logprobs |= _by_place(found, tokens)
        prompts = {p.place: _prompt(p) for p in self.prompt_logprobs}
        vectors: dict[int, bytes | None] = {}
        for pooled in self.vectors:
            vectors |= pooled.by_place()
        failed |= {place for place, vector in vectors.items() if vector is None}
        routed = {} if self.routed is None else self.routed.by_place()
        results: list[SliceResult] = [SliceResult()] * len(self.order)
        for place, index in enumerate(self.order):
            token_ids = (tokens[place],) if place in tokens else ()
            chosen = (logprobs[place],) if place in logprobs else ()
            results[index] = SliceResult(
                token_ids,
                chosen,
                prompts.get(place),
                place in failed,
                vectors.get(place),
                routed.get(place),
            )
        return joined(self.with_drafts, results) if self.with_drafts else results


def _by_place(found: HostLogprobs, tokens: dict[int, int]) -> dict[int, TokenLogprob]:
    chosen, ids, top = (
        t.tolist() for t in (found.values.chosen, found.values.top_ids, found.values.top)
    )
    listed = _listed(found.values)
    result = {}
    for i, (place, count) in enumerate(zip(found.places, found.counts, strict=True)):
        if place in tokens:
            alternatives = tuple(zip(ids[i][:count], top[i][:count], strict=True))
            own = listed[i][: found.lists[i]]
            result[place] = TokenLogprob(tokens[place], chosen[i], alternatives, listed=own)
    return result


def _prompt(prompt: PromptLogprobs) -> list[TokenLogprob]:
    token_ids = prompt.token_ids.tolist()
    chosen = [value for part in prompt.parts for value in part.chosen.tolist()]
    ids = [row for part in prompt.parts for row in part.top_ids.tolist()]
    top = [row for part in prompt.parts for row in part.top.tolist()]
    ranks = [
        rank for part in prompt.parts if part.ranks is not None for rank in part.ranks.tolist()
    ]
    listed = [row for part in prompt.parts for row in _listed(part)]
    rows = zip(token_ids, chosen, ids, top, ranks, listed, strict=True)
    return [
        TokenLogprob(token, value, tuple(zip(i, t, strict=True)), rank, own)
        for token, value, i, t, rank, own in rows
    ]


def _listed(values: Logprobs) -> list[tuple[float, ...]]:
    """Listed log-probabilities of each row."""
    if values.listed is None:
        return [()] * len(values.chosen)
    return [tuple(row) for row in values.listed.tolist()]
