"""Vision cards for tests."""

import msgspec

from loraplex.server.protocol import PictureForm, TiledForm, VisionCard

QWEN = VisionCard(
    rule="qwen2_vl",
    patch_size=14,
    temporal_patch_size=2,
    form=PictureForm(side=2),
    min_pixels=56 * 56,
    max_pixels=28 * 28 * 1280,
    mean=(0.48145466, 0.4578275, 0.40821073),
    std=(0.26862954, 0.26130258, 0.27577711),
    token_id=151655,
    opens_id=151652,
    closes_id=151653,
)
QWEN3 = msgspec.structs.replace(
    QWEN,
    patch_size=16,
    min_pixels=1 << 16,
    max_pixels=1 << 24,
    mean=(0.5, 0.5, 0.5),
    std=(0.5, 0.5, 0.5),
)

PIXTRAL = VisionCard(
    rule="pixtral",
    patch_size=14,
    temporal_patch_size=1,
    form=PictureForm(side=2),
    mean=QWEN.mean,
    std=QWEN.std,
    token_id=10,
    longest_edge=1540,
    row_ends=(12, 13),
)

CLIP = VisionCard(
    rule="clip",
    patch_size=14,
    temporal_patch_size=1,
    form=PictureForm(tile=24),
    mean=QWEN.mean,
    std=QWEN.std,
    token_id=32000,
    shortest_edge=336,
    crop_size=336,
)
TILED = msgspec.structs.replace(
    CLIP,
    rule="llava_next",
    form=TiledForm(tile=24, tilings=((1, 2), (2, 1), (2, 2), (3, 1), (1, 3))),
    shortest_edge=0,
)

SIGLIP = VisionCard(
    rule="clip",
    patch_size=14,
    temporal_patch_size=1,
    form=PictureForm(tile=7),
    mean=(0.5, 0.5, 0.5),
    std=(0.5, 0.5, 0.5),
    token_id=32000,
    crop_size=100,
)

GEMMA3 = msgspec.structs.replace(
    SIGLIP, resample=2, crop_size=112, form=PictureForm(side=4, tile=8), around="\n\n"
)

GEMMA4 = VisionCard(
    rule="gemma4",
    patch_size=16,
    temporal_patch_size=1,
    form=PictureForm(side=3),
    mean=(0.5, 0.5, 0.5),
    std=(0.5, 0.5, 0.5),
    token_id=258880,
    before=(255999,),
    after=(258882,),
    max_pixels=70 * 48**2,
    colours_last=True,
)

UNIFIED = msgspec.structs.replace(
    GEMMA4, patch_size=48, form=PictureForm(), mean=(0.0, 0.0, 0.0), std=(1.0, 1.0, 1.0)
)
