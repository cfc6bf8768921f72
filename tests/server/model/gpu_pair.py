"""The same model and adapters by the reference and by the GPU path, which runs on the CPU.

Triton interprets, FlashInfer is a stand-in, and graphs run their step again.
"""

import sys
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig

from loraplex.adapters.manifest import SlabLayout
from loraplex.server.kernels.launch.configs import read_configs
from loraplex.server.model import executor as executor_module
from loraplex.server.model.graphs import gpu_path
from loraplex.server.model.graphs.decode_batch import DecodeBatch
from loraplex.server.model.lora.lora import Reach
from loraplex.server.model.ops.ops import StepLayout
from loraplex.server.model.weights import load_weights
from loraplex.server.protocol import SamplingParams
from tests.server.model import fake_flashinfer
from tests.server.model.driver import EVERY_LOGPROB, Allowed, Driver, Stream, generate
from tests.server.model.hub_models import VOCAB, add_adapter, save_model
from tests.server.model.sharding.lockstep import ShardedDriver, ThreadGroup, sum_norm_of_threads
from tests.server.model.slabs import pack

# Of each answer: by the prompt's step, by the first decode, and by one behind a decode.
TOKENS = 3
# Of the smallest graph of steps with prompts: the interpreter pays for each row of padding.
_LEAST_TOKENS = 16
# Builds drivers that tests make while a Pair is there, among them the reference of another Pair.
_BUILD_REFERENCE = gpu_path.build


class Pair:
    """graphs: the batch of every step that a graph took; of steps with prompts, less the number of
    their tokens."""

    def __init__(
        self,
        model: Any,
        adapters: Mapping[str, LoraConfig],
        folder: Path,
        patch: pytest.MonkeyPatch,
        few_tokens: int = 0,
        mixed_tokens: int = 0,
        most_tokens: int = 0,
        backend: str = "fa2",
        **changes: Any,
    ) -> None:
        """folder: where the model is saved, unless it has been; adapters: in slots 0, 1, …;
        few_tokens, mixed_tokens: what LoRA takes for few, and for so many that their prompts and
        decodes are mixed; most_tokens: of steps with prompts that graphs take; 0 = as ever;
        backend: of prompts' attention, "fa3" with an H100's launch parameters, "none" as if
        FlashInfer had no head size; changes: of `engine_config`, whose shards are those of the
        GPU path alone."""
        if not (folder / "config.json").exists():
            save_model(model, folder)
        for seed, (name, config) in enumerate(adapters.items()):
            model = add_adapter(model, name, config, seed + 1)
        slabs = [pack(model, name) for name in adapters]
        self.reference = Driver(folder, **{**changes, "shards": 1})
        fake_flashinfer.install(patch)
        from loraplex.server.kernels.sampling import draw, greedy
        from loraplex.server.model.graphs import fast_path
        from loraplex.server.model.ops.attention import attention_cuda, prompt_attention
        from loraplex.server.model.ops.cuda import lora_strategy, ops_cuda

        heads = range(0 if backend == "none" else 257)
        for module in (draw, greedy):  # shared out as on a GPU, but not among as many
            patch.setattr(module, "SPLITS", 2)
        patch.setattr(attention_cuda, "prompt_backend", lambda capability: backend)
        patch.setattr(prompt_attention, "_FLASHINFER_HEADS", heads)
        if backend == "fa3":
            configs = read_configs("sm90", 2, programmatic_launch=False)
            patch.setattr(ops_cuda, "load_configs", lambda *_, **form: configs)
        patch.setattr(ops_cuda, "sum_norm", sum_norm_of_threads)
        patch.setattr(ThreadGroup, "term_rows", few_tokens)
        for name, tokens in (("FEW_TOKENS", few_tokens), ("MIXED_TOKENS", mixed_tokens)):
            if tokens:
                patch.setattr(lora_strategy, name, tokens)
        if most_tokens:
            every = range(_LEAST_TOKENS, most_tokens + 1, _LEAST_TOKENS)
            patch.setattr(fast_path, "token_sizes", lambda *_: tuple(every))
        self.graphs = replace_graphs(patch)
        self.gpu = _gpu_driver(folder, changes)
        patch.setattr(executor_module, "build", _BUILD_REFERENCE)
        of_gpu = [pack(model, name, shards=self.gpu.config.shards) for name in adapters]
        for driver, packed in ((self.reference, slabs), (self.gpu, of_gpu)):
            load_in_order(driver, packed)

    @property
    def groups(self) -> list[ThreadGroup]:
        """Of the devices that share the model."""
        executor: Any = self.gpu.executor
        return list(executor.groups)

    def close(self) -> None:
        self.reference.close()
        self.gpu.close()


def _gpu_driver(folder: Path, changes: dict[str, Any]) -> Driver:
    if changes.get("shards", 1) > 1:
        return ShardedDriver(folder, **changes)
    return Driver(folder, weights=partial(load_weights, folder, packed=True), **changes)


def load_in_order(driver: Driver, packed: Iterable[tuple[SlabLayout, bytes]]) -> None:
    """Into slots 0, 1, …"""
    first = 0
    for slot, (layout, slab) in enumerate(packed):
        assert driver.load(slot, layout, slab, first).error is None
        first += sum(layout.runs)


@contextmanager
def small_pair(
    model: Any,
    adapters: Mapping[str, LoraConfig],
    folder: Path,
    patch: pytest.MonkeyPatch,
    **changes: Any,
) -> Iterator[Pair]:
    """A Pair whose steps of every kind are small. changes: of Pair."""
    sizes = {"few_tokens": 8, "mixed_tokens": 12, "most_tokens": 32, "max_running": 4}
    pair = Pair(model, adapters, folder, patch, **{**sizes, **changes})
    try:
        yield pair
    finally:
        pair.close()
        fake_flashinfer.forget()


def ordinary(rows: Iterable[tuple[str, str]], always: Container[tuple[str, str]]) -> list[Any]:
    """The rows as parameters: `always` in an ordinary run, the others with `make test-all`."""
    return [
        pytest.param(row, marks=[] if row in always else pytest.mark.exhaustive, id="-".join(row))
        for row in rows
    ]


class NothingKept:
    """Stands for Triton's cache."""

    def get_file(self, filename: str) -> None:
        return None

    def put(self, *_: object, **__: object) -> None:
        return None


def replace_graphs(patch: pytest.MonkeyPatch) -> list[int]:
    """Build the GPU path; returns `Pair.graphs`."""
    from loraplex.server.model.graphs import (
        fast_path,
        token_graphs,
        warm_up,
    )
    from loraplex.server.model.ops.cuda import lora_linear
    from loraplex.server.model.ops.cuda.kept_choices import KeptChoices

    taken: list[int] = []

    def capture_tokens(
        self: token_graphs.TokenGraphs, reach: Reach, example: Callable[[int], StepLayout]
    ) -> None:
        for size in reversed(self.sizes):
            lora = self._lora(size, reach)
            if self._attention is not None:
                self._attention.fill(size, example(size))
            graphs: Any = [fake_flashinfer.Replay(piece) for piece in self._pieces(size, lora)]
            self._captured[size, reach] = token_graphs._Captured(graphs, lora)
            if self.ends is not None:
                end: Any = fake_flashinfer.Replay(self.ends._step(size, reach))
                self.ends._graphs[size, reach] = end

    forward = token_graphs.TokenGraphs.forward

    def noted_tokens(
        self: token_graphs.TokenGraphs, token_ids: torch.Tensor, *context: Any
    ) -> torch.Tensor:
        taken.append(-len(token_ids))
        return forward(self, token_ids, *context)

    patch.setattr(token_graphs.TokenGraphs, "capture", capture_tokens)
    patch.setattr(token_graphs.TokenGraphs, "forward", noted_tokens)

    def capture(self: token_graphs.DecodeGraphs, reach: Reach) -> None:
        for size in self.sizes:
            step: Any = fake_flashinfer.Replay(self._step(size, reach))
            self._graphs[size, reach] = step

    launch = token_graphs.DecodeGraphs.launch

    def noted(self: token_graphs.DecodeGraphs, batch: DecodeBatch) -> token_graphs.GraphStep:
        taken.append(len(batch))
        return launch(self, batch)

    patch.setattr(token_graphs.DecodeGraphs, "capture", capture)
    patch.setattr(token_graphs.DecodeGraphs, "launch", noted)

    def warned(message: str, **_: object) -> None:
        raise AssertionError(message) from sys.exception()

    patch.setattr(fast_path.log, "warning", warned)
    patch.setattr(warm_up, "warm_sizes", lambda *_: ())
    patch.setattr(warm_up, "warm_decodes", lambda *_: ())
    patch.setattr(token_graphs.DecodeGraphs, "rehearse", lambda *_: None)
    patch.setattr(token_graphs.TokenGraphs, "rehearse", lambda *_: None)
    patch.setattr(lora_linear, "_times", lambda ways, *_: dict.fromkeys(ways, 1.0))
    nothing: Any = NothingKept()
    patch.setattr(KeptChoices, "of", lambda *_: KeptChoices(lambda: nothing))

    patch.setattr(executor_module, "build", fast_path.build_fast)
    return taken


def prompt(length: int, seed: int) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, VOCAB, (length,), generator=generator).tolist()


def answer(
    driver: Driver,
    slots: list[int],
    sampling: SamplingParams | list[SamplingParams],
    chunk: int,
    allowed: Allowed | None = None,
    tokens: int = TOKENS,
) -> list[Stream]:
    """sampling: of all, or of each. allowed: what every other one may draw. tokens: of each."""
    each = sampling if isinstance(sampling, list) else [sampling] * len(slots)
    streams = [
        Stream(driver, row, prompt(2 + 3 * row, row), slot=slot, sampling=params, seed=row)
        for row, (slot, params) in enumerate(zip(slots, each, strict=True))
    ]
    for stream in streams[1::2]:
        stream.bound(allowed)
    generate(driver, streams, tokens, chunk)
    for stream in streams:
        stream.free()
    return streams


def assert_same(pair: Pair, slots: list[int], abs: float = 1e-4, *, in_graphs: bool = True) -> None:
    """The same tokens, and logprobs that differ by no more than `abs`, greedily and with graphs. Of
    four prompts two are whole in their chunk. in_graphs: whether some step must run in one."""
    listed = (9, 5, 7)
    sampling = SamplingParams(
        temperature=0.0,
        logprobs=EVERY_LOGPROB,
        prompt_logprobs=2,
        logprob_token_ids=listed,
    )
    found, expected = (answer(d, slots, sampling, chunk=6) for d in (pair.gpu, pair.reference))
    assert [s.output for s in found] == [s.output for s in expected]
    for ours, theirs in zip(found, expected, strict=True):
        for a, b in zip(ours.logprobs, theirs.logprobs, strict=True):
            assert dict(a.top) == pytest.approx(dict(b.top), abs=abs)
            assert a.listed == tuple(dict(a.top)[i] for i in listed)
    assert pair.graphs or not in_graphs
