"""Known encoders' real widths, few layers and tokens of the vocabulary, on a GPU in bfloat16.

The error against float32 is held to that of transformers and PEFT in bfloat16, on the same GPU.
"""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel
from transformers import AutoConfig, AutoModel

from loraplex.launcher.known_models import served_families
from loraplex.server.model.families.registry import read_model
from loraplex.server.protocol import VectorParams
from tests.kernels.batches import on_gpu
from tests.server.model.driver import Driver, Stream, generate
from tests.server.model.families.test_gpu_real_widths import SLACK, VOCAB
from tests.server.model.hub_models import add_adapter
from tests.server.model.slabs import pack

pytestmark = [*on_gpu, pytest.mark.filterwarnings("ignore")]
NAMES = [
    name
    for name, known in served_families().items()
    if known.config and not read_model(known.config).is_causal
]
LENGTHS = (1, 7, 40, 100, 300, 500)


def made(name: str, device: str, folder: Path) -> PeftModel:
    """The base in float32, which is saved, and an adapter on all matrices."""
    known = served_families()[name].config
    layers = {"n_layers" if name == "distilbert" else "num_hidden_layers": 3}
    special = {"pad_token_id": 1, "bos_token_id": 0, "eos_token_id": 2, "torch_dtype": "float32"}
    if name == "modernbert":
        special |= {"cls_token_id": 0, "sep_token_id": 2}
    torch.manual_seed(1)
    config = AutoConfig.for_model(**{**known, **layers, **special, "vocab_size": VOCAB})
    with torch.device(device):
        make: Any = AutoModel.from_config
        base = make(config, attn_implementation="eager")
    base.save_pretrained(folder)
    return add_adapter(base, "one", LoraConfig(r=16, target_modules="all-linear"), 1)


def texts() -> list[list[int]]:
    seeded = [torch.Generator().manual_seed(n) for n in LENGTHS]
    return [
        torch.randint(3, VOCAB, (n,), generator=g).tolist()
        for n, g in zip(LENGTHS, seeded, strict=True)
    ]


def by_transformers(peft: PeftModel, device: str) -> torch.Tensor:
    """Means of each text, with the adapter and without."""
    found = []
    with torch.inference_mode():
        for ids in texts():
            given = {"input_ids": torch.tensor([ids], device=device)}
            found.append(peft(**given).last_hidden_state[0].float().mean(0).cpu())
            with peft.disable_adapter():
                found.append(peft(**given).last_hidden_state[0].float().mean(0).cpu())
    return torch.stack(found)


def by_the_gpu_path(folder: Path, peft: PeftModel, device: str, dtype: Any) -> torch.Tensor:
    driver = Driver(folder, device=device, dtype=dtype, max_step_tokens=2048)
    layout, slab = pack(peft, "one", dtype=dtype)
    assert driver.load(0, layout, slab, 0).error is None
    wish = VectorParams(pooling="mean")
    streams = [
        Stream(driver, 2 * n + i, ids, slot=slot).read_for(wish)
        for n, ids in enumerate(texts())
        for i, slot in enumerate((0, -1))
    ]
    generate(driver, streams, 0, 512)
    found = torch.stack([torch.tensor(stream.vector) for stream in streams])
    driver.close()
    return found


def error(found: torch.Tensor, exact: torch.Tensor) -> float:
    return float((found.double() - exact.double()).square().mean().sqrt())


def assert_as_near(
    name: str, folder: Path, device: str, dtype: str, bound: Callable[[float], float]
) -> None:
    peft = made(name, device, folder)
    exact = by_transformers(peft, device)
    found = by_the_gpu_path(folder, peft, device, dtype)
    rounded = copy.deepcopy(peft).to(getattr(torch, dtype))
    assert error(found, exact) <= bound(error(by_transformers(rounded, device), exact))


@pytest.mark.parametrize("name", NAMES)
def test_as_near_as_transformers(name: str, tmp_path: Path) -> None:
    assert_as_near(name, tmp_path, "cuda", "bfloat16", lambda theirs: SLACK * theirs)
