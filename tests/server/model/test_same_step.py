"""One step from one state, with masks and without: nobody else's token changes by a bit."""

import json
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from loraplex.launcher.bench.engine.offline import SHIPPED
from loraplex.launcher.bench.engine.random_weights import random_weights
from loraplex.server.engine.plan import SliceResult, StepPlan
from loraplex.server.protocol import SamplingParams
from tests.server.model.driver import Driver, Stream

ROWS = 24
SIZES: dict[str, Any] = {
    "hidden_size": 256,
    "intermediate_size": 384,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "max_position_embeddings": 256,
}
EACH = [
    SamplingParams(temperature=0.0),
    SamplingParams(temperature=0.0, logprobs=2),
    SamplingParams(top_p=0.9),
    SamplingParams(temperature=1.5, top_k=500, min_p=1e-6, logprobs=1),
    SamplingParams(temperature=0.0, repetition_penalty=1.4),
]
# Vocabulary and options of each device; neither vocabulary fills its last word of a mask.
DEVICES: dict[str, tuple[int, dict[str, Any]]] = {
    "cpu": (301, {}),
    "cuda": (
        128_251,
        {
            "device": "cuda",
            "dtype": "bfloat16",
            "page_size": 16,
            "kv_memory": 64 << 20,
            "max_step_tokens": 2048,
        },
    ),
}


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)], scope="module")
def driver(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Driver]:
    if request.param == "cuda" and not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    vocab, options = DEVICES[request.param]
    folder = tmp_path_factory.mktemp("base")
    config = json.loads((SHIPPED / "llama-3.1-8b" / "config.json").read_text())
    text = json.dumps({**config, **SIZES, "vocab_size": vocab})
    (folder / "config.json").write_text(text)
    torch.manual_seed(0)
    found = Driver(folder, weights=random_weights, **options)
    yield found
    found.close()


def plan_of(streams: Sequence[Stream]) -> StepPlan:
    """What each has left, as one step."""
    counts = [len(s.tokens) - s.computed for s in streams]
    return StepPlan(
        step=0,
        new_rows=[start for s in streams for start in s.start()],
        grants=[
            grant for s, count in zip(streams, counts, strict=True) for grant in s.grant(count)
        ],
        slices=[s.slice(count) for s, count in zip(streams, counts, strict=True)],
        freed_rows=[],
    )


def masked(driver: Driver, plan: StepPlan, rows: Sequence[int]) -> list[SliceResult]:
    """The step once more, with masks of a few tokens, of half of them, and of one."""
    vocab = driver.executor.limits.vocab_size
    rng = np.random.default_rng(len(rows))
    allowed: list[list[int] | None] = [None] * ROWS
    for row in rows:
        count = (3, vocab // 2, 1)[row % 3]
        allowed[row] = rng.choice(vocab, count, replace=False).tolist()
    slices = [
        msgspec.structs.replace(piece, constrained=i in rows) for i, piece in enumerate(plan.slices)
    ]
    again = StepPlan(0, slices, [], [], [])
    found = driver.run(again, allowed)
    for result, ids in zip(found, allowed, strict=True):
        assert ids is None or result.token_ids[0] in ids
    return found


def test_masks_change_nobody_elses_token(driver: Driver) -> None:
    """Prompts, and then decodes, which graphs take on a GPU: 1, some and all rows with masks."""
    vocab = driver.executor.limits.vocab_size
    rng = np.random.default_rng(1)
    streams = [
        Stream(
            *(driver, row, rng.integers(3, vocab, 3 + 5 * row).tolist()),
            sampling=EACH[row % len(EACH)],
            seed=row,
        )
        for row in range(ROWS)
    ]
    for _ in range(3):
        plan = plan_of(streams)
        free = driver.run(plan)
        for rows in ([7], list(range(0, ROWS, 3)), list(range(ROWS))):
            for row, (result, before) in enumerate(
                zip(masked(driver, plan, rows), free, strict=True)
            ):
                if row not in rows:
                    assert result == before
        again = StepPlan(0, plan.slices, [], [], [])
        assert driver.run(again) == free
        for stream, piece, result in zip(streams, plan.slices, free, strict=True):
            stream.take(piece.num_new, result)
    assert len({s.output[0] for s in streams}) > ROWS // 2
