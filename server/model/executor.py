"""TorchExecutor: carries out step plans with one decoder on one device."""

import os
from pathlib import Path

import numpy as np
import torch

from server.config import EngineConfig
from server.engine.executor import AdapterCopy, CopyDone
from server.engine.plan import SliceResult, StepPlan
from server.model.adapter_copies import AdapterCopies
from server.model.checkpoint import read_config
from server.model.decoder import Decoder
from server.model.lora import DTYPES, AdapterTable, LoraBatch, SiteIndex
from server.model.memory import executor_limits
from server.model.ops import KVCache
from server.model.ops_torch import TorchOps, TorchPlan
from server.model.results import HostLogprobs, PromptLogprobs, StepTicket
from server.model.row_sampling import RowSampling
from server.model.rows import Rows
from server.model.sampling import Logprobs, Sampled, logprobs, sample
from server.model.step import Step
from server.model.weights import load_weights

# Logits of a long prompt are computed in pieces: they are the largest tensors of all.
_PROMPT_LOGITS_ROWS = 64


class TorchExecutor:
    """Implements `server.engine.executor.Executor`.

    On the CPU a step is computed in `launch`; on a GPU `launch` enqueues it.
    Raises CheckpointError or ValueError when the model or the memory options cannot be served.
    """

    def __init__(self, config: EngineConfig, host_arena: memoryview) -> None:
        folder = Path(config.model_path)
        model = read_config(folder)
        self.limits = executor_limits(model, config)
        self.device = torch.device(config.device)
        dtype = DTYPES[config.dtype]
        if self.device.type == "cpu":
            _leave_a_core()
        with torch.inference_mode():
            weights = load_weights(folder, model, dtype, self.device)
            shape = (self.limits.num_pages, config.page_size, model.num_kv_heads, model.head_dim)
            cache = KVCache(*(self._zeros(model.num_layers, *shape, dtype=dtype) for _ in "kv"))
            sites = SiteIndex(model)
            self._table = AdapterTable(
                sites,
                slots=max(config.adapter_slots, 1),
                extents=self.limits.arena_extents,
                extent_bytes=config.extent_bytes,
                dtype=dtype,
                device=self.device,
            )
            self._rows = Rows(
                self.limits.max_rows, self.limits.max_context, config.page_size, self.device
            )
        self._sampling = RowSampling(
            self.limits.max_rows, model.vocab_size, model.eos_token_ids, self.device
        )
        ops = TorchOps(cache, model.windows)
        self._decoder: Decoder[TorchPlan] = Decoder(model, weights, sites, ops)
        self._copies = AdapterCopies(self._table, host_arena)

    def _zeros(self, *shape: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.zeros(shape, dtype=dtype, device=self.device)

    @torch.inference_mode()
    def launch(self, plan: StepPlan) -> StepTicket:
        rows = self._rows
        rows.start(plan.new_rows)
        self._sampling.start(plan.new_rows)
        rows.grant(plan.grants)
        if not plan.slices:
            return StepTicket([], [], None, None, (), None)
        rows.write_inputs(plan.slices)
        step = Step.build(plan, rows)
        lora = self._table.batch(step.token_slots)
        token_ids = rows.tokens[step.layout.token_rows, step.layout.positions].long()
        hidden = self._decoder.forward(token_ids, step.layout, lora)
        prompts = self._prompt_logprobs(step, hidden)
        sampled, found = self._sample(step, hidden)
        done = None
        if self.device.type == "cuda":
            done = torch.cuda.Event()
            done.record()
        return StepTicket(step.order.tolist(), step.samples.tolist(), sampled, found, prompts, done)

    def collect(self, ticket: StepTicket) -> list[SliceResult]:
        return ticket.results()

    def start_copy(self, copy: AdapterCopy) -> None:
        self._copies.start(copy)

    def finished_copies(self) -> list[CopyDone]:
        with torch.inference_mode():
            return self._copies.finished()

    def close(self) -> None:
        self._copies.close()

    def _logits(self, step: Step, hidden: torch.Tensor, tokens: np.ndarray) -> torch.Tensor:
        """float32 `[n, vocab]` of some tokens of the batch; tokens: int64 `[n]`, ascending."""
        lora: LoraBatch | None = self._table.batch(step.token_slots[tokens])
        return self._decoder.logits(hidden[self._tensor(tokens)], lora)

    def _sample(
        self, step: Step, hidden: torch.Tensor
    ) -> tuple[Sampled | None, HostLogprobs | None]:
        places = step.samples
        if not places.size:
            return None, None
        seq_rows = step.seq_rows[places]
        lengths = step.starts[places] + step.num_new[places]
        logits = self._logits(step, hidden, step.ends[places])
        counts = self._sampling.logprobs[seq_rows]
        wanted = np.flatnonzero(counts >= 0)
        raw = logits[self._tensor(wanted)] if wanted.size else None
        sampled = sample(logits, self._sampling.batch(self._rows, seq_rows, lengths))
        self._rows.append(self._tensor(seq_rows), self._tensor(lengths), sampled.token_ids)
        found = None
        if raw is not None:
            chosen = sampled.token_ids[self._tensor(wanted)]
            values = logprobs(raw, chosen, int(counts[wanted].max()))
            found = HostLogprobs(
                places[wanted].tolist(), counts[wanted].tolist(), self._logprobs_to_host(values)
            )
        on_host = Sampled(self._to_host(sampled.token_ids), self._to_host(sampled.failed))
        return on_host, found

    def _prompt_logprobs(self, step: Step, hidden: torch.Tensor) -> tuple[PromptLogprobs, ...]:
        found = []
        for place, piece in enumerate(step.slices):
            last = int(self._rows.prompt_len[piece.seq_row]) - 1
            predicted = min(piece.num_new, last - piece.start)
            if piece.prompt_logprobs and predicted > 0:
                found.append(self._slice_logprobs(step, hidden, place, predicted))
        return tuple(found)

    def _slice_logprobs(
        self, step: Step, hidden: torch.Tensor, place: int, predicted: int
    ) -> PromptLogprobs:
        row, start = int(step.seq_rows[place]), int(step.starts[place])
        count = max(int(self._sampling.prompt_logprobs[row]), 0)
        begin = int(step.ends[place] - step.num_new[place] + 1)
        targets = self._rows.tokens[row, start + 1 : start + 1 + predicted].long()
        parts = []
        for offset in range(0, predicted, _PROMPT_LOGITS_ROWS):
            end = min(offset + _PROMPT_LOGITS_ROWS, predicted)
            logits = self._logits(step, hidden, np.arange(begin + offset, begin + end))
            values = logprobs(logits, targets[offset:end], count)
            parts.append(self._logprobs_to_host(values))
        return PromptLogprobs(place, self._to_host(targets), tuple(parts))

    def _logprobs_to_host(self, values: Logprobs) -> Logprobs:
        return Logprobs(*(self._to_host(t) for t in (values.chosen, values.top_ids, values.top)))

    def _to_host(self, tensor: torch.Tensor) -> torch.Tensor:
        if not tensor.is_cuda:
            return tensor
        pinned = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        return pinned.copy_(tensor, non_blocking=True)

    def _tensor(self, values: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(values).to(self.device, non_blocking=True)


def _leave_a_core() -> None:
    """The engine shares the machine with the router and the shell; never more threads than set."""
    cores = len(os.sched_getaffinity(0))
    torch.set_num_threads(max(1, min(torch.get_num_threads(), cores - 1)))
