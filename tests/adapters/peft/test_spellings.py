"""Tensor names as other savers and models spell them: what PEFT computes, or refused by name."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from peft import PeftModel
from safetensors.torch import load_file, save_file
from transformers import (
    CLIPVisionConfig,
    LlavaConfig,
    LlavaForConditionalGeneration,
)

from loraplex.adapters.base import base_modules
from loraplex.adapters.judge import judge_folder
from loraplex.adapters.peft.tensor_names import NAMINGS, parse_tensor_name
from tests.adapters.refusals import refusal, violation_codes
from tests.adapters.tiny_llama import (
    BASE,
    CONFIG,
    IDS,
    WEIGHTS,
    assert_equal,
    causal,
    logits_of_peft,
    save,
)

pytestmark = pytest.mark.filterwarnings("ignore")
Rename = Callable[[str], str]


def larger() -> LlavaForConditionalGeneration:
    """A vision-language model with the weights of `causal` within."""
    vision = CLIPVisionConfig(
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        image_size=8,
        patch_size=4,
    )
    made = LlavaForConditionalGeneration(
        LlavaConfig(vision_config=vision, text_config=CONFIG, image_token_index=63)
    )
    made.model.language_model.load_state_dict(causal().model.state_dict())
    made.lm_head.load_state_dict(causal().lm_head.state_dict())
    made.train(False)
    return made


def logits_of_inner(folder: Path) -> Any:
    model = causal()
    PeftModel.from_pretrained(model.model, str(folder))
    with torch.no_grad():
        return model(IDS).logits


def logits_of_larger(folder: Path) -> Any:
    with torch.no_grad():
        return PeftModel.from_pretrained(larger(), str(folder))(IDS).logits


def rename(folder: Path, change: Rename) -> None:
    tensors = load_file(folder / WEIGHTS)
    renamed = {change(name): tensor for name, tensor in tensors.items()}
    assert len(renamed) == len(tensors)
    save_file(renamed, folder / WEIGHTS, metadata={"format": "pt"})


def adapter_name(name: str) -> Rename:
    def change(found: str) -> str:
        if "lora_embedding" in found:
            return f"{found}.{name}"
        return found.replace(".weight", f".{name}.weight")

    return change


SPELLINGS: dict[str, Rename] = {
    "torch.compile": lambda n: n.replace("base_model.", "_orig_mod.base_model."),
    "torch.compile of each layer": lambda n: n.replace(".0.", ".0._orig_mod."),
    "FSDP": lambda n: "_fsdp_wrapped_module." + n.replace(".mlp", "._fsdp_wrapped_module.mlp"),
    "checkpointed": lambda n: n.replace(".self_attn", "._checkpoint_wrapped_module.self_attn"),
    "DDP or DeepSpeed": lambda n: "module." + n,
    "Lightning": lambda n: "_forward_module." + n,
    "several": lambda n: "module._orig_mod." + n.replace("model.model", "model._orig_mod.model"),
    "no prefix": lambda n: n.removeprefix("base_model.model."),
    "default adapter": adapter_name("default"),
    "named adapter": adapter_name("my-adapter_2"),
}


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_spellings_of_one_adapter_answer_alike(spelling: str, tmp_path: Path) -> None:
    targets = ["q_proj", "down_proj", "embed_tokens", "lm_head"]
    folder = save(tmp_path, causal(), target_modules=targets, rank_pattern={"q_proj": 3})
    expected = logits_of_peft(folder)
    rename(folder, SPELLINGS[spelling])
    assert_equal(expected, folder)


INNER: dict[str, dict[str, Any]] = {
    "names": {"target_modules": ["q_proj", "up_proj", "embed_tokens"]},
    "all linear": {"target_modules": "all-linear"},
    "pattern of the inner model": {"target_modules": r"layers\.\d+\.self_attn\.(q|v)_proj"},
    "whole path": {"target_modules": ["layers.1.mlp.up_proj", "k_proj"]},
    "layers": {
        "target_modules": ["q_proj"],
        "layers_to_transform": [0, 2],
        "layers_pattern": "layers",
    },
    "ranks": {
        "target_modules": ["q_proj", "v_proj"],
        "rank_pattern": {"^layers.0.self_attn.q_proj": 3, "^model.layers.1.self_attn.q_proj": 5},
        "alpha_pattern": {"^layers.2": 1, "^layers.2.self_attn.v_proj": 32},
        "use_rslora": True,
    },
    "excluded": {"target_modules": ["q_proj"], "exclude_modules": r"layers\.0\..*"},
}


@pytest.mark.parametrize("case", INNER)
def test_trained_on_the_inner_model(case: str, tmp_path: Path) -> None:
    folder = save(tmp_path, causal().model, **INNER[case])
    assert_equal(logits_of_inner(folder), folder)
    rename(folder, lambda name: name.removeprefix("base_model.model."))
    assert_equal(logits_of_inner(save(tmp_path, causal().model, **INNER[case])), folder)


LARGER: dict[str, Any] = {
    "ms-swift": r"^(model\.language_model(?=\.).*\.(q_proj|up_proj|o_proj))$",
    "LLaMA-Factory": r"^(?!.*(?:vision_tower|multi_modal_projector)).*(?:q_proj|v_proj).*",
    "axolotl": r"model.language_model.layers.[\d]+.(mlp|self_attn).(up|down|q|v)_proj",
    "unsloth": r"(?:.*?(?:language|text).*?(?:self_attn|attn|mlp).*?(?:q_proj|down_proj).*?)|"
    r"(?:\bmodel\.layers\.[\d]{1,}\.(?:self_attn|mlp)\.(?:(?:q_proj|down_proj)))",
    "names and head": ["language_model.layers.1.self_attn.q_proj", "lm_head"],
}


@pytest.mark.parametrize("case", LARGER)
def test_trained_on_the_text_model_within_a_larger_one(case: str, tmp_path: Path) -> None:
    folder = save(tmp_path, larger(), target_modules=LARGER[case])
    assert_equal(logits_of_larger(folder), folder)


@pytest.mark.parametrize("body", ["language_model.model.", "language_model."])
def test_as_older_transformers_and_inner_models_name_it(body: str, tmp_path: Path) -> None:
    folder = save(tmp_path, causal(), target_modules=r".*(?<!vision)\.self_attn\.q_proj")
    expected = logits_of_peft(folder)
    rename(folder, lambda name: name.replace("model.model.model.", f"model.model.{body}"))
    assert_equal(expected, folder)


def test_the_vision_tower_is_no_part_of_the_base(tmp_path: Path) -> None:
    folder = save(tmp_path, larger(), target_modules=["q_proj"])
    assert violation_codes(lambda: judge_folder(folder, BASE)) == {"unknown_module"}


def test_a_pattern_is_matched_on_the_names_of_the_trained_model(tmp_path: Path) -> None:
    folder = save(tmp_path, causal(), target_modules=r"model\.layers\.\d+\.self_attn\.q_proj")
    rename(folder, lambda name: name.replace("model.model.model.", "model.model."))
    assert violation_codes(lambda: judge_folder(folder, BASE)) == {"untargeted_tensor"}


Q = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"


@pytest.mark.parametrize(
    "twin",
    [
        Q.replace("lora_A", "lora_A.default"),
        Q.replace("lora_A", "lora_A.other"),
        Q.replace("base_model", "_orig_mod.base_model"),
        Q.replace("self_attn", "_fsdp_wrapped_module.self_attn"),
        Q.removeprefix("base_model.model."),
        Q.replace("model.model.model", "model.model"),
        Q.replace("model.model.model", "model.model.model.language_model"),
    ],
)
def test_two_spellings_of_one_tensor_are_duplicates(twin: str, tmp_path: Path) -> None:
    folder = save(tmp_path, causal(), target_modules=["q_proj"])
    tensors = load_file(folder / WEIGHTS)
    save_file(tensors | {twin: tensors[Q].clone()}, folder / WEIGHTS)
    error = refusal(lambda: judge_folder(folder, BASE))
    assert error is not None
    assert [violation.code for violation in error.violations] == ["duplicate_tensor"]


def test_several_adapters_in_one_file_are_refused(tmp_path: Path) -> None:
    folder = save(tmp_path, causal(), target_modules=["q_proj", "v_proj"])
    rename(folder, lambda n: n if "q_proj" in n else adapter_name("second")(n))
    error = refusal(lambda: judge_folder(folder, BASE))
    assert error is not None
    assert "two adapters, 'second' and 'default'" in error.violations[0].message


WRAPPERS = ("_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module", "module")
PATHS = st.sampled_from([module.path for module in base_modules(BASE)])


@given(PATHS, st.sampled_from(NAMINGS), st.sampled_from("AB"), st.data())
def test_a_name_means_the_same_whatever_wraps_it(
    path: str, naming: Any, side: str, data: st.DataObject
) -> None:
    spelled = naming.spelled(path)
    if spelled is None:
        return
    kind = "lora_embedding_" if "embed" in path else "lora_"
    words = f"base_model.model.{spelled}.{kind}{side}".split(".")
    for wrapper in data.draw(st.lists(st.sampled_from(WRAPPERS), max_size=4)):
        words.insert(data.draw(st.integers(0, len(words) - 1)), wrapper)
    plain = parse_tensor_name(f"base_model.model.{spelled}.{kind}{side}.weight")
    assert parse_tensor_name(".".join(words) + ".weight") == plain
    assert plain is not None
    assert naming.meant(plain.path) == path
