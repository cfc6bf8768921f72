"""Quantised models that read pictures: as transformers and PEFT with the same values."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from loraplex.server.model.checkpoint.checkpoint import model_shards, read_config, stored_tensors
from loraplex.server.model.checkpoint.stored_forms import stored_forms
from loraplex.server.model.checkpoint.tower_part import tower_shards
from loraplex.server.model.spec.served_as import served_as
from loraplex.server.model.weights import load_weights
from tests.server.model.driver import Driver
from tests.server.model.families.pictured import Pictured, make_pictured, text
from tests.server.model.hub_models import save_model
from tests.server.model.quantised.checkpoints import change_config
from tests.server.model.quantised.formats import FORMATS
from tests.server.model.quantised.test_places import quantise_stored

pytestmark = pytest.mark.filterwarnings("ignore")

# Names of the file's tensors.
TEXT = r"(?!.*(visual|vision_tower)).*layers\.[0-9]+\.(self_attn|mlp)\.[a-z_]+proj\.weight"
ALL = (
    rf"{TEXT}|.*(visual\.blocks|vision_tower\..*layers)\.[0-9]+\..*(proj|qkv)\.weight"
    r"|.*(visual\.merger\.mlp\.[02]|multi_modal_projector\.[a-z_.0-9]*)(?<!norm)\.weight"
)
# A form -> fields of `quantization_config` by which published checkpoints leave modules out.
LEFT_OUT: dict[str, dict[str, Any]] = {
    "awq": {"modules_to_not_convert": ["visual"]},
    "gptq": {"dynamic": {"-:.*visual.*": {}, r"-:.*vision_tower.*": {}}},
    "fp8-block": {"modules_to_not_convert": ["lm_head", "model.visual.blocks.0.attn.qkv"]},
    "ct-int4-group": {
        "ignore": ["re:visual.*", "re:.*lm_head", "re:vision_tower.*", "re:multi_modal_projector.*"]
    },
    "ct-fp8-channel": {"ignore": ["re:.*lm_head", "re:model[.]vision_tower.*"]},
    "nf4-nested": {"llm_int8_skip_modules": ["lm_head", "visual", "multi_modal_projector"]},
}
TOWERS = ["fp8-block", "ct-int8-channel", "nf4-nested"]
LONG = pytest.mark.exhaustive
ROWS = [
    pytest.param("qwen2_5_vl", "fp8-block", ALL, id="qwen2_5_vl-fp8-block"),
    *(
        pytest.param(kind, form, TEXT, marks=LONG, id=f"{kind}-text-{form}")
        for kind in ("qwen2_5_vl", "mistral3")
        for form in LEFT_OUT
    ),
    *(
        pytest.param(kind, form, ALL, marks=LONG, id=f"{kind}-{form}")
        for kind in ("qwen2_5_vl", "mistral3", "qwen3_vl", "gemma3")
        for form in TOWERS
        if (kind, form) != ("qwen2_5_vl", "fp8-block")
    ),
]
LORA: dict[str, Any] = {
    "one": {"r": 3, "target_modules": r".*(language|text)_model.*(q_proj|v_proj)"},
    "two": {"r": 4, "lora_alpha": 4, "target_modules": "all-linear"},
}
PARTS: list[list[list[int] | str]] = [
    [text(3, 0), "a", text(4, 1)],
    ["d", text(6, 4), "e", text(1, 5), "b"],
    [text(9, 6)],
]


@pytest.mark.parametrize(("kind", "form", "stored"), ROWS)
def test_pictures_and_adapters(kind: str, form: str, stored: str, tmp_path: Path) -> None:
    base = quantise_stored(make_pictured(kind, intermediate_size=128), tmp_path, form, stored)
    config = FORMATS[form].config | (LEFT_OUT[form] if stored == TEXT else {})
    change_config(tmp_path, quantization_config=config)
    make_driver = partial(Driver, activations="bf16")
    served = Pictured(tmp_path, make_driver, kind=kind, lora=LORA, base=base)
    engine = served.engine(max_step_tokens=22)
    requests = [
        served.pictured(parts, adapter=served.digest(name), max_tokens=3)
        for parts in PARTS
        for name in (None, "one", "two")
    ]
    served.assert_answers(engine, requests)
    served.driver.close()


# Targets of a group of compressed-tensors -> whether they mean the text part, and the encoder.
TARGETS: dict[str, tuple[bool, bool]] = {
    "Linear": (True, True),
    "re:model[.]language_model[.]layers.*": (True, False),
    "re:language_model.*": (True, False),
    "re:model[.]layers.*": (True, False),
    "re:.*proj$": (True, True),
    "re:visual.*": (False, True),
    "re:model[.]visual[.]blocks.*": (False, True),
}


def test_targets_name_modules_as_savers_do(tmp_path: Path) -> None:
    quantise_stored(make_pictured(intermediate_size=128), tmp_path, "ct-int8-channel", ALL)
    config = FORMATS["ct-int8-channel"].config
    group = config["config_groups"]["group_0"]
    for target, expected in TARGETS.items():
        groups = {"group_0": {**group, "targets": [target]}}
        change_config(tmp_path, quantization_config={**config, "config_groups": groups})
        model = read_config(tmp_path)
        assert model.pictures is not None
        tower = model.pictures.tower
        parts = (model, model_shards(tmp_path, model)), (tower, tower_shards(tmp_path, tower))
        found = (bool(stored_forms(part, stored_tensors(shards))) for part, shards in parts)
        assert tuple(found) == expected, target


def test_encoders_stay_as_they_are_when_layers_are_quantised_at_load(tmp_path: Path) -> None:
    save_model(make_pictured(), tmp_path)
    model, device = read_config(tmp_path), torch.device("cpu")
    plain = load_weights(tmp_path, model, torch.float32, device)
    made = load_weights(tmp_path, served_as(model, "fp8"), torch.float32, device, at_load="fp8")
    assert plain.tower is not None
    assert made.tower is not None
    pairs = [(plain.layers, made.layers), (plain.tower.body.layers, made.tower.body.layers)]
    (text_is_same, tower_is_same) = (
        all(
            torch.equal(one.attention.qkv.dequantised(), other.attention.qkv.dequantised())
            for one, other in zip(*pair, strict=True)
        )
        for pair in pairs
    )
    assert tower_is_same
    assert not text_is_same
    assert made.tower.body.lm_head.dequantised().equal(plain.tower.body.lm_head.dequantised())
