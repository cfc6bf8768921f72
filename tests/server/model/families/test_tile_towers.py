"""Encoders of tiles against transformers: their forms, their places, names of their tensors."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    Idefics3Config,
    Idefics3ForConditionalGeneration,
    InternVLConfig,
    InternVLForConditionalGeneration,
)

from loraplex.server.model.checkpoint.checkpoint import read_config
from loraplex.server.model.lora.sites import TowerSites
from loraplex.server.model.tower.tower import Tower, TowerInput
from loraplex.server.model.weights import load_tower
from loraplex.server.protocol import StretchedForm
from tests.server.model.driver import Driver
from tests.server.model.families.pictured import PATCH, make_pictured, tiled
from tests.server.model.families.test_towers import changed, encoded
from tests.server.model.hub_models import SIZES, random_model, save_model

CPU = torch.device("cpu")
IDEFICS3, INTERNVL = Idefics3ForConditionalGeneration, InternVLForConditionalGeneration


def idefics3(tile: int, side: int, **text: Any) -> Any:
    vision = {"image_size": tile * PATCH}
    return tiled(partial(Idefics3Config, scale_factor=side), vision, **text)


def internvl(layer: int, vision: dict[str, Any], **text: Any) -> Any:
    own = {"image_size": [4 * PATCH] * 2, "patch_size": [PATCH] * 2, **vision}
    return tiled(partial(InternVLConfig, vision_feature_layer=layer), own, **text)


FORMS: dict[str, tuple[Any, Any]] = {
    # Of 19 and 25 patches a side some have the place of the one before, as float32 rounds.
    "19": (partial(idefics3, 19, 1), IDEFICS3),
    "25": (partial(idefics3, 25, 5), IDEFICS3),
    "usual": (partial(internvl, -1, {}), INTERNVL),
    "of an earlier layer": (partial(internvl, -2, {"attention_bias": True}), INTERNVL),
    "normed": (partial(internvl, -1, {"use_mean_pooling": False}), INTERNVL),
    "by the mean square": (
        partial(internvl, 2, {"use_qk_norm": True, "norm_type": "rms_norm"}),
        INTERNVL,
    ),
}


@torch.inference_mode()
@pytest.mark.parametrize("form", FORMS)
def test_features_are_those_of_transformers(form: str, tmp_path: Path) -> None:
    model: Any = random_model(*FORMS[form], **{**SIZES, "num_hidden_layers": 1})
    for name, parameter in model.named_parameters():
        if name.endswith(("cls_token", "position_embeddings", "lambda_1", "lambda_2")):
            parameter.add_(torch.randn_like(parameter) * 0.3)
    read = read_config(save_model(model, tmp_path)).pictures
    assert read is not None
    assert isinstance(read.form, StretchedForm)
    side, tile = read.form.side, read.form.tile
    grid = (1, tile, 2 * tile)
    pixels = torch.randn(3, 3, tile * PATCH, tile * PATCH)
    cut = pixels.view(3, 3, tile // side, side, PATCH, tile // side, side, PATCH)
    patches = cut.permute(0, 2, 5, 3, 6, 1, 4, 7).reshape(read.form.patches(grid), -1)
    weights = load_tower(tmp_path, read_config(tmp_path), torch.float32, CPU)
    sites = TowerSites(read.tower, first_layer=1)
    (found,) = encoded(Tower(read, weights, sites, CPU, 100), [TowerInput(patches, grid)])
    is_nested = isinstance(model, IDEFICS3)
    expected = model.get_image_features(pixels[None] if is_nested else pixels).pooler_output
    assert len(found) == read.form.tokens(grid)
    assert (found - torch.cat([*expected])).abs().max() < 1e-4


@pytest.mark.parametrize(
    ("kind", "rename"),
    [
        ("internvl", {"vision_tower.": "model.vision_tower.", "multi_": "model.multi_"}),
        ("idefics3", {"model.vision_model.": "vision_model.", "model.connector.": "connector."}),
    ],
)
def test_both_spellings_and_text_alone(kind: str, rename: dict[str, str], tmp_path: Path) -> None:
    base = save_model(make_pictured(kind, num_hidden_layers=1), tmp_path / "base")
    for name in ("other", "text"):
        (tmp_path / name).mkdir()
    other = changed(base, tmp_path / "other", rename)
    model = read_config(base)
    first, again = (load_tower(each, model, torch.float32, CPU) for each in (base, other))
    assert torch.equal(first.body.embed, again.body.embed)
    assert torch.equal(first.body.lm_head.dequantised(), again.body.lm_head.dequantised())
    driver = Driver(changed(base, tmp_path / "text", dict.fromkeys(rename, "")))
    assert driver.executor.limits.pictures is None
    driver.close()
