"""Prompts with pictures whose tokens see each other, on a GPU in bfloat16.

The error against float32 is held to that of the reference ops in bfloat16.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from loraplex.server.protocol import GenerateRequest
from tests.kernels.batches import on_gpu
from tests.server.model.driver import Driver, by_token
from tests.server.model.families.pictured import (
    BEFORE,
    PicturedEngine,
    make_pictured,
    pictured,
    text,
)
from tests.server.model.gpu_trio import SIZES, SLACK
from tests.server.model.hub_models import save_model

pytestmark = [*on_gpu, pytest.mark.filterwarnings("ignore")]
DEVICE = "cuda"
FORCED = 5
COMMON: dict[str, Any] = {"page_size": 16, "kv_memory": 16 << 20, "max_step_tokens": 512}


def requests(kind: str) -> list[GenerateRequest]:
    """The same token is drawn always, so that all runs see the same contexts."""
    before = BEFORE[kind]
    parts: list[list[list[int] | str]] = [
        [text(3, 0), before + "a", text(40, 1)],
        [text(1, 2), before + "b", before + "c", text(2, 3)],
        [before + "d", text(26, 4), before + "e", text(1, 5), before + "b"],
        [text(30, 6)],
    ]
    bias = {FORCED: 1e4}
    return [pictured(each, max_tokens=6, logit_bias=bias) for each in parts * 3]


def logprobs(driver: Driver, asked: Sequence[GenerateRequest], step: int) -> torch.Tensor:
    """Log-probabilities at each place of the answers, `[places, vocab]`. step: tokens of one."""
    engine = PicturedEngine(driver, {}, max_step_tokens=step)
    keys = [engine.submit(request) for request in asked]
    engine.run()
    found = []
    for key in keys:
        assert engine.tokens(key) == [FORCED] * 6
        for event in engine.events[key]:
            found += [by_token(each, len(each.top)) for each in event.logprobs or ()]
    return torch.stack(found)


@pytest.mark.parametrize("kind", ["gemma3", "gemma4", "gemma4_unified"])
def test_the_error_is_that_of_the_reference(kind: str, tmp_path: Path) -> None:
    sizes = {**SIZES, "num_hidden_layers": 3}
    sizes |= {} if kind == "gemma3" else {"global_head_dim": 128}
    save_model(make_pictured(kind, **sizes), tmp_path)
    asked = requests(kind)
    exact, rough, gpu = (
        Driver(tmp_path, dtype=dtype, device=device, **COMMON)
        for dtype, device in (("float32", "cpu"), ("bfloat16", "cpu"), ("bfloat16", DEVICE))
    )
    assert DEVICE == "cpu" or gpu.executor._graphs is not None
    wanted, theirs = logprobs(exact, asked, 64), logprobs(rough, asked, 64)
    for step in (24, 64, 400):
        found = logprobs(gpu, asked, step)
        error, usual = (float((x - wanted).square().mean().sqrt()) for x in (found, theirs))
        print(f"{kind}, {step}: error {error:.5f}, of the reference {usual:.5f}")
        assert error <= SLACK * usual
    for driver in (exact, rough, gpu):
        driver.close()
