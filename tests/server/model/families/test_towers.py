"""Encoders of pictures: their configuration, their tensors, and where patches lie."""

from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from transformers import LlavaForConditionalGeneration
from transformers.vision_utils import (
    get_vision_interpolation_indices_and_weights,
    get_vision_position_ids,
    get_vision_window_index,
)

from loraplex.launcher.known_models import served_families
from loraplex.server.config import ConfigError
from loraplex.server.model.checkpoint.checkpoint import CheckpointError, read_config
from loraplex.server.model.families.registry import read_model
from loraplex.server.model.lora.sites import TowerSites
from loraplex.server.model.ops.memory import memory_table, picture_limits, weights_bytes
from loraplex.server.model.spec.model_spec import ModelSpec
from loraplex.server.model.spec.served_as import served_as
from loraplex.server.model.tower.geometry import patch_places, table_taps, window_table
from loraplex.server.model.tower.tower import Tower, TowerInput
from loraplex.server.model.tower.tower_ops import (
    RowSpan,
    TowerPart,
    TowerPiece,
    WorkSizes,
    plan_work,
)
from loraplex.server.model.weights import load_tower
from loraplex.server.protocol import PictureForm
from tests.server.model.driver import Driver, engine_config
from tests.server.model.families.pictured import (
    BEFORE,
    PICTURES,
    Picture,
    make_pictured,
    sized_inputs,
)
from tests.server.model.families.pictured import llava as llava_config
from tests.server.model.hub_models import SIZES, random_model, save_model

FAMILIES = served_families()
QWEN = FAMILIES["qwen2_5_vl"].config
QWEN3 = FAMILIES["qwen3_vl"].config
QWEN2 = FAMILIES["qwen2_vl"].config
LLAVA = FAMILIES["llava"].config
MISTRAL3 = FAMILIES["mistral3"].config
GEMMA3 = FAMILIES["gemma3"].config
GEMMA4 = FAMILIES["gemma4"].config
CPU = torch.device("cpu")


def qwen(vision: dict[str, Any] | None = None, **changes: Any) -> dict[str, Any]:
    return {**QWEN, "vision_config": {**QWEN["vision_config"], **(vision or {})}, **changes}


def gemma3(vision: dict[str, Any] | None = None, **changes: Any) -> dict[str, Any]:
    return {**GEMMA3, "vision_config": {**GEMMA3["vision_config"], **(vision or {})}, **changes}


def gemma4(vision: dict[str, Any] | None = None, **changes: Any) -> dict[str, Any]:
    return {**GEMMA4, "vision_config": {**GEMMA4["vision_config"], **(vision or {})}, **changes}


def llava(vision: dict[str, Any] | None = None, **changes: Any) -> dict[str, Any]:
    return {**LLAVA, "vision_config": {**LLAVA["vision_config"], **(vision or {})}, **changes}


def llava_next(**changes: Any) -> dict[str, Any]:
    return {**FAMILIES["llava_next"].config, **changes}


def mistral3(vision: dict[str, Any] | None = None, **changes: Any) -> dict[str, Any]:
    vision = {**MISTRAL3["vision_config"], **(vision or {})}
    return {**MISTRAL3, "vision_config": vision, **changes}


def known(family: str, vision: dict[str, Any] | None = None, **changes: Any) -> dict[str, Any]:
    config = FAMILIES[family].config
    return {**config, "vision_config": {**config["vision_config"], **(vision or {})}, **changes}


def parameters_of_tower(model: ModelSpec) -> float:
    text = msgspec.structs.replace(model, pictures=None)
    whole, rest = (weights_bytes(each, "bfloat16", packed=False) for each in (model, text))
    return (whole - rest) / 2


def test_qwen25_of_seven_billion_parameters() -> None:
    model = read_model(QWEN)
    pictures = model.pictures
    assert pictures is not None
    assert (pictures.columns, pictures.window) == (1176, 4)
    assert pictures.axes == (0,) * 16 + (1,) * 24 + (2,) * 24
    assert (pictures.token_id, pictures.form.side) == (151655, 2)
    windows = pictures.tower.windows
    assert [layer for layer, window in enumerate(windows) if window is None] == [7, 15, 23, 31]
    assert set(windows) == {None, 64}
    assert parameters_of_tower(model) == pytest.approx(677e6, rel=0.01)
    assert served_as(model, picture_memory=0) == msgspec.structs.replace(model, pictures=None)


@pytest.mark.parametrize(
    ("family", "columns", "parameters"),
    [
        ("qwen2_vl", 1176, 675.8e6),
        ("qwen3_5", 1536, 456.0e6),
        ("qwen3_5_moe", 1536, 446.5e6),
        ("qwen3_vl", 1536, 576.4e6),
        ("qwen3_vl_moe", 1536, 538.5e6),
        ("llava", 588, 311.9e6),
        ("llava_next", 588, 311.9e6),
        ("mistral3", 588, 439.0e6),
        ("gemma3", 588, 421.3e6),
        ("gemma4", 768, 576.0e6),
        ("idefics3", 588, 431.8e6),
        ("smolvlm", 588, 434.2e6),
        ("internvl", 588, 331.6e6),
    ],
)
def test_towers_without_windows(family: str, columns: int, parameters: float) -> None:
    model = read_model(FAMILIES[family].config)
    assert model.pictures is not None
    assert (model.pictures.columns, model.pictures.window) == (columns, 0)
    assert set(model.pictures.tower.windows) == {None}
    assert parameters_of_tower(model) == pytest.approx(parameters, rel=0.001)


def test_results_of_deep_mergers_lie_beside_those_of_the_last() -> None:
    model = read_model(QWEN3)
    pictures = model.pictures
    assert pictures is not None
    assert [each.layer for each in pictures.merger.deep] == [8, 16, 24]
    assert pictures.result_size == 4 * 4096
    assert pictures.axes == (0, 1, 2) * 20 + (0,) * 4
    engine = engine_config(Path(), device="cuda", dtype="bfloat16")
    limits = picture_limits(model, engine, 100_000)
    assert limits is not None
    assert limits.num_blocks == engine.picture_memory // (64 * 4 * 4096 * 2)


def test_a_part_of_each_head_turns_in_the_layers_that_attend() -> None:
    pictures = read_model(FAMILIES["qwen3_5"].config).pictures
    assert pictures is not None
    assert (pictures.axes, pictures.token_id) == ((0, 1, 2) * 10 + (0, 1), 248056)
    assert pictures.merger.deep == ()


def qwen3(**vision: Any) -> dict[str, Any]:
    return {**QWEN3, "vision_config": {"out_hidden_size": 4096, **vision}}


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (qwen({"hidden_act": "gelu"}), 'vision_config: hidden_act must be "silu"'),
        (qwen({"hidden_size": 1000}), "multiple of 4"),
        (qwen({"out_hidden_size": 64}), "out_hidden_size must be that of the text part, 3584"),
        (qwen({"window_size": 20}), "window_size must hold a token"),
        (qwen({"fullatt_block_indexes": 7}), "must be a list of layers"),
        (qwen({"depth": 0}), "vision_config: depth must be a positive integer"),
        (qwen(rope_scaling={"type": "mrope", "mrope_section": [16, 24]}), "three numbers of 64"),
        ({**QWEN2, "vision_config": {"embed_dim": 1000}}, "embed_dim must be a multiple of 4"),
        ({**QWEN2, "vision_config": {"hidden_size": 64}}, "hidden_size must be that of the text"),
        ({**QWEN2, "vision_config": {"hidden_act": "snake"}}, "hidden_act must be one of"),
        (qwen3(rope_parameters={"rope_type": "yarn"}), "rope_parameters must be axial"),
        (qwen3(deepstack_visual_indexes=[8, 27]), "must be layers in their order"),
        (qwen3(deepstack_visual_indexes=[8, 1]), "must be layers in their order"),
        (qwen3(depth=50, deepstack_visual_indexes=[*range(36)]), "the text part has 36 layers"),
        ({**QWEN, "vision_config": 3}, "vision_config must be a table"),
        (llava({"hidden_size": 1000}), "hidden_size must be a multiple of num_attention_heads"),
        (llava({"image_size": 337}), "image_size must be a multiple of patch_size"),
        (llava({"hidden_act": "snake"}), "hidden_act must be one of"),
        (llava(projector_hidden_act="snake"), "projector_hidden_act must be one of"),
        (known("idefics3", scale_factor=3), r"squares of 3 \* 3 patches do not fill 26"),
        (known("smolvlm", scale_factor=0), "scale_factor must be a positive integer"),
        (known("internvl", downsample_ratio=0.3), r"downsample_ratio 0.3: squares of 0 \* 0"),
        (known("internvl", downsample_ratio=1 / 3), r"squares of 3 \* 3 patches do not fill 32"),
        (known("internvl", downsample_ratio=2.0), r"squares of 0 \* 0 patches do not fill 32"),
        (known("internvl", vision_feature_layer=25), "no layer of 24 is vision_feature_layer 25"),
        (known("internvl", {"norm_type": "batch"}), 'norm_type must be "layer_norm"'),
        (known("internvl", {"image_size": [448, 224]}), "image_size must be a positive integer"),
        (
            known("internvl", {"use_absolute_position_embeddings": False}),
            "use_absolute_position_embeddings must be true",
        ),
        (gemma3({"hidden_size": 1000}), "hidden_size must be a multiple of num_attention_heads"),
        (gemma4({"num_key_value_heads": 4}), "num_key_value_heads must be 16"),
        (gemma4({"position_embedding_size": 3359}), "must be at least 3360, got 3359"),
        (gemma4({"head_dim": 6}), "head_dim must be a multiple of 4"),
        (gemma4({"rope_parameters": {"rope_type": "yarn"}}), "rope_parameters must be axial"),
        (gemma4({"hidden_activation": "snake"}), "hidden_activation must be one of"),
        (gemma3(mm_tokens_per_image=250), r"mm_tokens_per_image 250: no such square of 64 \* 64"),
        (gemma3(mm_tokens_per_image=900), "mm_tokens_per_image 900"),
        (gemma3(mm_tokens_per_image=None), "mm_tokens_per_image None"),
        (llava(vision_feature_layer=-25), "no layer of 24 is vision_feature_layer -25"),
        (llava(vision_feature_layer=25), "no layer of 24 is vision_feature_layer 25"),
        (llava_next(image_grid_pinpoints=[[336, 500]]), "must be multiples of 336 pixels"),
        (llava_next(image_grid_pinpoints=[336]), "must be multiples of 336 pixels"),
        (llava_next(image_grid_pinpoints=[]), "must be multiples of 336 pixels"),
        (mistral3({"head_dim": 32}), "head_dim must be 64, got 32"),
        (mistral3({"num_attention_heads": 3}), "hidden_size must be a multiple of 4"),
        (mistral3({"patch_size": [14, 14]}), "patch_size must be a positive integer"),
        (mistral3({"rope_parameters": {"rope_type": "yarn"}}), "rope_type must be axial"),
        (mistral3(spatial_merge_size=0), "spatial_merge_size must be a positive integer"),
        (mistral3(vision_feature_layer=-30), "no layer of 24 is vision_feature_layer -30"),
    ],
)
def test_refused_by_name(config: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        read_model(config)


@pytest.mark.parametrize(
    "config",
    [
        qwen(image_token_id=152064),
        {key: value for key, value in QWEN.items() if key != "vision_config"},
        FAMILIES["glm4v"].config,
        llava({"model_type": "siglip_vision_model"}),  # whose every row is a patch
        llava({"model_type": "pixtral"}),  # whose every row is a patch
        llava({"model_type": "other"}),
        llava_next(vision_feature_select_strategy="full"),  # a row is no patch
        llava_next(vision_feature_layer=[-2, -5]),
        mistral3({"model_type": "other"}),
        mistral3(vision_feature_layer=[-1, -2]),
        mistral3(image_token_index=131072),
        llava(vision_feature_layer=[-2, -1]),
        llava(vision_feature_select_strategy="other"),
        llava(image_token_index=32064),
        known("idefics3", image_token_id=128259),
        known("internvl", vision_feature_select_strategy="full"),
        known("internvl", vision_feature_layer=[-1, -2]),
        gemma3(image_token_index=262208),
        gemma4(image_token_id=262144),
        FAMILIES["gemma4_unified"].config | {"image_token_id": 262144},
        gemma3({"model_type": "clip_vision_model"}),
    ],
)
def test_models_that_read_no_pictures_here(config: dict[str, Any]) -> None:
    assert read_model(config).pictures is None


def test_gemma4_of_one_tower_has_no_layers_before_it() -> None:
    config = FAMILIES["gemma4_unified"].config
    pictures = read_model(config).pictures
    assert pictures is not None
    assert (pictures.columns, pictures.tower.num_layers, pictures.joins) == (6912, 0, "all")
    assert parameters_of_tower(read_model(config)) == pytest.approx(49.9e6, rel=0.01)
    assert pictures.most_tokens == 1024  # of the window
    other = {**config, "vision_config": {"output_proj_dims": 64}}
    with pytest.raises(ValueError, match="output_proj_dims must be 3840"):
        read_model(other)


def test_which_layers_join_the_tokens_of_a_picture() -> None:
    model = read_model(GEMMA3)
    assert {of.joins_pictures for of in model.attentions.values()} == {True}
    large, small = GEMMA4, {**GEMMA4["text_config"], "use_bidirectional_attention": None}
    windowed = read_model(large).attentions.values()
    assert {(of.window is not None, of.joins_pictures) for of in windowed} == {
        (True, True),
        (False, False),
    }
    one = read_model({**GEMMA4, "text_config": small})
    assert one.pictures is not None
    assert not any(of.joins_pictures for of in one.attentions.values())
    assert not any(of.joins_pictures for of in read_model(LLAVA).attentions.values())
    limits = picture_limits(model, engine_config(Path(), max_step_tokens=8192), 8192)
    assert limits is not None
    assert limits.is_joined
    of_one_tower = read_model(FAMILIES["gemma4_unified"].config)
    limits = picture_limits(of_one_tower, engine_config(Path()), 8192)
    assert limits is not None
    assert limits.most_tokens == 1024


def test_memory_of_pictures_is_one_line() -> None:
    model = read_model(QWEN)
    engine = engine_config(Path(), device="cuda", dtype="bfloat16", max_step_tokens=8192)
    lines = {line.name: line.nbytes for line in memory_table(model, engine, 0)}
    assert engine.picture_memory < lines["pictures"] < 4 << 30
    none = msgspec.structs.replace(engine, picture_memory=0)
    assert "pictures" not in {line.name for line in memory_table(model, none, 0)}
    limits = picture_limits(model, engine, 100_000)
    assert limits is not None
    assert (limits.most_tokens, limits.blocks(65)) == (1 << 14, 2)
    short = picture_limits(model, engine, 9999)
    assert short is not None
    assert short.most_tokens == 9999
    said = picture_limits(model, msgspec.structs.replace(engine, picture_tokens=777), 100_000)
    assert said is not None
    assert said.most_tokens == 777
    much = picture_limits(model, msgspec.structs.replace(engine, picture_memory=8 << 30), 100_000)
    assert much is not None
    assert 40_000 < much.most_tokens < 100_000
    assert limits.num_blocks == engine.picture_memory // (64 * 3584 * 2)
    little = msgspec.structs.replace(engine, picture_memory=1000)
    with pytest.raises(ConfigError, match="one block alone takes 458752"):
        picture_limits(model, little, 100_000)


@pytest.mark.parametrize(
    ("layer", "strategy", "layers"),
    [(-2, "default", 23), ([-1], "full", 24), (1, "full", 1), (24, "default", 24)],
)
def test_layers_and_rows_that_llava_reads(layer: Any, strategy: str, layers: int) -> None:
    config = llava(vision_feature_layer=layer, vision_feature_select_strategy=strategy)
    pictures = read_model(config).pictures
    assert pictures is not None
    added = int(strategy == "full")
    assert pictures.tower.num_layers == layers
    assert (pictures.form, pictures.axes) == (PictureForm(added=added, tile=24), None)
    assert pictures.merger.skipped == 1 - added


@torch.inference_mode()
@pytest.mark.parametrize("strategy", ["default", "full"])
@pytest.mark.parametrize("layer", [-2, -1, 1])
def test_features_are_those_of_transformers(layer: int, strategy: Any, tmp_path: Path) -> None:
    def config(**text: Any) -> Any:
        made = llava_config(strategy, **text)
        made.vision_feature_layer = layer
        return made

    model: Any = random_model(config, LlavaForConditionalGeneration, **SIZES)
    read = read_config(save_model(model, tmp_path)).pictures
    picture = PICTURES[BEFORE["llava"] + "a"]
    assert read is not None
    weights = load_tower(tmp_path, read_config(tmp_path), torch.float32, CPU)
    sites = TowerSites(read.tower, first_layer=3)
    (found,) = encoded(Tower(read, weights, sites, CPU, 1024), [picture])
    (expected,) = model.get_image_features(picture.pixels[None]).pooler_output
    assert (found - expected).abs().max() < 1e-4


@torch.inference_mode()
@pytest.mark.parametrize("kind", ["llava_next", "llava_next_siglip", "llava_pixtral", "mistral3"])
def test_features_of_pictures_of_unlike_sizes(kind: str, tmp_path: Path) -> None:
    model: Any = make_pictured(kind, num_hidden_layers=1)
    read = read_config(save_model(model, tmp_path))
    assert read.pictures is not None
    weights = load_tower(tmp_path, read, torch.float32, CPU)
    sites = TowerSites(read.pictures.tower, first_layer=1)
    pictures = [PICTURES[BEFORE[kind] + name] for name in "abcde"]
    found = encoded(Tower(read.pictures, weights, sites, CPU, 1024), pictures)
    expected = model.get_image_features(**sized_inputs(pictures, model.config)).pooler_output
    for own, theirs in zip(found, expected, strict=True):
        assert (own - theirs).abs().max() < 1e-4


def encoded(tower: Tower, pictures: Sequence[Picture | TowerInput]) -> tuple[torch.Tensor, ...]:
    """Results of pictures that pass together."""
    work = tower.encode([TowerInput(each.patches, each.grid) for each in pictures])
    while True:
        try:
            next(work)
        except StopIteration as end:
            found: tuple[torch.Tensor, ...] = end.value
            return found


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(make_pictured(num_hidden_layers=1), tmp_path_factory.mktemp("tower"))


def changed(folder: Path, to: Path, rename: dict[str, str], **more: torch.Tensor) -> Path:
    """A copy whose tensors have other names, "" = none, and more of them."""
    tensors = load_file(folder / "model.safetensors")
    for old, new in rename.items():
        found = {name: name.replace(old, new) for name in tensors if old in name}
        for name, other in found.items():
            tensor = tensors.pop(name)
            if new:
                tensors[other] = tensor
    save_file({**tensors, **more}, to / "model.safetensors", {"format": "pt"})
    (to / "config.json").write_text((folder / "config.json").read_text())
    return to


def test_older_names_of_llavas_encoder(tmp_path: Path) -> None:
    new = save_model(make_pictured("llava", num_hidden_layers=1), tmp_path / "new")
    model = read_config(new)
    (tmp_path / "old").mkdir()
    rename = {"vision_tower.": "vision_tower.vision_model."}
    beside = {"vision_tower.vision_model.embeddings.position_ids": torch.arange(17)[None]}
    old = changed(new, tmp_path / "old", rename, **beside)
    first, again = (load_tower(each, model, torch.float32, CPU) for each in (new, old))
    assert torch.equal(first.body.embed, again.body.embed)
    assert torch.equal(first.body.lm_head.dequantised(), again.body.lm_head.dequantised())


def test_both_names_of_the_newline(tmp_path: Path) -> None:
    new = save_model(make_pictured("llava_next", num_hidden_layers=1), tmp_path / "new")
    model = read_config(new)
    (tmp_path / "old").mkdir()
    old = changed(new, tmp_path / "old", {"model.image_newline": "image_newline"})
    first, again = (load_tower(each, model, torch.float32, CPU) for each in (new, old))
    assert first.newline is not None
    assert again.newline is not None
    assert torch.equal(first.newline, again.newline)


def test_both_spellings_of_names(folder: Path, tmp_path: Path) -> None:
    model = read_config(folder)
    new = load_tower(folder, model, torch.float32, CPU)
    old = changed(folder, tmp_path, {"model.visual.": "visual."})
    again = load_tower(old, model, torch.float32, CPU)
    assert torch.equal(new.body.embed, again.body.embed)
    assert torch.equal(new.body.lm_head.dequantised(), again.body.lm_head.dequantised())


@pytest.mark.parametrize(
    ("rename", "words"),
    [
        ({"visual.blocks.2.attn.qkv.weight": ""}, r"1 missing: model.layers.2.attn.qkv.weight"),
        ({"visual.merger.ln_q": "visual.merger.other"}, r"1 missing.* 1 unexpected"),
    ],
)
def test_a_tower_that_is_not_whole(
    folder: Path, tmp_path: Path, rename: dict[str, str], words: str
) -> None:
    with pytest.raises(CheckpointError, match=words):
        load_tower(changed(folder, tmp_path, rename), read_config(folder), torch.float32, CPU)


def test_a_checkpoint_without_a_tower_serves_text(folder: Path, tmp_path: Path) -> None:
    driver = Driver(changed(folder, tmp_path, {"visual.": ""}))
    assert driver.executor.limits.pictures is None
    driver.close()


@given(st.integers(1, 9), st.integers(1, 9), st.integers(1, 4))
@settings(max_examples=30, deadline=None)
def test_patches_lie_as_in_transformers(height: int, width: int, window: int) -> None:
    grid = (1, 2 * height, 2 * width)
    of = torch.tensor([grid])
    assert patch_places(grid, 2).T.tolist() == get_vision_position_ids(of, 2).tolist()
    rows, factors = get_vision_interpolation_indices_and_weights(
        of, 3 * window, align_corners=True, spatial_merge_size=2
    )
    own_rows, own_factors = table_taps(grid, 2, 3 * window)
    assert own_rows.T.tolist() == rows.tolist()
    assert own_factors.T.tolist() == factors.tolist()
    tokens, ends = get_vision_window_index(of, 2, window * 2 * 4, 4)
    patches = (tokens[:, None] * 4 + torch.arange(4)).flatten().numpy()
    expected = {frozenset(part) for part in np.split(patches, ends[1:-1].tolist())}
    found = {frozenset(row[row >= 0].tolist()) for row in window_table(grid, 2, window)}
    assert found == expected


@torch.inference_mode()
@pytest.mark.parametrize("kind", ["qwen2_5_vl", "qwen3_vl", "llava", "llava_next", "mistral3"])
def test_pictures_together_and_in_blocks_are_as_alone(kind: str, tmp_path: Path) -> None:
    model = read_config(save_model(make_pictured(kind, num_hidden_layers=3), tmp_path))
    assert model.pictures is not None
    sites = TowerSites(model.pictures.tower, first_layer=3)
    parts = (model.pictures, load_tower(tmp_path, model, torch.float32, CPU), sites, CPU)
    pictures = [PICTURES[BEFORE.get(kind, "") + name] for name in "aecd"]
    together = encoded(Tower(*parts, 1024), pictures)
    for number, picture in enumerate(pictures):
        for chunk in (1024, 24, 1):
            (alone,) = encoded(Tower(*parts, chunk), [picture])
            assert (together[number] - alone).abs().max() < 1e-5


def steps_of(piece: TowerPiece) -> list[RowSpan]:
    return [RowSpan(step[0].rows.begin, step[-1].rows.end) for step in piece.steps]


@given(
    st.lists(st.tuples(st.integers(1, 9), st.integers(1, 9), st.integers(0, 1)), min_size=1),
    st.integers(1, 90),
    st.integers(1, 3),
)
@settings(max_examples=60, deadline=None)
def test_work_of_a_tower_is_every_row_once(
    sizes: list[tuple[int, int, int]], chunk: int, window: int
) -> None:
    parts = [TowerPart(2 * high, 2 * wide, 0 if window else row) for high, wide, row in sizes]
    work = plan_work(parts, WorkSizes(chunk, 50, 2, window))
    ends = [*accumulate(part.rows for part in parts)]
    for pieces in work:
        products = [rows for piece in pieces for rows in piece.products]
        steps = [rows for piece in pieces for rows in steps_of(piece)]
        for each in (products, steps):
            assert [rows.begin for rows in each] == [0, *(rows.end for rows in each[:-1])]
            assert each[-1].end == ends[-1]
        largest = max(part.rows for part in parts)
        stripe = 4 * window * max(part.width for part in parts)
        assert max(rows.size for rows in products) <= max(
            chunk, largest if len(parts) > 1 else 0, stripe
        )
    whole = [sight for piece in work.whole for step in piece.steps for sight in step]
    assert {sight.keys.end for sight in whole} == {*ends}
    for piece in work.windowed:
        for sight in (sight for step in piece.steps for sight in step):
            assert sight.windows is not None
            assert sorted(sight.windows.places.tolist()) == [*range(sight.rows.size)] or (
                sight.windows.seen is not None
            )
