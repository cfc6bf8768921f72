"""A merged adapter's true deltas are those of PEFT's `add_weighted_adapter`."""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from peft.tuners.lora import LoraLayer
from transformers import LlamaConfig, LlamaForCausalLM

from loraplex.adapters.judge import judge_folder
from loraplex.adapters.merge.job import MergeJob, RandomKeeper, draw_seed, run_job, write_job
from loraplex.adapters.merge.plan import plan_merge
from loraplex.adapters.merge.recipe import MergeMember, MergeRecipe, make_recipe
from loraplex.adapters.peft.validate import AdapterLimits
from loraplex.adapters.safetensors.file import open_weights
from tests.adapter_folders import small_base
from tests.adapters.refusals import violation_codes
from tests.grids import sparse

pytestmark = pytest.mark.filterwarnings("ignore")
BASE = small_base(num_layers=2, hidden=48, inner=64, kv=24, names=("base",))
LIMITS = AdapterLimits()
Deltas = dict[str, npt.NDArray[np.float32]]
# Different ranks, scales and targets, and ranks that differ within one adapter.
MEMBERS: tuple[dict[str, Any], ...] = (
    {"r": 4, "lora_alpha": 12, "target_modules": ["q_proj", "v_proj", "down_proj"]},
    {"r": 6, "lora_alpha": 6, "target_modules": ["q_proj", "up_proj"], "use_rslora": True},
    {
        "r": 5,
        "lora_alpha": 2,
        "target_modules": ["q_proj", "v_proj", "lm_head"],
        "rank_pattern": {"layers.1.self_attn.q_proj": 3},
        "alpha_pattern": {"v_proj": 7},
    },
)
EMBEDDINGS: tuple[dict[str, Any], ...] = (
    {"r": 2, "target_modules": ["embed_tokens", "q_proj"]},
    {"r": 3, "target_modules": ["embed_tokens"]},
)


def model() -> LlamaForCausalLM:
    config = LlamaConfig(
        vocab_size=BASE.vocab_size,
        hidden_size=BASE.hidden_size,
        intermediate_size=64,
        num_hidden_layers=BASE.num_layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=False,
    )
    torch.manual_seed(0)
    made = LlamaForCausalLM(config)
    made.train(False)
    return made


def published(folder: Path, index: int, options: dict[str, Any]) -> Path:
    peft = get_peft_model(model(), LoraConfig(task_type="CAUSAL_LM", **options))
    torch.manual_seed(index)
    with torch.no_grad():
        for name, parameter in peft.named_parameters():
            if "lora_" in name:
                parameter.normal_()
    peft.save_pretrained(folder, save_embedding_layers=False)
    config = json.loads((folder / "adapter_config.json").read_text())
    (folder / "adapter_config.json").write_text(
        json.dumps(config | {"base_model_name_or_path": "base"})
    )
    return folder


def publish(tmp_path: Path, members: Sequence[dict[str, Any]]) -> list[Path]:
    return [published(tmp_path / f"m{i}", i, options) for i, options in enumerate(members)]


def recipe_of(folders: Sequence[Path], weights: Sequence[float], **options: Any) -> MergeRecipe:
    digests = [judge_folder(folder, BASE, LIMITS).manifest.digest for folder in folders]
    pairs = zip(digests, weights, strict=True)
    members = [MergeMember(digest, weight) for digest, weight in pairs]
    strategy, density = options.get("strategy", "linear"), options.get("density", 1.0)
    return make_recipe(members, strategy, density, options.get("sign", "total"))


def merged_by_us(tmp_path: Path, recipe: MergeRecipe, folders: Sequence[Path]) -> Deltas:
    """Of the merged adapter, judged as a published one is."""
    by_digest = {judge_folder(f, BASE, LIMITS).manifest.digest: f for f in folders}
    work = tmp_path / "work"
    work.mkdir()
    contents = [by_digest[member.digest] for member in recipe.members]
    write_job(work, MergeJob(recipe, BASE, LIMITS), contents)
    run_job(work)
    return deltas_of(work)


def deltas_of(folder: Path) -> Deltas:
    adapter = judge_folder(folder, BASE, LIMITS).tensors
    found: Deltas = {}
    with open_weights(folder / "adapter_model.safetensors") as weights:
        for module in adapter.ordinary:
            a, b = (
                weights.read(tensor).view("<f4").reshape(tensor.shape)
                for tensor in (module.a, module.b)
            )
            found[f"{module.layer}.{module.module}"] = module.scale * (b @ a)
    return found


def merged_by_peft(
    folders: Sequence[Path], weights: Sequence[float], kind: str, **options: Any
) -> tuple[Deltas, int]:
    names = [f"m{index}" for index in range(len(folders))]
    peft = PeftModel.from_pretrained(model(), str(folders[0]), names[0])
    for folder, name in zip(folders[1:], names[1:], strict=True):
        peft.load_adapter(str(folder), name)
    peft.add_weighted_adapter(names, list(weights), "merged", kind, **options)
    return deltas_of_peft(peft), peft.peft_config["merged"].r


def deltas_of_peft(peft: PeftModel) -> Deltas:
    found: Deltas = {}
    for path, module in lora_layers(peft):
        a, b = factors(module, "merged")
        if (b @ a).any():
            found[key_of(path)] = (module.scaling["merged"] * (b @ a)).detach().numpy()
    return found


def lora_layers(peft: PeftModel) -> Iterator[tuple[str, LoraLayer]]:
    for path, module in peft.base_model.model.named_modules():
        if isinstance(module, LoraLayer):
            yield path, module


def factors(module: LoraLayer, name: str) -> tuple[torch.Tensor, torch.Tensor]:
    if name in module.lora_embedding_A:
        return module.lora_embedding_A[name], module.lora_embedding_B[name]
    return module.lora_A[name].weight, module.lora_B[name].weight


def key_of(path: str) -> str:
    layer = next((part for part in path.split(".") if part.isdigit()), "-1")
    return f"{layer}.{path.rpartition('.')[2]}"


def assert_close(ours: Deltas, theirs: Deltas) -> None:
    assert set(ours) == set(theirs)
    assert ours
    for key, delta in theirs.items():
        np.testing.assert_allclose(ours[key], delta, atol=2e-5 * np.abs(delta).max(), err_msg=key)


@pytest.mark.parametrize("weights", [(1.0, 1.0, 1.0), (0.3, -1.5, 0.75), (0.0, 2.0, 0.5)])
def test_linear_is_cat(weights: tuple[float, ...], tmp_path: Path) -> None:
    folders = publish(tmp_path, MEMBERS)
    ours = merged_by_us(tmp_path, recipe_of(folders, weights), folders)
    theirs, _ = merged_by_peft(folders, weights, "cat")
    assert_close(ours, theirs)


def test_linear_merges_embeddings(tmp_path: Path) -> None:
    folders = publish(tmp_path, EMBEDDINGS)
    ours = merged_by_us(tmp_path, recipe_of(folders, (0.5, 2.0)), folders)
    assert "-1.embed_tokens" in ours
    assert_close(ours, merged_by_peft(folders, (0.5, 2.0), "cat")[0])


@pytest.mark.parametrize(("density", "sign"), sparse([0.2, 0.5, 1.0], ["total", "frequency"]))
def test_ties_is_ties_svd(density: float, sign: Any, tmp_path: Path) -> None:
    folders, weights = publish(tmp_path, MEMBERS), (0.5, -1.25, 0.75)
    recipe = recipe_of(folders, weights, strategy="ties", density=density, sign=sign)
    ours = merged_by_us(tmp_path, recipe, folders)
    theirs, rank = merged_by_peft(
        folders, weights, "ties_svd", density=density, majority_sign_method=sign
    )
    assert rank == 6
    assert_close(ours, theirs)


@pytest.mark.parametrize("strategy", ["dare_linear", "dare_ties"])
def test_dare_without_dropping_is_peft_exactly(strategy: Any, tmp_path: Path) -> None:
    folders, weights = publish(tmp_path, MEMBERS), (0.5, 1.25, -0.75)
    recipe = recipe_of(folders, weights, strategy=strategy, density=1.0)
    ours = merged_by_us(tmp_path, recipe, folders)
    assert_close(ours, merged_by_peft(folders, weights, f"{strategy}_svd", density=1.0)[0])


@pytest.mark.parametrize("members", [MEMBERS, EMBEDDINGS], ids=["linear", "embeddings"])
@pytest.mark.parametrize("strategy", ["dare_linear", "dare_ties"])
def test_dare_with_our_masks_is_peft(
    strategy: Any,
    members: Sequence[dict[str, Any]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    folders, weights = publish(tmp_path, members), (0.5, 1.25, -0.75)[: len(members)]
    recipe = recipe_of(folders, weights, strategy=strategy, density=0.4)
    masks = masks_in_peft_order(folders, recipe)
    # PEFT draws with torch.bernoulli, once a module and member.
    monkeypatch.setattr(torch, "bernoulli", lambda values: next(masks))
    theirs, _ = merged_by_peft(folders, weights, f"{strategy}_svd", density=0.4)
    assert next(masks, None) is None
    assert_close(merged_by_us(tmp_path, recipe, folders), theirs)


def masks_in_peft_order(folders: Sequence[Path], recipe: MergeRecipe) -> Iterator[torch.Tensor]:
    peft = PeftModel.from_pretrained(model(), str(folders[0]), "m0")
    for index, folder in enumerate(folders[1:], 1):
        peft.load_adapter(str(folder), f"m{index}")
    masks = []
    for path, module in lora_layers(peft):
        for index in range(len(folders)):
            if f"m{index}" in module.lora_A or f"m{index}" in module.lora_embedding_A:
                a, b = factors(module, f"m{index}")
                keeper = RandomKeeper(recipe.density, draw_seed(recipe, path, str(index)))
                mask = torch.from_numpy(keeper.mask((len(b), a.shape[1])).astype(np.float32))
                masks.append(mask.T if module.lora_embedding_A else mask)
    return iter(masks)


def test_one_adapter_is_merged_linearly_as_in_peft(tmp_path: Path) -> None:
    folders = publish(tmp_path, MEMBERS[:1])
    recipe = recipe_of(folders, (0.7,), strategy="ties", density=0.3)
    assert recipe.strategy == "linear"
    ours = merged_by_us(tmp_path, recipe, folders)
    assert_close(ours, merged_by_peft(folders, (0.7,), "ties_svd", density=0.3)[0])


@pytest.mark.parametrize(
    "options",
    [
        {"use_dora": True},
        {"lora_bias": True},
        {"modules_to_save": ["lm_head"]},
        {"trainable_token_indices": [3]},
    ],
    ids=lambda options: next(iter(options)),
)
def test_what_is_more_than_a_delta_is_not_merged(options: dict[str, Any], tmp_path: Path) -> None:
    folder = published(tmp_path / "a", 1, {"r": 2, "target_modules": ["q_proj"], **options})
    tensors = judge_folder(folder, BASE, LIMITS).tensors
    recipe = make_recipe([MergeMember("1" * 64, 2.0)], "linear", 1.0, "total")
    codes = violation_codes(lambda: plan_merge(recipe, [tensors], BASE, LIMITS))
    assert codes == {"unsupported_merge"}


def test_peft_merges_no_lengths(tmp_path: Path) -> None:
    """It gives what it merges the lengths of the base's own rows."""
    options = {"r": 2, "target_modules": ["q_proj"], "use_dora": True}
    folder = published(tmp_path / "dora", 1, options)
    peft = PeftModel.from_pretrained(model(), str(folder), "m0")
    peft.add_weighted_adapter(["m0"], [1.0], "merged", "linear")
    for _, module in lora_layers(peft):
        lengths = module.lora_magnitude_vector["merged"].weight
        torch.testing.assert_close(lengths, module.get_base_layer().weight.norm(dim=1))
