"""From a prompt's hidden states to the numbers that a request wants of it, by the score heads of
the model and of its adapters, too.

A mean is summed up in float32 on the device, slice by slice: no hidden state is kept.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from torch.nn import functional

from loraplex.server.engine.plan import SeqSlice
from loraplex.server.model.decoder import Decoder
from loraplex.server.model.linear.dense import DenseLinear
from loraplex.server.model.lora.lora import AdapterTable
from loraplex.server.model.ops.products_torch import activated, layer_norm
from loraplex.server.model.ops.transfers import to_device, to_host
from loraplex.server.model.sampling.results import HostVectors
from loraplex.server.model.sampling.sampler import LogitsOf
from loraplex.server.model.spec.model_spec import ScoreSpec
from loraplex.server.model.steps.step import Step
from loraplex.server.model.weights import LayerNorm, ScoreTensors
from loraplex.server.protocol import Pooling, VectorParams

# Places of tokens in the batch, int64 `[n]`, ascending -> their normed hidden states `[n, hidden]`.
HiddenOf = Callable[[np.ndarray], torch.Tensor]
_WHOLE: tuple[Pooling, ...] = ("mean", "max", "all")


class ScoresOf(Protocol):
    """As `ScoreHeads.scores`."""

    def __call__(self, slot: int, hidden: torch.Tensor, *, of_tokens: bool) -> torch.Tensor: ...


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
        end, pooling = self.begin + self.piece.num_new, self.vector.pooling
        if pooling in _WHOLE:
            return np.arange(self.begin, end)
        return np.array([self.begin if pooling == "first" else end - 1])

    @property
    def is_mean(self) -> bool:
        """Whether its vector is a mean, to which every slice of the prompt adds."""
        return self.vector.kind == "hidden" and self.vector.pooling == "mean"

    @property
    def is_read(self) -> bool:
        """Whether its hidden states are read as they are, and not for a mean."""
        of_each = self.vector.pooling == "all"
        return not self.is_mean and (of_each or self.prompt_len is not None)

    @property
    def head(self) -> tuple[int, bool]:
        """The slot whose head gives its scores, and whether each token has some."""
        return self.piece.adapter_slot, self.vector.pooling == "all"

    def pooled(self, hidden: torch.Tensor) -> torch.Tensor:
        """Pool hidden states of its tokens, `[tokens, hidden]` -> `[n, hidden]`."""
        match self.vector.pooling:
            case "max":
                return hidden.amax(0, keepdim=True)
            case "mean":
                return hidden.float().mean(0, keepdim=True).to(hidden.dtype)
            case _:
                return hidden


def pooled_slices(step: Step, prompt_len: np.ndarray) -> list[PooledSlice]:
    """The slices of a step that vectors are made of. prompt_len: of each row."""
    found = []
    for place, piece in enumerate(step.slices):
        if piece.vector is not None:
            whole = int(prompt_len[piece.seq_row])
            is_last = piece.start + piece.num_new == whole
            begin = int(step.ends[place]) - piece.num_new + 1
            found.append(PooledSlice(place, piece, piece.vector, begin, whole if is_last else None))
    return found


class Pooler:
    """Pools vectors of all rows. A mean over a row's prompt, and scores of its tokens, begin with
    the prompt's first token. All other vectors are made of the slice that ends the prompt.
    """

    def __init__(
        self,
        scores_of: ScoresOf,
        vectors_of: Callable[[torch.Tensor], torch.Tensor],
        device: torch.device,
    ) -> None:
        """Pool by these. vectors_of: as `ScoreHeads.vectors`."""
        self._scores_of, self._vectors_of = scores_of, vectors_of
        self._device = device
        # Of rows whose prompt has more slices to come: sums, and scores of tokens.
        self._sums: dict[int, torch.Tensor] = {}
        self._scores: dict[int, list[torch.Tensor]] = {}

    def pool(
        self, slices: Sequence[PooledSlice], hidden_of: HiddenOf, logits_of: LogitsOf
    ) -> tuple[HostVectors, ...]:
        found = list(self._means([s for s in slices if s.is_mean], hidden_of))
        ended = [s for s in slices if s.is_read]
        hidden, scored, by_logits = (
            [s for s in ended if s.vector.kind == kind] for kind in ("hidden", "scores", "logits")
        )
        if hidden:
            vectors = self._vectors_of(torch.cat(_pooled(hidden, hidden_of)))
            found.append(_to_host(hidden, vectors))
        for slot, of_tokens in dict.fromkeys(each.head for each in scored):
            alike = [each for each in scored if each.head == (slot, of_tokens)]
            read = _pooled(alike, hidden_of)
            scores = self._scores_of(slot, torch.cat(read), of_tokens=of_tokens)
            if of_tokens:
                of_each = scores.split([len(rows) for rows in read])
                for one, rows in zip(alike, of_each, strict=True):
                    found += self._with_before(one, rows)
            else:
                found.append(_to_host(alike, scores))
        if by_logits:
            logits = logits_of(_tokens(by_logits))
            for row, each in zip(logits, by_logits, strict=True):
                ids = to_device(np.array(each.vector.token_ids), self._device)
                found.append(_to_host([each], row[ids][None]))
        return tuple(found)

    def _with_before(self, piece: PooledSlice, scores: torch.Tensor) -> Iterable[HostVectors]:
        """Scores of a prompt's tokens, if it ends; those of others are kept."""
        row, before = piece.piece.seq_row, list[torch.Tensor]()
        if piece.piece.start:
            before = self._scores.pop(row)
        self._scores[row] = [*before, scores.clone()]
        if piece.prompt_len is not None:
            yield _to_host([piece], torch.cat(self._scores.pop(row)).reshape(1, -1))

    def _means(self, slices: Sequence[PooledSlice], hidden_of: HiddenOf) -> Iterable[HostVectors]:
        """Means of the prompts that end; the sums of others are kept."""
        if not slices:
            return
        counts = to_device(np.array([len(each.tokens) for each in slices]), self._device)
        states = hidden_of(_tokens(slices)).float()
        totals = torch.segment_reduce(states, "sum", lengths=counts, unsafe=True)
        for total, each in zip(totals, slices, strict=True):
            row, before = each.piece.seq_row, self._sums.pop(each.piece.seq_row, None)
            if each.piece.start:
                if before is None:
                    raise RuntimeError("a mean whose first tokens were not computed")
                total += before
            if each.prompt_len is None:
                self._sums[row] = total.clone()
        places = [place for place, each in enumerate(slices) if each.prompt_len is not None]
        if places:
            ended = [slices[place] for place in places]
            at, lengths = np.array(places), np.array([[each.prompt_len] for each in ended])
            means = totals[to_device(at, self._device)] / to_device(lengths, self._device)
            yield _to_host(ended, self._vectors_of(means))


def _tokens(slices: Sequence[PooledSlice]) -> np.ndarray:
    return np.concatenate([each.tokens for each in slices])


def _pooled(slices: Sequence[PooledSlice], hidden_of: HiddenOf) -> list[torch.Tensor]:
    """Pool each slice. Hidden states of all are gathered at once."""
    rows = hidden_of(_tokens(slices)).split([len(each.tokens) for each in slices])
    return [each.pooled(of_each) for each, of_each in zip(slices, rows, strict=True)]


def _to_host(slices: Sequence[PooledSlice], values: torch.Tensor) -> HostVectors:
    return HostVectors([s.place for s in slices], to_host(values.float()))


class ScoreHeads:
    """Computes scores by the base's head, or by parts of it that an adapter has of its own."""

    def __init__(self, decoder: Decoder[Any, Any, Any], table: AdapterTable) -> None:
        self._decoder, self._table = decoder, table

    def scores(self, slot: int, hidden: torch.Tensor, *, of_tokens: bool) -> torch.Tensor:
        """Compute the scores of hidden states, `[n, hidden]` -> `[n, labels]`. slot: of their
        adapter, -1 = none. of_tokens: by the head that gives each token scores. Without a head no
        number is finite.
        """
        spec, own = self._decoder.spec.score(of_tokens=of_tokens), self._table.head(slot)
        tensors = self._decoder.weights.score | own
        needed = (f"{spec.path}.weight", *(name for name, _ in spec.inner_tensors()))
        if not all(name in tensors for name in needed):
            return hidden.new_full((len(hidden), 1), float("nan"))
        inner = self._inner(spec, slot, hidden, tensors)
        bias = tensors.get(f"{spec.path}.bias")
        return functional.linear(inner, tensors[f"{spec.path}.weight"], bias)

    def vectors(self, pooled: torch.Tensor) -> torch.Tensor:
        """Make vectors of pooled ones, `[n, hidden]` -> `[n, size]`, as the model's files say."""
        for dense in self._decoder.weights.dense:
            pooled = dense.linear.run(pooled.float())
            if dense.activation is not None:
                pooled = activated(pooled, dense.activation)
        return pooled

    def _inner(
        self, spec: ScoreSpec, slot: int, hidden: torch.Tensor, tensors: ScoreTensors
    ) -> torch.Tensor:
        """Compute the input of the labels' matrix."""
        if spec.dense is not None and spec.activation is not None:
            path, ops = spec.dense.parts[0].path, self._decoder.ops
            dense = DenseLinear(tensors[f"{path}.weight"], tensors.get(f"{path}.bias"))
            slots = np.full(len(hidden), slot)
            lora = ops.lora(slots) if self._table.changes_model(slots) else None
            y = ops.logits(hidden, dense, lora, self._decoder.sites.lm_head)
            hidden = activated(y, spec.activation)
        if spec.norm is not None:
            path = spec.norm.path
            of_norm = tensors[f"{path}.weight"], tensors.get(f"{path}.bias"), spec.norm.epsilon
            hidden = layer_norm(hidden, LayerNorm(*of_norm))
        return hidden
