"""Adapters on layers with states, as Unsloth and mlx-lm write them: the same bytes, or refused."""

import json
from pathlib import Path
from typing import NamedTuple

import pytest
from peft import LoraConfig, PeftModel
from safetensors.torch import load_file, save_file

from loraplex.adapters.base import BaseSpec
from loraplex.adapters.errors import AdapterError
from loraplex.adapters.peft.validate import AdapterLimits
from loraplex.launcher.convert.convert import ConversionOptions, convert_folder
from tests.launcher.convert.folders import Tensors, mlx_config
from tests.server.model.families.variant import SEVEN
from tests.server.model.families.variants import VARIANTS
from tests.server.model.hub_models import add_adapter, make_model
from tests.server.model.slabs import pack_folder, spec_of

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")
WEIGHTS, CONFIG = "adapter_model.safetensors", "adapter_config.json"
PREFIX = "base_model.model.model."
SPLIT = ("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a")
FUSED = ("in_proj_qkvz", "in_proj_ba")
OF_THREE = ("in_proj_q", "in_proj_k", "in_proj_v")
exhaustive = pytest.mark.exhaustive
# A row of parity's table -> what mlx-lm has before `layers`, and a layer's own module there.
OF_MLX = {
    "qwen3.5": ("language_model.model.", "model.layers.0.linear_attn.in_proj_qkv"),
    "qwen3-next": ("model.", "model.layers.0.linear_attn.in_proj_qkvz"),
    "lfm2": ("model.", "model.layers.0.conv.in_proj"),
    "granite-h": ("model.", "model.layers.0.mamba.in_proj"),
    "falcon-h1": ("model.", "model.layers.0.mamba.in_proj"),
    "nemotron-h": ("backbone.", "model.layers.0.mixer.in_proj"),
}


def mixers(row: str) -> list[str]:
    """Names of the mixers' matrices."""
    return [name for name in VARIANTS[row].targets if "_proj" in name and name not in SEVEN[4:]]


class Saved(NamedTuple):
    """An adapter that PEFT saved, on matrices of mixers alone, and the base."""

    folder: Path
    base: BaseSpec

    @classmethod
    def of(cls, row: str, folder: Path) -> "Saved":
        model: PeftModel = add_adapter(
            make_model(row), "one", LoraConfig(r=2, lora_alpha=6, target_modules=mixers(row)), 1
        )
        model.save_pretrained(folder, selected_adapters=["one"])
        return cls(folder / "one", spec_of(model))

    @property
    def tensors(self) -> Tensors:
        return load_file(self.folder / WEIGHTS)

    def rename(self, tensors: Tensors, targets: object = None) -> None:
        """Writes the adapter with other tensors, and other `target_modules` unless they are
        None."""
        save_file({name: of.contiguous() for name, of in tensors.items()}, self.folder / WEIGHTS)
        config = json.loads((self.folder / CONFIG).read_text())
        if targets is not None:
            config["target_modules"] = targets
        (self.folder / CONFIG).write_text(json.dumps(config))

    def packed(self) -> bytes:
        return pack_folder(self.folder, self.base)[1]


def as_mlx(row: str, saved: Saved, source: Path) -> None:
    """Writes an adapter as mlx-lm does."""
    body, module = OF_MLX[row]
    sides = {".lora_A.weight": ".lora_a", ".lora_B.weight": ".lora_b"}
    tensors: Tensors = {}
    for name, tensor in saved.tensors.items():
        end = next(end for end in sides if name.endswith(end))
        path = name.removesuffix(end).removeprefix(PREFIX)
        tensors[body + path + sides[end]] = tensor.T.contiguous()
    assert f"{body}{module.removeprefix('model.')}.lora_a" in tensors
    source.mkdir()
    save_file(tensors, source / "adapters.safetensors")
    config = mlx_config(lora_parameters={"rank": 2, "scale": 3.0, "dropout": 0.0})
    (source / CONFIG).write_text(json.dumps(config))


@pytest.mark.parametrize(
    "row",
    [
        name if name in ("qwen3.5", "nemotron-h") else pytest.param(name, marks=exhaustive)
        for name in OF_MLX
        if name != "falcon-h1"
    ],
)
def test_as_mlx_writes_them(row: str, tmp_path: Path) -> None:
    saved, source, out = Saved.of(row, tmp_path), tmp_path / "mlx", tmp_path / "converted"
    expected = saved.packed()
    as_mlx(row, saved, source)
    limits = AdapterLimits(allow_other_base=True)
    convert_folder(source, out, saved.base, limits, ConversionOptions())
    assert saved._replace(folder=out).packed() == expected


@pytest.mark.parametrize(
    ("row", "knows_base", "words"),
    [
        ("falcon-h1", True, "ssm_multipliers"),
        pytest.param("falcon-h1", False, "--base MODEL", marks=exhaustive),
        pytest.param("granite-h", False, "mamba.in_proj.*--base MODEL", marks=exhaustive),
    ],
)
def test_factors_within_matrices_of_mlx_are_refused(
    row: str, knows_base: bool, words: str, tmp_path: Path
) -> None:
    """mlx-lm's Falcon-H1 computes something else with the same adapter."""
    saved, source = Saved.of(row, tmp_path), tmp_path / "mlx"
    as_mlx(row, saved, source)
    limits, base = AdapterLimits(allow_other_base=True), saved.base if knows_base else None
    with pytest.raises(AdapterError, match=words):
        convert_folder(source, tmp_path / "converted", base, limits, ConversionOptions())


@pytest.mark.parametrize("row", ["qwen3.5", pytest.param("qwen3-next", marks=exhaustive)])
def test_as_unsloth_writes_them(row: str, tmp_path: Path) -> None:
    """It trains in the model for images, and names what it targets by a pattern."""
    saved = Saved.of(row, tmp_path)
    expected = saved.packed()
    names = "|".join((*FUSED, *SPLIT, "out_proj", "q_proj", "k_proj", "v_proj", "o_proj"))
    pattern = (
        r"(?:.*?(?:language|text).*?(?:self_attn|linear_attn|attention|attn|mixer|mlp).*?"
        rf"(?:{names}).*?)|(?:\bmodel\.layers\.[\d]{{1,}}\.(?:self_attn|mlp)\.(?:(?:q_proj)))"
    )
    within = f"{PREFIX}language_model."
    renamed = {name.replace(PREFIX, within, 1): of for name, of in saved.tensors.items()}
    saved.rename(renamed, pattern)
    assert saved.packed() == expected


@pytest.mark.parametrize(
    ("row", "own", "others"),
    [
        ("qwen3.5", SPLIT[:2], FUSED[:1]),
        ("qwen3-next", FUSED[1:], SPLIT[2:]),
        pytest.param("qwen3.5", SPLIT[2:], FUSED[1:], marks=exhaustive),
        pytest.param("qwen3.5", SPLIT[:1], OF_THREE, marks=exhaustive),
        pytest.param("qwen3-next", FUSED[:1], SPLIT[:2], marks=exhaustive),
        pytest.param("olmo-hybrid", ("q_proj",), ("q_conv1d",), marks=exhaustive),
    ],
)
def test_another_spelling_is_refused_by_its_name(
    row: str, own: tuple[str, ...], others: tuple[str, ...], tmp_path: Path
) -> None:
    """Whose rows lie in another order than the base's, or whose ranks are several."""
    saved = Saved.of(row, tmp_path)
    path = "layers.0.linear_attn."
    kept = {
        name: of
        for name, of in saved.tensors.items()
        if not any(f"{path}{each}." in name for each in own)
    }
    sample = next(of for name, of in saved.tensors.items() if f"{path}{own[0]}.lora_A" in name)
    for other in others:
        module = f"{PREFIX}{path}{other}"
        kept[f"{module}.lora_A.weight"] = sample.clone()
        kept[f"{module}.lora_B.weight"] = sample.T.clone()
    saved.rename(kept, [*mixers(row), *others])
    with pytest.raises(AdapterError) as caught:
        saved.packed()
    said = "; ".join(violation.message for violation in caught.value.violations)
    assert all(f"{path}{other}" in said for other in others)
