"""A model by the GPU path in bfloat16, and by the reference ops in bfloat16 and float32.

The GPU path's error is compared with that of the reference ops in bfloat16, which are known to be
right.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from loraplex.adapters.manifest import SlabLayout
from loraplex.server.protocol import SamplingParams
from tests.server.model.adapter_zoo import with_zoo, zoo_of
from tests.server.model.driver import EVERY_LOGPROB, Driver, Stream, generate
from tests.server.model.families.variants import VARIANTS
from tests.server.model.hub_models import VOCAB, make_model, save_model
from tests.server.model.slabs import pack

SIZES: dict[str, Any] = {
    "hidden_size": 256,
    "intermediate_size": 384,
    "head_dim": 64,
    "initializer_range": 0.06,
}
PROMPTS = (1, 5, 16, 17, 33, 47)
STEPS = 20
# How much farther from float32 than the reference ops in bfloat16, in root mean square.
SLACK = 1.5
# Stronger ones make a random model chaotic: then rounding alone changes everything.
ADAPTER_STRENGTH = 0.1


def forced(token: int) -> SamplingParams:
    """Always the same token, so that all runs see the same contexts; logprobs are the raw ones."""
    return SamplingParams(
        temperature=0.0,
        logit_bias={token: 1e4},
        logprobs=EVERY_LOGPROB,
        prompt_logprobs=0,
    )


def prompt(length: int, seed: int) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, VOCAB, (length,), generator=generator).tolist()


class Trio:
    """The same model and adapters in float32 and bfloat16 on the CPU, and on the GPU."""

    def __init__(
        self,
        name: str,
        changes: dict[str, Any],
        folder: Path,
        max_running: int = 72,
        save: Callable[[Any, Path], object] = save_model,
        make_gpu: Callable[..., Driver] = Driver,
        **options: Any,
    ) -> None:
        """name: of a row of VARIANTS. changes: what differs from it and from SIZES. save: writes
        the model's folder, and may round the model. make_gpu: the GPU's Driver. options: of
        `engine_config`."""
        base = make_model(name, **{**SIZES, **changes})
        save(base, folder)
        zoo = zoo_of(VARIANTS[name])
        oracle = with_zoo(base, zoo)
        with torch.no_grad():
            for parameter_name, parameter in oracle.named_parameters():
                if "lora_B" in parameter_name or "lora_embedding_B" in parameter_name:
                    parameter.mul_(ADAPTER_STRENGTH)
        common: dict[str, Any] = {
            "page_size": 16,
            "kv_memory": max_running << 20,
            "adapter_memory": 64 << 20,
        }
        common |= {"host_arena_bytes": 16 << 20, "extent_bytes": 4096, "max_step_tokens": 2048}
        common |= {"max_running": max_running, **options}
        self.exact = Driver(folder, **common)
        self.rough = Driver(folder, dtype="bfloat16", **common)
        self.gpu = make_gpu(folder, dtype="bfloat16", device="cuda", **common)
        self.slots: dict[str | None, int] = {None: -1}
        self.slabs: dict[str, tuple[SlabLayout, bytes]] = {}  # the GPU's
        self.next_extent = 0
        for slot, adapter in enumerate(zoo):
            extents = 0
            for driver in (self.exact, self.rough, self.gpu):
                of = driver.config
                layout, slab = pack(oracle, adapter, dtype=of.dtype, shards=of.shards)
                assert driver.load(slot, layout, slab, self.next_extent).error is None
                extents = max(extents, sum(layout.runs))
            self.slots[adapter] = slot
            self.slabs[adapter] = layout, slab
            self.next_extent += extents

    @property
    def slots_of_layers(self) -> list[int]:
        """Of the base, and of adapters that change neither the embedding nor the head."""
        outside = ("rank64_everything", "embed_only", "head_only")
        return [slot for name, slot in self.slots.items() if name not in outside]

    def close(self) -> None:
        for driver in (self.exact, self.rough, self.gpu):
            driver.close()


def answer(
    driver: Driver, slots: list[int], chunk: int, sampling: SamplingParams | None = None
) -> list[Stream]:
    streams = [
        Stream(
            driver,
            row,
            prompt(PROMPTS[row % len(PROMPTS)], row),
            slot=slot,
            sampling=sampling or forced(3 + row % 90),
        )
        for row, slot in enumerate(slots)
    ]
    generate(driver, streams, STEPS, chunk)
    for stream in streams:
        stream.free()
    return streams


def logprobs(streams: list[Stream]) -> torch.Tensor:
    """Of the prompts' tokens, and of the whole vocabulary at every decoded place."""
    values: list[float] = []
    for stream in streams:
        values += [found.logprob or 0.0 for found in stream.prompt_logprobs]
        for found in stream.logprobs:
            values += [value for _, value in sorted(found.top)]
    return torch.tensor(values)


def assert_near(trio: Trio, slots: list[int], chunk: int) -> None:
    exact, rough, gpu = (
        logprobs(answer(driver, slots, chunk)) for driver in (trio.exact, trio.rough, trio.gpu)
    )
    error = _rms(rough, exact)
    assert torch.isfinite(gpu).all()
    found = _rms(gpu, exact)
    assert found < SLACK * error + 1e-3, f"{found} is not near {error}"
    if max(slots) >= 0:  # rounding is not what tells an adapter from none
        base = logprobs(answer(trio.exact, [-1] * len(slots), chunk))
        assert error < 0.6 * _rms(base, exact)


def _rms(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a - b).square().mean().sqrt())
