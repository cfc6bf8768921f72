"""Qwen2.5-VL's encoder of pictures at its real widths, with few layers, on a GPU in bfloat16.

The error against float32 is held to that of transformers and PEFT in bfloat16, on the same GPU.
"""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel
from transformers import AutoConfig, AutoModelForImageTextToText

from loraplex.launcher.known_models import served_families
from loraplex.server.model.checkpoint.checkpoint import read_config
from loraplex.server.model.ops.memory import picture_limits, pictures_bytes
from loraplex.server.model.tower.tower import Tower, TowerInput
from loraplex.server.protocol import Grid
from tests.kernels.batches import on_gpu
from tests.server.model.driver import Driver, engine_config
from tests.server.model.families.test_gpu_real_widths import SLACK, VOCAB
from tests.server.model.hub_models import add_adapter
from tests.server.model.slabs import pack

pytestmark = [*on_gpu, pytest.mark.filterwarnings("ignore")]
LAYERS = 4
GRIDS: list[Grid] = [(1, 34, 52), (1, 8, 6), (1, 60, 44)]


def made(folder: Path, device: str, **vision: Any) -> PeftModel:
    """The model in float32, which is saved, and an adapter on all matrices."""
    known = copy.deepcopy(served_families()["qwen2_5_vl"].config)
    few = {"depth": LAYERS, "fullatt_block_indexes": [1, 3]}
    known["vision_config"] = {**known["vision_config"], **few, **vision}
    ids = {"image_token_id": 5, "video_token_id": 6, "vision_start_token_id": 7}
    ids |= {"bos_token_id": 1, "eos_token_id": 2, "vocab_size": VOCAB, "num_hidden_layers": 1}
    torch.manual_seed(1)
    config = AutoConfig.for_model(**{**known, **ids, "torch_dtype": "float32"})
    with torch.device(device):
        make: Any = AutoModelForImageTextToText.from_config
        base = make(config)
    base.train(False)
    base.save_pretrained(folder)
    return add_adapter(base, "one", LoraConfig(r=16, target_modules="all-linear"), 1)


def patches(device: str, columns: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    return [
        torch.randn(height * width, columns, generator=generator).to(device)
        for _, height, width in GRIDS
    ]


@torch.inference_mode()
def features(peft: PeftModel, given: list[torch.Tensor], dtype: torch.dtype) -> torch.Tensor:
    found = peft.get_base_model().get_image_features(
        torch.cat(given).to(dtype), torch.tensor(GRIDS, device=given[0].device)
    )
    return torch.cat(found.pooler_output).float()


def encoded(tower: Tower, pictures: list[TowerInput]) -> torch.Tensor:
    work = tower.encode(pictures)
    while True:
        try:
            next(work)
        except StopIteration as end:
            return torch.cat(end.value).float()


def rms(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found - expected).square().mean().sqrt())


def hold_errors(folder: Path, device: str, **vision: Any) -> None:
    peft = made(folder, device, **vision)
    given = patches(device, 1176)
    driver = Driver(folder, device=device, dtype="bfloat16", adapter_memory=256 << 20)
    layout, slab = pack(peft, "one", dtype="bfloat16")
    assert driver.load(0, layout, slab, 0).error is None
    store, table = driver.executor._pictures, driver.executor._table
    assert store is not None
    for slot in (0, -1):
        lora = table.of_tower(slot, 1.0)
        with torch.inference_mode():
            inputs = [
                TowerInput(each.bfloat16(), grid, lora)
                for each, grid in zip(given, GRIDS, strict=True)
            ]
            ours = encoded(store._tower, inputs)
        half = copy.deepcopy(peft).bfloat16()
        if slot < 0:
            with peft.disable_adapter(), half.disable_adapter():
                expected = features(peft, given, torch.float32)
                theirs = features(half, given, torch.bfloat16)
        else:
            expected = features(peft, given, torch.float32)
            theirs = features(half, given, torch.bfloat16)
        assert rms(ours, expected) <= SLACK * rms(theirs, expected)
    driver.close()


def test_errors_are_those_of_transformers(tmp_path: Path) -> None:
    hold_errors(tmp_path, "cuda")


@torch.inference_mode()
def test_a_picture_of_the_largest_size_in_blocks(tmp_path: Path) -> None:
    made(tmp_path, "cuda")
    model = read_config(tmp_path)
    limits = picture_limits(model, engine_config(tmp_path, device="cuda", dtype="bfloat16"), 99_999)
    assert limits is not None
    driver = Driver(tmp_path, device="cuda", dtype="bfloat16", max_context=None)
    store = driver.executor._pictures
    assert store is not None
    grid = limits.form.largest(limits.most_tokens)
    whole = torch.randn(limits.form.patches(grid), limits.columns, device="cuda").bfloat16()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    found = encoded(store._tower, [TowerInput(whole, grid)])
    assert found.isfinite().all()
    config = engine_config(tmp_path, device="cuda", dtype="bfloat16", max_context=99_999)
    most = pictures_bytes(model, config) - config.picture_memory
    assert torch.cuda.max_memory_allocated() - before + whole.nbytes <= most
    driver.close()
