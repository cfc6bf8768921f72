"""Requests whose answers are compared bit for bit, alone and among others."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from peft import LoraConfig

from loraplex.server.protocol import SamplingParams, TokenLogprob
from tests.server.model.adapter_zoo import with_zoo
from tests.server.model.driver import EVERY_LOGPROB, Driver, Stream, step
from tests.server.model.families.variants import VARIANTS
from tests.server.model.hub_models import VOCAB, make_model, save_model
from tests.server.model.slabs import pack

# Wide enough that libraries divide sums otherwise for other numbers of rows.
SIZES: dict[str, Any] = {
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 3,
    "head_dim": 64,
}
RANDOM = SamplingParams(temperature=1.0, logprobs=EVERY_LOGPROB, prompt_logprobs=0)
PROCESSED = SamplingParams(
    temperature=0.7, top_p=0.9, logprobs=EVERY_LOGPROB, processed_logprobs=True
)


class Ask(NamedTuple):
    """A request. chunk: of how many tokens at most the slices of its prompt are."""

    length: int
    slot: int = -1
    seed: int = 0
    chunk: int = 512
    sampling: SamplingParams = RANDOM

    def stream(self, driver: Driver, row: int, accepted: Sequence[int] = ()) -> Stream:
        generator = torch.Generator().manual_seed(self.seed)
        ids = torch.randint(3, VOCAB, (self.length,), generator=generator).tolist()
        given: dict[str, Any] = {"slot": self.slot, "seed": self.seed, "sampling": self.sampling}
        return Stream(driver, row, ids, accepted=accepted, **given)


class Bits(NamedTuple):
    """An answer's tokens and log-probabilities. logprobs: of every token of the vocabulary, at each
    token of `output`. prompt: of the prompt's own tokens."""

    output: list[int]
    logprobs: list[dict[int, float]]
    prompt: list[float | None]

    @classmethod
    def of(cls, stream: Stream) -> "Bits":
        def every(of: TokenLogprob) -> dict[int, float]:
            return dict(of.top)

        own = [of.logprob for of in stream.prompt_logprobs]
        return cls(stream.output, [every(of) for of in stream.logprobs], own)


def ask_all(driver: Driver, asks: Sequence[Ask], tokens: int) -> list[Bits]:
    """Answers of requests that begin together, each in slices of its own size."""
    streams = [ask.stream(driver, row) for row, ask in enumerate(asks)]
    while work := [
        (stream, ask.chunk)
        for stream, ask in zip(streams, asks, strict=True)
        if len(stream.output) < tokens
    ]:
        step(driver, work)
    for stream in streams:
        stream.free()
    return [Bits.of(stream) for stream in streams]


def resumed(driver: Driver, ask: Ask, before: Bits, kept: int, beside: Sequence[Ask]) -> Bits:
    """The rest of an answer whose first `kept` tokens are there, as after a preemption: they are
    computed as a prompt's, in slices, beside others."""
    own = ask.stream(driver, 0, before.output[:kept])
    others = [each.stream(driver, 1 + row) for row, each in enumerate(beside)]
    while len(own.output) < len(before.output):
        step(driver, [(own, ask.chunk), *((other, 3) for other in others)])
    for stream in (own, *others):
        stream.free()
    return Bits(own.output, [*before.logprobs[:kept], *Bits.of(own).logprobs], before.prompt)


def invariant_driver(
    folder: Path, name: str, configs: Mapping[str, LoraConfig], **options: Any
) -> tuple[Driver, dict[str | None, int]]:
    """A driver of a model with `--batch-invariant`, and the slot of each adapter, and of the
    base. options: of `engine_config`."""
    sizes = dict(SIZES)
    if "qk_rope_head_dim" in VARIANTS[name].settings:
        del sizes["head_dim"]  # heads of latents have sizes of their own
    model = make_model(name, **sizes)
    save_model(model, folder)
    driver = Driver(folder, batch_invariant=True, **options)
    oracle = with_zoo(model, configs)
    slots: dict[str | None, int] = {None: -1}
    first = 0
    for slot, adapter in enumerate(configs):
        layout, slab = pack(oracle, adapter, dtype=driver.config.dtype)
        assert driver.load(slot, layout, slab, first).error is None
        slots[adapter], first = slot, first + sum(layout.runs)
    return driver, slots
