"""Encoders of pictures at known models' real widths, in few layers, on a GPU in bfloat16.

The error against float32 is held to that of transformers in bfloat16, on the same GPU.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from transformers import AutoConfig, AutoModelForImageTextToText

from loraplex.launcher.known_models import served_families
from loraplex.server.model.checkpoint.checkpoint import read_config
from loraplex.server.model.lora.sites import TowerSites
from loraplex.server.model.spec.picture_spec import PictureSpec
from loraplex.server.model.tower.geometry import patch_places
from loraplex.server.model.tower.tower import Tower, TowerInput
from loraplex.server.model.weights import load_tower
from loraplex.server.protocol import Grid
from tests.kernels.batches import on_gpu
from tests.server.model.families.test_gpu_real_widths import SLACK, VOCAB, cast
from tests.server.model.families.test_towers import encoded

pytestmark = [*on_gpu, pytest.mark.filterwarnings("ignore")]
DEVICE = torch.device("cuda")
LAYERS = 3
Inputs = dict[str, torch.Tensor]


class Kind(NamedTuple):
    """A type of model. grid: of a picture. inputs: what transformers reads, of the picture's
    patches, its grid and the configuration. vision: of few layers. ids: further ones. text: of its
    one layer."""

    grid: Grid
    inputs: Callable[[torch.Tensor, Grid, Any], Inputs]
    vision: dict[str, Any] = {"num_hidden_layers": LAYERS}
    ids: dict[str, Any] = {"image_token_index": 5}
    text: dict[str, Any] = {}


def pixels(patches: torch.Tensor, high: int, wide: int, side: int, patch: int) -> torch.Tensor:
    """Pixels that patches, token by token, were cut from: `[1, 3, height, width]`."""
    cut = patches.view(high // side, wide // side, side, side, 3, patch, patch)
    return cut.permute(4, 0, 2, 5, 1, 3, 6).reshape(1, 3, high * patch, wide * patch)


def of_one_size(patches: torch.Tensor, grid: Grid, config: Any) -> Inputs:
    return {"pixel_values": pixels(patches, *grid[1:], 1, config.vision_config.patch_size)}


def of_rows(patches: torch.Tensor, grid: Grid, config: Any) -> Inputs:
    side, patch = config.spatial_merge_size, config.vision_config.patch_size
    sizes = torch.tensor([[patch * length for length in grid[1:]]])
    return {"pixel_values": pixels(patches, *grid[1:], side, patch), "image_sizes": sizes}


def of_tiles(patches: torch.Tensor, grid: Grid, config: Any) -> Inputs:
    """Inputs for a picture as large as its tiles without padding."""
    vision = config.vision_config
    tile = vision.image_size // vision.patch_size
    tiles = [
        pixels(each, tile, tile, 1, vision.patch_size)
        for each in patches.view(-1, tile**2, patches.shape[1])
    ]
    sizes = torch.tensor([[vision.patch_size * length for length in grid[1:]]])
    return {"pixel_values": torch.stack(tiles, dim=1), "image_sizes": sizes}


def of_stretched(patches: torch.Tensor, grid: Grid, config: Any) -> Inputs:
    """Inputs for tiles. Tiles that patches do not fill have further pixels."""
    side = config.scale_factor if config.model_type != "internvl" else 2
    vision = config.vision_config
    # InternVL says both sides.
    patch, size = (int(torch.tensor(n).max()) for n in (vision.patch_size, vision.image_size))
    tile = size // patch
    tiles = torch.cat(
        [
            pixels(each, tile, tile, side, patch)
            for each in patches.view(-1, tile**2, patches.shape[1])
        ]
    )
    beyond = size - tile * patch
    tiles = torch.nn.functional.pad(tiles, (0, beyond, 0, beyond))
    return {"pixel_values": tiles if config.model_type == "internvl" else tiles[None]}


def of_patches(patches: torch.Tensor, grid: Grid, config: Any) -> Inputs:
    return {"pixel_values": patches, "image_grid_thw": torch.tensor([grid])}


def of_squares(patches: torch.Tensor, grid: Grid, config: Any) -> Inputs:
    high, wide = grid[1:]
    side = round((high * wide / config.mm_tokens_per_image) ** 0.5)
    return {"pixel_values": pixels(patches, high, wide, side, config.vision_config.patch_size)}


def of_large_places(patches: torch.Tensor, grid: Grid, config: Any) -> Inputs:
    return {
        "pixel_values": patches[None],
        "image_position_ids": torch.from_numpy(patch_places(grid, 1)).flip(0).T[None],
    }


def of_places(patches: torch.Tensor, grid: Grid, config: Any) -> Inputs:
    """Patches as the processor gives them, and the column and row of each."""
    places = patch_places(grid, config.vision_config.pooling_kernel_size)
    columns_first = torch.from_numpy(places).flip(0).T
    return {"pixel_values": patches[None] / 2 + 0.5, "image_position_ids": columns_first[None]}


_QWEN_IDS = {"image_token_id": 5, "video_token_id": 6}
_QWEN_IDS |= {"vision_start_token_id": 7, "vision_end_token_id": 8}
_QWEN = {"depth": LAYERS}
KINDS = {
    "gemma3": Kind((1, 64, 64), of_squares),
    "gemma4_unified": Kind((1, 14, 19), of_large_places, vision={}, ids={"image_token_id": 5}),
    "gemma4": Kind((1, 42, 57), of_places, ids={"image_token_id": 5}),
    "idefics3": Kind((1, 26, 52), of_stretched, ids={"image_token_id": 5}),
    "internvl": Kind((1, 32, 64), of_stretched, ids={"image_token_id": 5}),
    "llava": Kind((1, 24, 24), of_one_size),
    "llava_next": Kind((3, 48, 40), of_tiles),
    "mistral3": Kind((1, 40, 62), of_rows),
    "qwen2_vl": Kind((1, 40, 62), of_patches, _QWEN, _QWEN_IDS),
    "qwen3_5": Kind((1, 40, 62), of_patches, _QWEN, _QWEN_IDS, {"full_attention_interval": 1}),
    "smolvlm": Kind((1, 27, 54), of_stretched, ids={"image_token_id": 5}),
    "qwen2_5_vl": Kind((1, 40, 62), of_patches, {**_QWEN, "fullatt_block_indexes": [1]}, _QWEN_IDS),
}


def made(name: str, kind: Kind) -> Any:
    known = served_families()[name].config
    text = known.get("text_config") or {
        key: value for key, value in known.items() if not key.endswith("_config")
    }
    text = {**text, "num_hidden_layers": 1, "vocab_size": VOCAB, **kind.text}
    text |= {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
    vision = {**known["vision_config"], **kind.vision, "initializer_range": 0.03}
    config = AutoConfig.for_model(
        **{**known, "text_config": text, "vision_config": vision, **kind.ids}
    )
    torch.manual_seed(1)
    make: Any = AutoModelForImageTextToText
    with DEVICE:
        model = make.from_config(config, attn_implementation="eager")
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            if "norm" in parameter_name or "ln_" in parameter_name:
                parameter.add_(torch.randn_like(parameter) * 0.1)
            if "projection_weight" in parameter_name:  # which transformers makes of zeros
                parameter.normal_(std=0.03)
    return model.train(False)


@torch.inference_mode()
def by_transformers(model: Any, inputs: Inputs) -> torch.Tensor:
    """Results `[tokens, features]`."""
    found: list[torch.Tensor] = model.get_image_features(**inputs).pooler_output
    return torch.cat([*found]).float().cpu()


@torch.inference_mode()
def by_the_tower(folder: Path, pictures: PictureSpec, one: TowerInput) -> torch.Tensor:
    weights = load_tower(folder, read_config(folder), torch.bfloat16, DEVICE)
    sites = TowerSites(pictures.tower, first_layer=1)
    (found,) = encoded(Tower(pictures, weights, sites, DEVICE, 1024), [one])
    return found.float().cpu()


@pytest.mark.parametrize("name", KINDS)
def test_the_error_is_that_of_transformers(name: str, tmp_path: Path) -> None:
    kind = KINDS[name]
    model = made(name, kind)
    model.save_pretrained(tmp_path)
    pictures = read_config(tmp_path).pictures
    assert pictures is not None
    generator = torch.Generator().manual_seed(1)
    shape = (pictures.form.patches(kind.grid), pictures.columns)
    # Exact in bfloat16, so that all read the same pixels.
    patches = (torch.randint(-64, 65, shape, generator=generator) / 64).to(DEVICE)
    inputs = {n: x.to(DEVICE) for n, x in kind.inputs(patches, kind.grid, model.config).items()}
    exact = by_transformers(cast(model, torch.float32), inputs)
    halved = inputs | {"pixel_values": inputs["pixel_values"].bfloat16()}
    rough = by_transformers(cast(model, torch.bfloat16), halved)
    found = by_the_tower(tmp_path, pictures, TowerInput(patches.bfloat16(), kind.grid))
    error, theirs = (float((x - exact).square().mean().sqrt()) for x in (found, rough))
    print(f"{name}: error {error:.5f}, of transformers {theirs:.5f}, of {exact.std():.3f}")
    assert error <= SLACK * theirs
