"""Pictures in prompts by the GPU's kernels, in Triton's interpreter, as the reference computes."""

from pathlib import Path
from typing import Any

import pytest
from peft import LoraConfig

from tests.kernels.batches import interpreted
from tests.server.model.driver import Driver
from tests.server.model.families.pictured import (
    BEFORE,
    LORA,
    STATEFUL,
    TOLERANCE,
    Packed,
    PicturedEngine,
    make_pictured,
    pictured,
    text,
)
from tests.server.model.families.test_tower_adapters import lora_of
from tests.server.model.gpu_pair import small_pair
from tests.server.model.hub_models import add_adapter
from tests.server.model.slabs import pack

pytestmark = [
    pytest.mark.filterwarnings(
        "ignore::UserWarning", "ignore::FutureWarning", "ignore::RuntimeWarning"
    ),
    interpreted,
]


@pytest.mark.parametrize(
    ("backend", "kind", "layers"),
    [
        ("fa2", "qwen2_5_vl", 2),
        ("fa2", "qwen3_vl", 3),
        ("fa2", "gemma3", 2),
        pytest.param("fa2", "gemma4", 2, marks=pytest.mark.exhaustive),
        pytest.param("fa2", "gemma4_small", 3, marks=pytest.mark.exhaustive),
        pytest.param("fa2", "gemma4_unified", 2, marks=pytest.mark.exhaustive),
        pytest.param("fa3", "qwen2_5_vl", 2, marks=pytest.mark.exhaustive),
        pytest.param("fa2", "idefics3", 2, marks=pytest.mark.exhaustive),
        pytest.param("fa2", "internvl", 2, marks=pytest.mark.exhaustive),
        pytest.param("fa2", "llava", 2, marks=pytest.mark.exhaustive),
        pytest.param("fa2", "llava_next", 2, marks=pytest.mark.exhaustive),
        pytest.param("fa2", "mistral3", 2, marks=pytest.mark.exhaustive),
        pytest.param("fa2", "qwen3_5", 3, marks=pytest.mark.exhaustive),
    ],
)
def test_graphs_and_steps_outside(
    backend: str, kind: str, layers: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Decodes are in graphs, where their rows turn by an offset, and so are prompts behind
    pictures; steps with pictures are not."""
    adapters = {
        "one": LoraConfig(**LORA["one"]),
        "both": LoraConfig(r=2, lora_alpha=1, target_modules="all-linear"),
        "tower": LoraConfig(**lora_of(kind)["tower"]),
    }
    sizes = {"num_hidden_layers": layers, "intermediate_size": 48}
    model, again = (make_pictured(kind, **sizes) for _ in range(2))
    peft: Any = again
    for seed, (name, config) in enumerate(adapters.items(), 1):
        peft = add_adapter(peft, name, config, seed)
    packed = {name: Packed(*pack(peft, name)) for name in adapters}
    with small_pair(model, adapters, tmp_path, monkeypatch, backend=backend) as pair:
        one, both, tower = (each.layout.digest for each in packed.values())
        before = BEFORE.get(kind, "")
        requests = [
            pictured([text(2, 0), before + "b", text(3, 1)], max_tokens=4),
            pictured([text(4, 2), before + "a", before + "c"], adapter=one, max_tokens=4),
            pictured([before + "c", text(25, 3)], adapter=tower, max_tokens=3),
            pictured([before + "b", text(5, 3)], adapter=both, max_tokens=3),
            pictured([text(6, 4)], max_tokens=3),
        ]

        def answers(driver: Driver) -> list[tuple[list[int], list[float | None]]]:
            engine = PicturedEngine(driver, packed, max_step_tokens=20)
            keys = [engine.submit(request) for request in requests]
            engine.run()
            assert all(engine.last(key).finish == "length" for key in keys)
            return [
                (
                    engine.tokens(key),
                    [p.logprob for event in engine.events[key] for p in event.logprobs or ()],
                )
                for key in keys
            ]

        expected, found = answers(pair.reference), answers(pair.gpu)
        for (tokens, logprobs), (own_tokens, own_logprobs) in zip(expected, found, strict=True):
            assert own_tokens == tokens
            assert own_logprobs == pytest.approx(logprobs, abs=TOLERANCE)
        assert any(batch > 0 for batch in pair.graphs)
        # Prompts of rows with states are in no graph.
        assert any(batch < 0 for batch in pair.graphs) is (kind not in STATEFUL)
