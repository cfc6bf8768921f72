"""TorchExecutor: carries out step plans with one decoder on one device.

In plain torch tokens can be computed one by one. A library divides its sums by the shape of what it
gets. A token alone has one shape, so its bits do not depend on the tokens beside it, on the step
that it comes in, or on the slice that it is of.
"""

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch

from loraplex.server.config import EngineConfig
from loraplex.server.engine.executor import (
    AdapterCopy,
    CopyNews,
    CopyOver,
    CopySums,
    CopyUsable,
    Masks,
    PageCopies,
    PagesCopied,
    PictureCopy,
    PictureIn,
)
from loraplex.server.engine.messages import StartProgress
from loraplex.server.engine.plan import SeqSlice, SliceResult, StepPlan
from loraplex.server.model.decoder import Decoder, Pictured, Wanted
from loraplex.server.model.devices.group import Alone, Group
from loraplex.server.model.graphs.decode_batch import APPEND, POSITION, ROW, DecodeBatch
from loraplex.server.model.graphs.gpu_path import build, import_beside
from loraplex.server.model.graphs.parts import Built
from loraplex.server.model.graphs.start_phases import StartPhases
from loraplex.server.model.lora.adapter_copies import AdapterCopies
from loraplex.server.model.lora.lora import OutputVectors, Reach
from loraplex.server.model.ops.memory import state_bytes
from loraplex.server.model.ops.ops import StepLayout
from loraplex.server.model.ops.ops_torch import TorchOps
from loraplex.server.model.ops.sizes import padded, padded_size
from loraplex.server.model.ops.transfers import to_device, to_host
from loraplex.server.model.routed_experts import ChosenExperts, HostRouted
from loraplex.server.model.sampling.masks import MaskMemory, ToDraw
from loraplex.server.model.sampling.pooling import PooledSlice, Pooler, ScoreHeads, pooled_slices
from loraplex.server.model.sampling.results import Held, HostVectors, PromptLogprobs, StepTicket
from loraplex.server.model.sampling.sampler import Drawn, Sampler, ScoredSlice
from loraplex.server.model.start import (
    WeightsLoader,
    advised,
    build_parts,
    host_memory_made,
    host_pages_mapped,
    leave_a_core,
    make_copiers,
)
from loraplex.server.model.steps.drafts import spread, spread_places
from loraplex.server.model.steps.rows import Rows
from loraplex.server.model.steps.step import Step, routed_places, saves_at_ends
from loraplex.server.model.tower.tower import EncodeTicket, PictureStore

log = logging.getLogger(__name__)

_OUTSIDE_GRAPHS = (
    "an adapter with %s is in use: steps with one run outside CUDA graphs, and are slower for all"
    " of their sequences%s"
)
_STATES = "states: {rows} of {size:.1f} MiB, and {snapshots} snapshots"
_OF_REACH = {
    Reach.LAYERS: ("LoRA", ""),
    Reach.EXPERTS: ("LoRA of experts", ""),
    Reach.OUTPUTS: ("DoRA or biases", " (--dora-graphs captures them)"),
    Reach.NORMS: ("norms of its own", ""),
}


class OneByOne:
    """Computes the forward pass of steps, and logits, token after token."""

    def __init__(
        self, decoder: Decoder[Any, Any, Any], chosen_experts: ChosenExperts | None
    ) -> None:
        """Compute by a decoder. chosen_experts: where its operations note them."""
        self._decoder, self._chosen_experts = decoder, chosen_experts

    @classmethod
    def of(cls, built: Built) -> "OneByOne | None":
        """None where kernels compute a token alike in any step."""
        if not isinstance(built.decoder.ops, TorchOps):
            return None
        return cls(built.decoder, built.chosen_experts)

    def forward(
        self,
        token_ids: torch.Tensor,
        layout: StepLayout,
        token_slots: np.ndarray,
        wanted: np.ndarray,
        meanwhile: Callable[[], None] | None = None,
    ) -> torch.Tensor:
        """Compute normed hidden states of the tokens wanted, int64 `[n]`, ascending. The parameters
        are as of `Decoder.forward`, but slots, int64 `[tokens]`."""
        ops, found = self._decoder.ops, []
        is_wanted = np.zeros(len(token_ids), dtype=np.int64)
        is_wanted[wanted] = 1
        for at in range(len(token_ids)):
            one, own = slice(at, at + 1), layout.of(np.array([at]))
            if self._chosen_experts is not None:
                self._chosen_experts.first = at
            lora = ops.lora(token_slots[one])
            rows = torch.zeros(int(is_wanted[at]), dtype=torch.int64, device=token_ids.device)
            plan = ops.plan(own)
            of_wanted = Wanted(rows, lora, partial(ops.plan, own))
            normed = self._decoder.forward(token_ids[one], plan, lora, of_wanted, meanwhile)
            if is_wanted[at]:
                found.append(normed)
        return torch.cat(found) if found else normed

    def logits(self, normed: torch.Tensor, slots: np.ndarray, width: int | None) -> torch.Tensor:
        """Compute logits of rows `[n, hidden]`, as `Decoder.logits` does. slots: int64 `[n]`."""
        ops, found = self._decoder.ops, []
        for at in range(len(normed)):
            lora = ops.lora(slots[at : at + 1])
            found.append(self._decoder.logits(normed[at : at + 1], lora, width=width))
        return torch.cat(found)


class TorchExecutor:
    """Implements `loraplex.server.engine.executor.Executor`.

    On the CPU a step is computed in `launch`; on a GPU `launch` enqueues it and waits for nothing.
    Raises CheckpointError or ConfigError when the model or the memory options cannot be served.
    """

    def __init__(
        self,
        config: EngineConfig,
        host_memory: memoryview,
        *,
        group: Group | None = None,
        weights: WeightsLoader | None = None,
        graph_batches: Sequence[int] | None = None,
        report: Callable[[StartProgress], None] | None = None,
    ) -> None:
        """Load the model, and make all that steps need. host_memory: the arena, then patches.
        group: devices that share the model; None = none do. weights: makes those of the device
        otherwise than from the model's folder. graph_batches: padded batch sizes of decode graphs;
        None = all that `config.max_running` needs. report: hears how far the start is.
        """
        self.device = torch.device(config.device)
        group = group or Alone()
        if self.device.type == "cpu":
            leave_a_core(group.shard.count)
        else:
            import_beside()
        phases = StartPhases(report)
        host_pages = host_pages_mapped(config)
        host_arena = host_memory[: config.host_arena_bytes]
        with torch.inference_mode(), advised():
            parts = build_parts(config, group, weights, self.device, phases)
            self.limits = parts.limits
            self._rows, self._table, self._states = parts.rows, parts.table, parts.states
            # Not beside the weights, which take three times as long to read then.
            with host_memory_made(self.device, host_arena, host_pages):
                built = build(parts, graph_batches, phases)
                phases.begin("host memory")
        self._decoder: Decoder[Any, Any, Any] = built.decoder
        self._pictures, self._host_memory = parts.pictures, host_memory
        self._graphs, self._token_graphs = built.graphs, built.token_graphs
        self._row_sizes = built.row_sizes
        self._parameters = parts.parameters
        self._is_invariant = config.batch_invariant
        self._one_by_one = OneByOne.of(built) if self._is_invariant else None
        self._chosen_experts = built.chosen_experts
        # From this layer on tokens are computed whose results somebody needs.
        self._wanted_from = built.decoder.mixers[built.decoder.last_writer].layer
        self._sampler = Sampler(self._rows, self._parameters, built.draws, parts.rows_at_once)
        heads = ScoreHeads(built.decoder, self._table)
        self._pooler = Pooler(heads.scores, heads.vectors, self.device)
        self._masks = MaskMemory(self.limits.most_decodes, self.device)
        vectors = OutputVectors(parts.weights, self._table.sites, self._table.tower).pieces
        self._copies = AdapterCopies(self._table, host_arena, vectors)
        self._pages, self._snapshots = make_copiers(config, parts, host_pages)
        self.stored_pages = self._pages.stored(self.limits.disk_pages)
        self.stored_snapshots = self._snapshots.stored(self.limits.disk_snapshots)
        self._group = group
        self._remarked = set[Reach]()
        self.memory = parts.memory
        self.summary: tuple[str, ...] = (f"operations: {built.backend}", phases.line())
        if parts.states:
            each = state_bytes(parts.model, config.dtype)
            counts = {"rows": self.limits.max_rows, "snapshots": self.limits.num_snapshots}
            self.summary += (_STATES.format(**counts, size=each / (1 << 20)),)

    @torch.inference_mode()
    def launch(self, plan: StepPlan, meanwhile: Callable[[], None] | None = None) -> StepTicket:
        self._states.save(plan.saves)
        for scaled in plan.scaled_slots:
            self._table.scale(scaled.adapter_slot, scaled.source_slot, scaled.scale)
        self._rows.free(plan.freed_rows)
        self._rows.start(plan.new_rows)
        self._parameters.start(plan.new_rows)
        self._states.restore(plan.restores)
        with_drafts = plan.slices if any(piece.draft for piece in plan.slices) else ()
        if with_drafts:
            plan = spread(plan)
        ticket = self._launch(plan, meanwhile)
        self._states.save(saves_at_ends(plan.slices))
        ticket.with_drafts = with_drafts
        return ticket

    def _launch(self, plan: StepPlan, meanwhile: Callable[[], None] | None) -> StepTicket:
        """Launch a plan without drafts, whose rows have begun."""
        if not plan.slices:
            self._rows.grant(plan.grants)
            return StepTicket([], [], None, (), (), None)
        of_pictures = self._rows.reads_pictures(plan.slices)
        batch = None
        if self._graphs is not None and not of_pictures:
            batch = DecodeBatch.of(plan, len(self.limits.page_windows))
        if batch is not None and self._graphs.takes(batch):
            self._rows.grant(batch.grants)
            return self._replay(batch, plan.slices)
        self._rows.grant(plan.grants)
        self._rows.write_inputs(plan.slices)
        captured = not of_pictures and (
            self._token_graphs is not None and self._token_graphs.takes(plan)
        )
        tokens = plan.num_tokens
        size = tokens if captured else padded_size(self._row_sizes, tokens)
        step = Step.build(plan, self._rows, size)
        return self._compute(step, captured, meanwhile)

    def mask_memory(self, count: int, words: int) -> np.ndarray:
        return self._masks.take(count, words)

    @torch.inference_mode()
    def constrain(self, ticket: StepTicket, masks: Masks) -> None:
        """Draw the tokens of a step that waited for masks. Where a mask allows nothing but ids that
        `min_tokens` suppresses, one of them is drawn. Raises ValueError when no draw of the step
        waits, or a mask is for another slice.
        """
        held = ticket.held
        if held is None:
            raise ValueError("no draw of the step waits for masks")
        if ticket.with_drafts:
            masks = masks._replace(slices=spread_places(ticket.with_drafts, masks.slices))
        slices = np.where(held.waiting, np.array(ticket.order)[held.places], -1)
        rows = replace(held.rows, masks=self._masks.upload(masks, slices.tolist()))
        drawn = self._draw(rows, held.places, held.chosen, held.token_ids)
        ticket.token_ids = to_host(drawn.token_ids)
        ticket.logprobs += drawn.logprobs
        ticket.done, ticket.held = self._mark(), None

    def collect(self, ticket: StepTicket) -> list[SliceResult]:
        return ticket.results()

    def wait_idle(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        if self._pictures is not None:
            self._pictures.forget()

    def start_copy(self, copy: AdapterCopy) -> None:
        self._copies.start(copy.of_shard(self._group.shard.index))

    def copy_pages(self, copies: PageCopies) -> None:
        (self._snapshots if copies.of_states else self._pages).start(copies)

    def poll_copies(self) -> list[CopyNews]:
        with torch.inference_mode():
            news = self._copies.poll()
        self._remark([item.adapter_slot for item in news if isinstance(item, CopyUsable)])
        return [*news, *self._pages.poll(), *self._snapshots.poll()]

    def _remark(self, slots: Sequence[int]) -> None:
        """Mark the first adapter of each kind that no graph has. slots: that are usable now."""
        if self._graphs is None:
            return
        for slot in slots:
            reach = self._table.reach(np.array([slot]))
            if reach not in self._graphs.reaches | self._remarked:
                self._remarked.add(reach)
                log.warning(_OUTSIDE_GRAPHS, *_OF_REACH[reach])

    @torch.inference_mode()
    def use_copy(self) -> None:
        """Let steps use the oldest copy, as `GroupMember` says."""
        self._copies.use_oldest()

    @torch.inference_mode()
    def copies_over(self) -> list[CopyOver | PagesCopied]:
        """Return the copies that have ended, as `GroupMember` says."""
        return [*self._copies.over(), *self._pages.poll(), *self._snapshots.poll()]

    def sums_offered(self) -> list[CopySums]:
        """Return numbers that wait to be summed over processes, as `GroupMember` says."""
        return self._copies.sums_offered()

    @torch.inference_mode()
    def add_sums(self, sums: CopySums) -> None:
        """Take numbers summed over processes, as `GroupMember` says."""
        self._copies.add_sums(sums)

    @torch.inference_mode()
    def start_picture(self, copy: PictureCopy) -> None:
        self._of_pictures.start(copy, self._host_memory)

    def poll_pictures(self) -> list[PictureIn]:
        return [] if self._pictures is None else self._pictures.poll()

    @torch.inference_mode()
    def encode(self, pictures: int) -> EncodeTicket:
        return self._of_pictures.encode(pictures)

    @property
    def _of_pictures(self) -> PictureStore:
        if self._pictures is None:
            raise ValueError("the model reads no pictures")
        return self._pictures

    def close(self) -> None:
        if self._pictures is not None:
            self._pictures.close()
        self._host_memory = memoryview(b"")
        self._copies.close()
        self._pages.close()
        self._snapshots.close()
        self._graphs = self._token_graphs = None
        self._group.close()

    def _replay(self, batch: DecodeBatch, slices: Sequence[SeqSlice]) -> StepTicket:
        """A step of decodes alone: greedy rows are done in the graph, the others after it, in one
        draw once all masks are there. What the graph has chosen for these is written over."""
        step = self._graphs.launch(batch)
        columns = batch.columns.astype(np.int64)
        places = np.flatnonzero(columns[APPEND] >= 0)
        seq_rows, lengths = columns[ROW, places], columns[POSITION, places] + 1
        special = ~self._parameters.is_plain(self._rows, seq_rows, lengths)
        token_ids = step.token_ids
        self._write_again(slices, places, special)
        if len(places) < len(batch):
            token_ids = token_ids[to_device(places, self.device)]
        asked = routed_places(slices)
        routed = self._routed(asked, np.ones(len(asked), np.int64), np.array(asked, np.int64))
        rows, waiting = ToDraw(step.logits, places, seq_rows, lengths), _waiting(slices)
        if waiting is None:
            drawn, held = self._draw(rows, places, special, token_ids), None
        else:
            own = waiting[places]
            drawn, held = None, Held(rows, places, own, special | own, token_ids)
        return self._ticket(list(range(len(batch))), places, drawn, (), held, routed=routed)

    def _routed(
        self,
        places: Sequence[int],
        counts: np.ndarray,
        tokens: np.ndarray,
        ends: np.ndarray | None = None,
    ) -> HostRouted | None:
        """Read the experts of slices, after what computes their tokens. The parameters are those of
        `ChosenExperts.of`; ends: None = as tokens."""
        if not len(places) or self._chosen_experts is None:
            return None
        ends = tokens if ends is None else ends
        return self._chosen_experts.of((places, counts), tokens, ends, self._wanted_from)

    def _routed_of(
        self, step: Step, layout: StepLayout, wanted: np.ndarray, *, captured: bool
    ) -> HostRouted | None:
        """Read the experts of the step's slices that ask for them. wanted: tokens whose results are
        computed, which are all that the last layers compute."""
        asked = step.routed
        if not asked:
            return None
        tokens = step.tokens_of(asked)
        ends = tokens if self._one_by_one is not None else np.searchsorted(wanted, tokens)
        if captured:
            tokens = (tokens - self._token_graphs.shift(layout)) % len(step.token_slots)
        return self._routed(asked, step.num_new[asked], tokens, ends)

    def _write_again(
        self, slices: Sequence[SeqSlice], places: np.ndarray, special: np.ndarray
    ) -> None:
        """The inputs of special rows that came with their slices: the graph has written its own
        choices over drafts, and draws count the tokens before them."""
        chosen = (slices[place] for place in places[special].tolist())
        self._rows.write_inputs(piece for piece in chosen if piece.token_ids)

    def _compute(
        self, step: Step, captured: bool, meanwhile: Callable[[], None] | None
    ) -> StepTicket:
        """Launch a step up to its draws. captured: a graph computes it; else it is padded."""
        ops, sizes = self._decoder.ops, self._row_sizes
        token_ids = self._rows.tokens[step.layout.token_rows, step.layout.positions].long()
        scored = _scored(step, self._rows)
        pooled = pooled_slices(step, self._rows.prompt_len)
        wanted = _wanted(step, scored, pooled)
        layout = self._of_pairs(step)
        if self._is_invariant:
            layout = layout.as_prompts()
        forward = (
            self._token_graphs.forward if captured else partial(self._forward, meanwhile, step)
        )
        normed = forward(token_ids, layout, step.token_slots, padded(wanted, sizes))
        routed = self._routed_of(step, layout, wanted, captured=captured)

        def hidden_of(tokens: np.ndarray) -> torch.Tensor:
            """Return hidden states of the tokens, and what pads them."""
            if len(tokens) == len(wanted):
                return normed
            places = padded(np.searchsorted(wanted, tokens), sizes)
            return normed[to_device(places, self.device)]

        def logits_of(tokens: np.ndarray) -> torch.Tensor:
            rows, slots = hidden_of(tokens), step.token_slots[padded(tokens, sizes)]
            width = self.limits.most_ids if self._table.is_wide(slots).any() else None
            if self._one_by_one is not None:
                return self._one_by_one.logits(rows, slots, width)
            lora = ops.lora(slots) if self._table.changes_model(slots) else None
            return self._decoder.logits(rows, lora, width=width)[: len(tokens)]

        prompts = tuple(self._sampler.score(piece, logits_of) for piece in scored)
        vectors = self._pooler.pool(
            pooled, lambda tokens: hidden_of(tokens)[: len(tokens)], logits_of
        )
        places = step.samples
        if not places.size:
            return self._ticket(step.order.tolist(), places, None, prompts, None, vectors, routed)
        lengths = step.starts[places] + step.num_new[places]
        logits = logits_of(step.ends[places])
        wide = self._table.is_wide(step.token_slots[step.ends[places]])
        rows = ToDraw(logits, np.arange(len(places)), step.seq_rows[places], lengths)
        rows = replace(rows, wide=wide) if wide.any() else rows
        waiting = _waiting(step.slices)
        if waiting is None:
            drawn, held = self._sampler.draw(rows, places), None
        else:
            token_ids = torch.empty(len(places), dtype=torch.int32, device=self.device)
            chosen = np.ones(len(places), dtype=bool)
            drawn, held = None, Held(rows, places, waiting[places], chosen, token_ids)
        return self._ticket(step.order.tolist(), places, drawn, prompts, held, vectors, routed)

    def _of_pairs(self, step: Step) -> StepLayout:
        """The layout, in which positions of second texts lie behind those of first ones, as in
        `EmbeddingWeights.positions`."""
        types = self._decoder.spec.embedding.num_types
        seconds = step.second_texts if types > 1 else []
        table = self._decoder.weights.embedding.positions
        if not seconds or table is None:
            return step.layout
        behind = np.zeros(len(step.token_slots), dtype=np.int64)
        for begin, end in seconds:
            behind[begin:end] = len(table) // types
        positions = step.layout.positions + to_device(behind, self.device)
        return replace(step.layout, positions=positions)

    def _forward(
        self,
        meanwhile: Callable[[], None] | None,
        step: Step,
        token_ids: torch.Tensor,
        layout: StepLayout,
        token_slots: np.ndarray,
        wanted: np.ndarray,
    ) -> torch.Tensor:
        """Compute the hidden states of any step, as `TokenGraphs.forward` does of some."""
        if self._one_by_one is not None:
            of_step = (token_ids, layout, token_slots, wanted)
            return self._one_by_one.forward(*of_step, meanwhile)
        ops = self._decoder.ops
        of_wanted = Wanted(
            to_device(wanted, self.device),
            ops.lora(token_slots[wanted]),
            lambda: ops.plan(layout.of(wanted)),
        )
        plan, lora = ops.plan(layout), ops.lora(token_slots)
        pictured = self._pictured(step)
        return self._decoder.forward(token_ids, plan, lora, of_wanted, meanwhile, pictured)

    def _pictured(self, step: Step) -> Pictured | None:
        """Results of pictures in place of the step's placeholders; None where it has none."""
        if step.results is None or self._pictures is None:
            return None
        places, rows = to_device(np.stack(step.results), self.device)
        return Pictured(places, self._pictures.results.index_select(0, rows))

    def _draw(
        self, rows: ToDraw, places: np.ndarray, chosen: np.ndarray, token_ids: torch.Tensor
    ) -> Drawn:
        """Draw for the chosen rows, bool `[n]`. Other rows keep their `token_ids`, int `[n]` on the
        device.

        places: of all rows in the step.
        """
        if not chosen.any():
            return Drawn(token_ids, ())
        if chosen.all():
            return self._sampler.draw(rows, places)
        drawn = self._sampler.draw(rows.pick(chosen), places[chosen])
        at = to_device(np.flatnonzero(chosen), self.device)
        token_ids.index_copy_(0, at, drawn.token_ids.to(token_ids.dtype))
        return Drawn(token_ids, drawn.logprobs)

    def _ticket(
        self,
        order: list[int],
        samples: np.ndarray,
        drawn: Drawn | None,
        prompts: tuple[PromptLogprobs, ...],
        held: Held | None,
        vectors: tuple[HostVectors, ...] = (),
        routed: HostRouted | None = None,
    ) -> StepTicket:
        token_ids = None if drawn is None else to_host(drawn.token_ids)
        found = () if drawn is None else drawn.logprobs
        done = self._mark() if held is None else None
        results = (token_ids, found, prompts, done, held, vectors, routed)
        return StepTicket(order, samples.tolist(), *results)

    def _mark(self) -> torch.cuda.Event | None:
        """An event that is done when all that was launched so far is done."""
        if self.device.type != "cuda":
            return None
        done = torch.cuda.Event()
        done.record()
        return done


def _waiting(slices: Sequence[SeqSlice]) -> np.ndarray | None:
    """Mark draws that wait for masks, bool `[slices]`; None = none does."""
    if not any(piece.constrained for piece in slices):
        return None
    return np.array([piece.constrained for piece in slices])


def _scored(step: Step, rows: Rows) -> list[ScoredSlice]:
    found = []
    for place, piece in enumerate(step.slices):
        last = int(rows.prompt_len[piece.seq_row]) - 1
        predicted = min(piece.num_new, last - piece.start)
        if piece.prompt_logprobs and predicted > 0:
            begin = int(step.ends[place]) - piece.num_new + 1
            found.append(ScoredSlice(place, piece.seq_row, piece.start, begin, predicted))
    return found


def _wanted(step: Step, scored: Sequence[ScoredSlice], pooled: Sequence[PooledSlice]) -> np.ndarray:
    """The tokens whose result is needed, int64 `[n]`, ascending: those that give a sample, those
    that predict a token of a scored prompt, those of a vector, and those whose experts are asked
    for."""
    predicting = [np.arange(s.begin, s.begin + s.predicted) for s in scored]
    numbers = [s.tokens for s in pooled]
    if step.routed:
        numbers.append(step.tokens_of(step.routed))
    return np.unique(np.concatenate([step.ends[step.samples], *predicting, *numbers]))
