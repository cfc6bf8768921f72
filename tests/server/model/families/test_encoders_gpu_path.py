"""Encoders by the GPU's kernels, in Triton's interpreter: as the reference operations, which
`test_encoders.py` holds to transformers."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from peft import LoraConfig
from transformers import AutoModelForSequenceClassification

from loraplex.server.protocol import VectorParams
from tests.kernels.batches import interpreted
from tests.server.model.driver import Driver, Stream, generate
from tests.server.model.families.encoders import ENCODERS
from tests.server.model.families.test_encoders import random, scores_of, text
from tests.server.model.gpu_pair import Pair, small_pair
from tests.server.model.hub_models import make_model

pytestmark = [
    pytest.mark.filterwarnings("ignore"),
    interpreted,
]
# By tokens of a step: few, mixed and more take LoRA by different ways.
STEPS = ((1, 3), (9, 1), (4, 21))


def read(driver: Driver, name: str, lengths: tuple[int, ...], shift: int) -> list[np.ndarray]:
    streams = []
    for row, length in enumerate(lengths * 2):
        wish = scores_of(name) if row < len(lengths) else VectorParams(pooling="mean")
        stream = Stream(driver, row, text(length, row), slot=(row + shift) % 3 - 1)
        streams.append(stream.read_for(wish))
    generate(driver, streams, 0, 64)
    for stream in streams:
        stream.free()
    assert all(stream.vector is not None for stream in streams)
    return [np.array(stream.vector) for stream in streams]


def assert_same(pair: Pair, name: str) -> None:
    for shift, lengths in enumerate(STEPS):
        pairs = zip(
            *(read(d, name, lengths, shift) for d in (pair.gpu, pair.reference)), strict=True
        )
        for found, expected in pairs:
            assert np.abs(found - expected).max() < 1e-4


@pytest.mark.parametrize(
    "name",
    [
        "mpnet",
        pytest.param("bert", marks=pytest.mark.exhaustive),
        pytest.param("modernbert", marks=pytest.mark.exhaustive),
    ],
)
def test_same_as_the_reference(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    row = ENCODERS[name]
    model = random(AutoModelForSequenceClassification, name, num_labels=3, num_hidden_layers=2)
    adapters = {
        "every": LoraConfig(r=8, target_modules="all-linear", task_type="SEQ_CLS"),
        "few": LoraConfig(r=3, target_modules=list(row.few)),
    }
    with small_pair(model, adapters, tmp_path, monkeypatch) as pair:
        pair.graphs.clear()
        assert_same(pair, name)
        assert pair.graphs


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", ["qwen3", "mistral-window", "gemma2"])
def test_decoders_whose_tokens_see_all(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rotations, norms of q and k, shared keys, windows and soft caps."""
    settings: dict[str, Any] = {"head_dim": 16, "sliding_window": 5, "num_hidden_layers": 2}
    model: Any = make_model(name, is_causal=False, **settings)
    lora = LoraConfig(r=8, target_modules=["q_proj", "v_proj", "down_proj"])
    with small_pair(model.get_decoder(), {"one": lora}, tmp_path, monkeypatch) as pair:
        found, expected = (whole_texts(driver) for driver in (pair.gpu, pair.reference))
        for ours, theirs in zip(found, expected, strict=True):
            assert np.abs(ours - theirs).max() < 1e-4 * max(1.0, np.abs(theirs).max())


def whole_texts(driver: Driver) -> list[np.ndarray]:
    streams = [
        Stream(driver, row, text(length, row), slot=row % 2 - 1).read_for(VectorParams())
        for row, length in enumerate((1, 9, 21, 4))
    ]
    generate(driver, streams, 0, 64)
    return [np.array(stream.vector) for stream in streams]
