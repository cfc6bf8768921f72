"""A family is a reader and a line in the registry: one whose matrices no other family has."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace
from peft import LoraConfig
from transformers import Phi3Config, Phi3ForCausalLM, PreTrainedModel

from server.model.families import family
from server.model.families.family import Family
from server.model.families.fields import Fields
from server.model.families.registry import FAMILIES
from server.model.families.rope import read_rope
from server.model.spec import ModelSpec, Part
from tests.server.model.driver import Driver, Stream, generate
from tests.server.model.families.parity import GREEDY, assert_parity, prompt
from tests.server.model.hub_models import SIZES, add_adapter, random_model, save_model
from tests.server.model.slabs import pack

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")


@pytest.fixture(autouse=True)
def _registered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(FAMILIES, "phi3", Family("Phi3ForCausalLM", read_fused))


def read_fused(fields: Fields, generation: Mapping[str, Any]) -> ModelSpec:
    """Phi 3's: q, k and v are one module of the checkpoint and of PEFT, gate and up another."""
    sizes = family.read_sizes(fields)
    rope, max_context = read_rope(fields, sizes)
    layer = family.layer(sizes, family.attention(sizes, rope))
    layer = replace(
        layer,
        qkv=replace(layer.qkv, parts=(Part("self_attn.qkv_proj", layer.qkv.out_features),)),
        gate_up=replace(layer.gate_up, parts=(Part("mlp.gate_up_proj", 2 * sizes.inner),)),
    )
    eos = family.read_eos(fields, generation, sizes)
    return family.model(fields, sizes, (layer,) * sizes.layers, max_context, eos)


def assert_adapters(
    model: PreTrainedModel, configs: Mapping[str, LoraConfig], folder: Path
) -> None:
    """In one batch with the base, what PEFT computes."""
    driver = Driver(save_model(model, folder))
    oracle: Any = model
    slots: dict[str | None, int] = {None: -1}
    first = 0
    for slot, (name, config) in enumerate(configs.items()):
        oracle = add_adapter(oracle, name, config, slot)
        layout, slab = pack(oracle, name)
        assert driver.load(slot, layout, slab, first).error is None
        slots[name], first = slot, first + sum(layout.runs)
    streams = {
        name: Stream(driver, row, prompt(9 + row, row), slot=slot, sampling=GREEDY)
        for row, (name, slot) in enumerate(slots.items())
    }
    generate(driver, list(streams.values()), 5, 4)
    for adapter, stream in streams.items():
        assert_parity(oracle, adapter, stream)
    driver.close()


def test_matrices_that_the_checkpoint_stores_fused(tmp_path: Path) -> None:
    settings = {**SIZES, "pad_token_id": 0, "tie_word_embeddings": False}
    model = random_model(Phi3Config, Phi3ForCausalLM, **settings)
    fused = ["qkv_proj", "gate_up_proj"]
    configs = {
        "fused": LoraConfig(r=8, lora_alpha=16, target_modules=fused),
        "others": LoraConfig(r=3, lora_alpha=3, target_modules=["o_proj", "down_proj"]),
    }
    assert_adapters(model, configs, tmp_path)
