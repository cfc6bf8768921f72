"""Adapters have tables of their own under the names that their model gives these."""

from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig

from tests.server.model.driver import Driver, Stream, generate
from tests.server.model.families.parity import GREEDY, assert_parity, prompt
from tests.server.model.families.variants import VARIANTS
from tests.server.model.hub_models import add_adapter, make_model, save_model
from tests.server.model.slabs import pack

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")
EVEN = list(range(4, 90, 2))
LONG = pytest.mark.exhaustive
ROWS = [
    "gpt-neox",
    pytest.param("gpt2", marks=LONG),
    pytest.param("bloom-untied", marks=LONG),
    pytest.param("dbrx", marks=LONG),
    pytest.param("falcon-heads", marks=LONG),
    pytest.param("mpt", marks=LONG),
    pytest.param("opt", marks=LONG),
    "opt-narrow",
    pytest.param("nemotron-h", marks=LONG),
]


def options_of(name: str) -> list[dict[str, Any]]:
    table, tied = VARIANTS[name].embedding, make_model(name).config.tie_word_embeddings
    found: list[dict[str, Any]] = [
        {"modules_to_save": [table]},
        {"trainable_token_indices": {table: EVEN}},
    ]
    both = {"modules_to_save": [table, "lm_head"]}
    return found if tied else [*found, {"modules_to_save": ["lm_head"]}, both]


@pytest.mark.parametrize("name", ROWS)
def test_own_tables(name: str, tmp_path: Path) -> None:
    driver, first = Driver(save_model(make_model(name), tmp_path)), 0
    oracles, streams = [], []
    for row, options in enumerate(options_of(name)):
        target = VARIANTS[name].targets[0]
        config = LoraConfig(r=3, lora_alpha=6, target_modules=[target], **options)
        oracle = add_adapter(make_model(name), "one", config, row)
        generator = torch.Generator().manual_seed(row)
        with torch.no_grad():
            for parameter_name, parameter in oracle.named_parameters():
                if parameter.requires_grad and "lora_" not in parameter_name:
                    parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=0.3)
        layout, slab = pack(oracle, "one")
        assert driver.load(row, layout, slab, first).error is None
        first += sum(layout.runs)
        oracles.append(oracle)
        streams.append(Stream(driver, row, prompt(9 + row, row), slot=row, sampling=GREEDY))
    generate(driver, streams, 4, 5)
    for oracle, stream in zip(oracles, streams, strict=True):
        assert_parity(oracle, "one", stream)
    driver.close()
