"""Drives a TorchExecutor by hand: pages, rows, chunks and slots as a test asks for them."""

import time
from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any, Protocol

import msgspec
import numpy as np
import torch

from loraplex.adapters.manifest import SlabLayout
from loraplex.adapters.slab.memory import SlabMemory
from loraplex.server.config import EngineConfig
from loraplex.server.constraints.rules import step_words
from loraplex.server.engine.executor import AdapterCopy, CopyNews, CopyOver, Masks
from loraplex.server.engine.memory.pages import GroupPages
from loraplex.server.engine.plan import PageGrant, RowStart, SeqSlice, SliceResult, StepPlan
from loraplex.server.model.executor import TorchExecutor
from loraplex.server.model.start import WeightsLoader
from loraplex.server.protocol import SamplingParams, TokenLogprob, VectorParams

EXTENT = 4096
Allowed = Callable[[list[int]], Sequence[int]]
COPY_TIMEOUT_S = 240.0
EVERY_LOGPROB = 1 << 30


def by_token(found: TokenLogprob, vocab: int) -> torch.Tensor:
    """Log-probabilities in the order of ids, float32 `[vocab]`; NaN for those that are missing."""
    row = torch.full((vocab,), float("nan"))
    row[[token for token, _ in found.top]] = torch.tensor([value for _, value in found.top])
    return row


def engine_config(folder: Path, **changes: Any) -> EngineConfig:
    config = EngineConfig(
        model_path=str(folder),
        device="cpu",
        dtype="float32",
        page_size=4,
        kv_memory=4 << 20,
        adapter_memory=8 << 20,
        host_arena_bytes=8 << 20,
        extent_bytes=EXTENT,
        max_context=None,
        max_running=48,
        max_waiting=16,
        max_step_tokens=512,
        adapter_slots=16,
    )
    return msgspec.structs.replace(config, **changes)


class Packed(Protocol):
    """An adapter's slab."""

    @property
    def layout(self) -> SlabLayout: ...

    @property
    def slab(self) -> bytes: ...


class Driver:
    """One executor with a host arena; hands out pages and extents upwards, or as it is told."""

    def __init__(
        self, folder: Path, *, weights: WeightsLoader | None = None, **changes: Any
    ) -> None:
        """weights: as of TorchExecutor. changes: of `engine_config`."""
        self.config = engine_config(folder, **changes)
        self.arena = bytearray(self.config.host_arena_bytes)
        self.executor = self.make_executor(weights)
        self.free_pages = list(range(self.executor.limits.num_pages))
        self.step = 0
        self._begun: dict[str, tuple[bytes, AdapterCopy]] = {}
        self.finished: dict[bytes, tuple[SlabLayout, bytes]] = {}  # by what came unfinished

    def make_executor(self, weights: WeightsLoader | None) -> TorchExecutor:
        return TorchExecutor(self.config, memoryview(self.arena), weights=weights)

    def devices(self) -> list[TorchExecutor]:
        return [self.executor]

    def close(self) -> None:
        self.executor.close()

    def give_back(self, pages: list[int]) -> None:
        """They are the next that are taken, and hold NaN until somebody writes there."""
        for device in self.devices():
            ops: Any = device._decoder.ops
            cache = getattr(ops, "_ops", ops).cache
            with torch.inference_mode():
                if cache.pool.is_floating_point():
                    cache.pool[pages] = float("nan")
                else:
                    cache.pool[pages] = 127
                    for each in chain(*cache._token_scales.values()):
                        each[pages] = float("nan")
        self.free_pages += pages

    def load(self, slot: int, layout: SlabLayout, slab: bytes, first: int) -> CopyOver:
        self.begin_load(slot, layout, slab, first)
        return self.wait_for_copy()

    def load_all(
        self, adapters: Mapping[str, Packed], shift: int, first: int
    ) -> dict[str | None, int]:
        """The slot of each, and of the base; first: extent of the first."""
        slots: dict[str | None, int] = {None: -1}
        for number, (name, adapter) in enumerate(adapters.items()):
            slot = (number + shift) % len(adapters)
            assert self.load(slot, adapter.layout, adapter.slab, first).error is None
            slots[name], first = slot, first + sum(adapter.layout.runs)
        return slots

    def begin_load(self, slot: int, layout: SlabLayout, slab: bytes, first: int) -> None:
        """Copy a slab into the slot. Its runs lie in reverse order from device extent `first` on,
        and with a gap between each two in the host arena. What was finished before comes so."""
        came = slab
        if layout.is_to_finish:
            layout, slab = self.finished.get(came, (layout, came))
        size = layout.extent_bytes
        host, device = [], []
        device_next = first + sum(layout.runs)
        for run in layout.runs:
            device_next -= run
            device.append(device_next)
        host_next = read = 0
        for run in layout.all_runs:
            self.arena[host_next * size : (host_next + run) * size] = slab[
                read * size : (read + run) * size
            ]
            host.append(host_next)
            host_next += run + 1
            read += run
        copy = AdapterCopy(slot, layout, tuple(host), tuple(device))
        self._begun[layout.digest] = came, copy
        self.executor.start_copy(copy)

    def wait_for_copy(self) -> CopyOver:
        while True:
            for news in self.wait_for_news():
                if isinstance(news, CopyOver):
                    return news

    def wait_for_news(self) -> list[CopyNews]:
        deadline = time.monotonic() + COPY_TIMEOUT_S
        while time.monotonic() < deadline:
            news = self.executor.poll_copies()
            for item in news:
                if isinstance(item, CopyOver) and item.is_finished:
                    self._keep_finished(item.digest)
            if news:
                return news
            time.sleep(0.001)
        raise TimeoutError("the copy did not end")

    def _keep_finished(self, digest: str) -> None:
        came, copy = self._begun[digest]
        memory = SlabMemory(copy.layout, memoryview(self.arena), copy.host_extents)
        layout = msgspec.structs.replace(copy.layout, is_finished=True)
        self.finished[came] = layout, b"".join(run for _, run in memory.runs())

    def run(
        self, plan: StepPlan, masks: Sequence[Sequence[int] | None] | None = None
    ) -> list[SliceResult]:
        """masks: ids of each draw of the slices, None = any: a slice draws once, and once more for
        each token of its draft."""
        ticket = self.executor.launch(plan)
        if any(piece.constrained for piece in plan.slices):
            of = [i for i, piece in enumerate(plan.slices) for _ in range(1 + len(piece.draft))]
            draws, bits = self.masks(masks or [])
            self.executor.constrain(ticket, Masks([of[i] for i in draws], bits))
        return self.executor.collect(ticket)

    def masks(self, allowed: Sequence[Sequence[int] | None]) -> Masks:
        """allowed: of each slice of a plan without drafts."""
        slices = [i for i, ids in enumerate(allowed) if ids is not None]
        sizes = (max(ids, default=0) + 1 for ids in allowed if ids is not None)
        words = step_words(self.executor.limits.vocab_size, sizes)
        bits = self.executor.mask_memory(len(slices), words)
        bits[:] = 0
        for row, i in zip(bits.view(np.uint32), slices, strict=True):
            for token in allowed[i] or ():
                row[token // 32] |= np.uint32(1 << token % 32)
        return Masks(slices, bits)


class Stream:
    """One sequence on a row of a driver: prompt in chunks, then decodes.

    allowed: tokens so far -> the ids that may come next; None = any; no ids = a draft ends. draft:
    tokens so far -> the draft of the next decode.
    """

    def __init__(
        self,
        driver: Driver,
        row: int,
        prompt: Sequence[int],
        *,
        slot: int = -1,
        seed: int = 0,
        accepted: Sequence[int] = (),
        sampling: SamplingParams | None = None,
        suppressed_until: int = 0,
    ) -> None:
        self.wish: VectorParams | None = None
        self.vector: np.ndarray | None = None
        self.driver = driver
        self.row = row
        self.slot = slot
        self.prompt_len = len(prompt)
        self.tokens = [*prompt, *accepted]
        self.computed = self.in_state = 0  # the row's state has no token of a draft
        self.pages = [GroupPages() for _ in driver.executor.limits.page_windows]
        self.sampling = sampling or SamplingParams(temperature=0.0, logprobs=EVERY_LOGPROB)
        self.logprobs: list[TokenLogprob] = []
        self.prompt_logprobs: list[TokenLogprob] = []
        self.failed = False
        self.allowed: Allowed | None = None
        self.draft: Callable[[list[int]], list[int]] = lambda tokens: []
        self._seed, self._suppressed_until = seed, suppressed_until
        self._vocab_size: int | None = None
        self._started = False

    @property
    def output(self) -> list[int]:
        return self.tokens[self.prompt_len :]

    def bound(self, allowed: Allowed | None) -> "Stream":
        self.allowed = allowed
        return self

    def with_ids(self, vocab_size: int | None) -> "Stream":
        """vocab_size: as of RowStart."""
        self._vocab_size = vocab_size
        return self

    def read_for(self, wish: VectorParams) -> "Stream":
        """The prompt is read for a vector, and nothing follows."""
        self.wish = wish
        return self

    def start(self) -> list[RowStart]:
        if self._started:
            return []
        self._started = True
        return [
            RowStart(
                self.row,
                list(self.tokens),
                self.prompt_len,
                self.sampling,
                self._seed,
                0,
                self._suppressed_until,
                self._vocab_size,
            )
        ]

    def grant(self, count: int) -> list[PageGrant]:
        grants = []
        end = self.computed + count + len(self._draft())
        for number, group in enumerate(self.pages):
            needed = -(-end // self.driver.config.page_size) - group.end
            if needed > 0:
                pages = [self.driver.free_pages.pop() for _ in range(needed)]
                grants.append(PageGrant(self.row, group.end, pages, number))
                group.pages += pages
        return grants

    def leave_behind(self) -> None:
        """The pages that no further token sees; others find them full of NaN."""
        windows = self.driver.executor.limits.page_windows
        for window, group in zip(windows, self.pages, strict=True):
            seen = 0 if window is None else max(0, self.computed - window + 1)
            count = max(0, seen // self.driver.config.page_size - group.first)
            self.driver.give_back(group.pages[:count])
            del group.pages[:count]
            group.first += count

    def slice(self, count: int, *, inline: bool = False) -> SeqSlice:
        last = self.computed + count == len(self.tokens)
        inputs = self.tokens[self.computed : self.computed + count]
        prefill = self.computed < self.prompt_len
        known = inline or count > 1 or prefill
        draft = [] if known else self._draft()
        wish = self.wish if self.wish and (last or self.wish.pooling in ("mean", "all")) else None
        return SeqSlice(
            kind="prompt" if known else "decode",
            seq_row=self.row,
            start=self.computed,
            num_new=count + len(draft),
            token_ids=inputs if known else draft,
            adapter_slot=self.slot,
            sample=last and self.wish is None,
            prompt_logprobs=self.sampling.prompt_logprobs is not None and prefill,
            constrained=last and self.allowed is not None,
            vector=wish,
            replays=self.computed - self.in_state,
        )

    def _draft(self) -> list[int]:
        return [] if self.computed < self.prompt_len else self.draft(self.tokens)

    def take(self, count: int, result: SliceResult) -> None:
        self.in_state = self.computed + count
        self.computed += count + max(0, len(result.token_ids) - 1)
        self.leave_behind()
        self.failed |= result.failed
        self.tokens += result.token_ids
        self.logprobs += result.logprobs
        self.prompt_logprobs += result.prompt_logprobs or []
        if result.vector is not None:
            self.vector = np.frombuffer(result.vector, "<f4")

    def free(self) -> None:
        for group in self.pages:
            self.driver.give_back(group.pages)
            group.first, group.pages = 0, []


def step(driver: Driver, work: Sequence[tuple[Stream, int]]) -> None:
    """One step: each stream computes that many tokens (at most what it has left)."""
    jobs = [(s, min(count, len(s.tokens) - s.computed)) for s, count in work]
    jobs = [(s, count) for s, count in jobs if count > 0]
    plan = StepPlan(
        step=driver.step,
        new_rows=[start for s, _ in jobs for start in s.start()],
        grants=[grant for s, count in jobs for grant in s.grant(count)],
        slices=[s.slice(count) for s, count in jobs],
        freed_rows=[],
    )
    driver.step += 1
    masks = [
        s.allowed(s.tokens + piece.draft[:i])
        if s.allowed is not None and piece.constrained
        else None
        for (s, _), piece in zip(jobs, plan.slices, strict=True)
        for i in range(1 + len(piece.draft))
    ]
    for (stream, count), result in zip(jobs, driver.run(plan, masks), strict=True):
        stream.take(count, result)


def generate(driver: Driver, streams: Sequence[Stream], tokens: int, chunk: int) -> None:
    """Until every stream has `tokens` of output; prompts go in by chunks of up to `chunk`."""

    def goes_on(stream: Stream) -> bool:
        if stream.wish is not None:
            return stream.vector is None and not stream.failed
        return len(stream.output) < tokens and not stream.failed

    while any(map(goes_on, streams)):
        step(driver, [(s, chunk) for s in streams if goes_on(s)])
