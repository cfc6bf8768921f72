"""The text part of a larger model: its configuration, its tensors, and whose adapters are taken."""

import json
import logging
import re
from pathlib import Path
from typing import Any

import pytest
from peft import LoraConfig
from safetensors.torch import load_file, save_file
from transformers import Kimi_K25ForConditionalGeneration

from loraplex.adapters.errors import AdapterError
from loraplex.adapters.judge import judge_folder
from loraplex.adapters.peft.validate import AdapterLimits
from loraplex.server.model.checkpoint.checkpoint import CheckpointError, check_folder, read_config
from loraplex.server.model.families.registry import read_model
from tests.server.model import hub_models
from tests.server.model.driver import Driver, Stream, generate
from tests.server.model.families import text_parts
from tests.server.model.families.parity import GREEDY, assert_parity, prompt
from tests.server.model.families.test_readers import LLAMA
from tests.server.model.families.variants import VARIANTS, rows
from tests.server.model.hub_models import add_adapter, make_model, random_model, save_model
from tests.server.model.slabs import pack, pack_folder, spec_of

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")
ROPE = {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [2, 3, 3]}
SIZES = {
    **{key: value for key, value in LLAMA.items() if key not in ("model_type", "architectures")},
    "num_key_value_heads": 4,
}
# As transformers saves this model.
_BODY = re.compile(r"^model\.(?=layers|embed_tokens|norm)")
_HEAD = re.compile(r"^lm_head")


def respelled(folder: Path, body: str, head: str) -> None:
    """Gives the tensors of the text part other prefixes."""
    path = folder / "model.safetensors"
    tensors = {
        _HEAD.sub(head, _BODY.sub(body, name)): tensor for name, tensor in load_file(path).items()
    }
    save_file(tensors, path, {"format": "pt"})


@pytest.mark.parametrize(
    ("body", "head"),
    [
        ("model.language_model.", "lm_head"),
        ("language_model.model.", "language_model.lm_head"),
        ("language_model.", "lm_head"),
        ("model.text_model.", "lm_head"),
        ("model.", "lm_head"),
    ],
)
def test_every_prefix_is_read(
    body: str, head: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = make_model("qwen2.5-vl")
    folder = save_model(model, tmp_path)
    respelled(folder, body, head)
    names = load_file(folder / "model.safetensors")
    assert f"{body}layers.0.mlp.up_proj.weight" in names
    assert f"{head}.weight" in names
    count = sum("visual" in name for name in names)
    caplog.set_level(logging.INFO, "loraplex.server.model.weights")
    driver = Driver(folder)
    stream = Stream(driver, 0, prompt(11, 0), sampling=GREEDY)
    generate(driver, [stream], 4, 5)
    assert_parity(model, None, stream)
    driver.close()
    (line,) = [r.getMessage() for r in caplog.records if r.name == "loraplex.server.model.weights"]
    left_out = f"{count} stored tensors change no token and are left out"
    assert line == f"{left_out}: the part for images ({count})"


def test_tensors_of_no_known_part_are_refused(tmp_path: Path) -> None:
    folder = save_model(make_model("qwen2.5-vl"), tmp_path)
    path = folder / "model.safetensors"
    tensors = load_file(path)
    save_file({**tensors, "model.audio.weight": tensors["lm_head.weight"].clone()}, path)
    with pytest.raises(CheckpointError, match="1 unexpected: model.audio.weight"):
        check_folder(folder)
    save_file({**tensors, "language_model.lm_head.weight": tensors["lm_head.weight"] + 1}, path)
    with pytest.raises(CheckpointError, match="are the same tensor"):
        check_folder(folder)


def test_a_text_model_has_no_other_parts(tmp_path: Path) -> None:
    folder = save_model(make_model("qwen2"), tmp_path)
    path = folder / "model.safetensors"
    tensors = load_file(path)
    save_file({**tensors, "visual.blocks.0.weight": tensors["lm_head.weight"].clone()}, path)
    with pytest.raises(CheckpointError, match="1 unexpected: visual"):
        check_folder(folder)


def test_a_flat_config_is_that_of_both() -> None:
    outer = {"model_type": "qwen2_5_vl", "vision_config": {"hidden_size": 7}}
    rope = {"type": "mrope", "mrope_section": [2, 3, 3]}
    flat = read_model({**outer, **SIZES, "rope_theta": 1e6, "rope_scaling": rope})
    inner = {"model_type": "qwen2_5_vl_text", **SIZES, "rope_parameters": ROPE}
    assert flat == read_model({**outer, "text_config": inner})
    assert flat.is_text_part
    alone = read_model({"model_type": "qwen2", **SIZES, "rms_norm_eps": 1e-5, "rope_theta": 1e6})
    assert flat.layers == alone.layers


def test_a_text_config_says_what_differs_from_its_class() -> None:
    """As `config.json` of google/gemma-3-4b-it."""
    model = read_model(
        {
            "model_type": "gemma3",
            "architectures": ["Gemma3ForConditionalGeneration"],
            "eos_token_id": [1, 106],
            "torch_dtype": "bfloat16",
            "text_config": {
                "model_type": "gemma3_text",
                "hidden_size": 2560,
                "intermediate_size": 10240,
                "num_hidden_layers": 34,
                "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
                "sliding_window": 1024,
            },
        }
    )
    attention = model.layers[0].attention
    assert (attention.num_heads, attention.num_kv_heads, attention.head_dim) == (8, 4, 256)
    assert (model.vocab_size, model.max_context) == (262208, 131072)
    assert (model.eos_token_ids, model.dtype, model.head.tied) == ((1, 106), "bfloat16", True)
    assert model.family == "gemma3"


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"text_config": {"model_type": "mamba"}}, "a text part of type 'mamba' is not served"),
        ({"text_config": {"model_type": ["llama"]}}, "a text part of type"),
        ({"text_config": 3}, "text_config must be a table"),
        ({"text_config": {"hidden_act": "mish"}}, "hidden_act must be one of"),
        ({"text_config": {"quantization_config": {"quant_method": "hqq"}}}, "quantised weights"),
        ({"quantization_config": {"quant_method": "hqq"}}, "quantised weights"),
        ({"architectures": ["SmolVLMModel"]}, "served is SmolVLMForConditionalGeneration"),
        ({"text_config": {"vocab_size": 0}}, "vocab_size"),
        ({"is_causal": False}, "is_causal must be true"),
    ],
)
def test_refused_by_name(config: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        read_model({"model_type": "smolvlm", "text_config": {}, **config})


def test_tied_where_either_config_says_so() -> None:
    tied = {"tie_word_embeddings": True}
    untied = {"tie_word_embeddings": False}
    for outer, inner, expected in (
        ({}, {}, False),
        (tied, {}, True),
        (untied, tied, True),
        (untied, {}, False),
    ):
        model = read_model({"model_type": "smolvlm", "text_config": inner, **outer})
        assert model.head.tied is expected


@pytest.mark.parametrize(
    ("name", "part"),
    [
        ("gemma3-images", "vision_tower"),
        ("smolvlm", "vision_model"),
        ("qwen3-vl", "visual"),
    ],
)
def test_adapters_of_the_part_for_images_are_refused_module_by_module(name: str, part: str) -> None:
    lora = LoraConfig(r=2, target_modules=r".*(q_proj|attn\.qkv|connector.*\.proj)")
    model = add_adapter(make_model(name), "one", lora, 0)
    modules = {
        found[1]
        for key, _ in model.named_parameters()
        if (found := re.fullmatch(r"base_model\.model\.(.*)\.lora_A\..*", key))
        and "language_model" not in key
        and "text_model" not in key
    }
    assert modules
    with pytest.raises(AdapterError) as caught:
        pack(model, "one")
    said = "; ".join(violation.message for violation in caught.value.violations)
    assert part in said
    for module in modules:
        assert f"{module} belongs to the part for images, which is not served" in said


@pytest.mark.parametrize("name", rows(["gemma3-images", "smolvlm", "llava"]))
def test_the_text_part_of_adapters_with_plain_names(name: str, tmp_path: Path) -> None:
    """PEFT matches plain names in both towers. Texts do not pass through that of images."""
    lora = LoraConfig(r=3, target_modules=["q_proj", "v_proj"])
    model = make_model(name)
    driver = Driver(save_model(model, tmp_path / "base"))
    oracle = add_adapter(model, "one", lora, 0)
    of_images = sum(
        "lora_A" in key and "language_model" not in key and "text_model.layers" not in key
        for key, _ in oracle.named_parameters()
    )
    assert of_images
    oracle.save_pretrained(tmp_path, selected_adapters=["one"])
    layout, slab = pack_folder(tmp_path / "one", spec_of(model), text_part_only=True)
    assert driver.load(0, layout, slab, 0).error is None
    stream = Stream(driver, 0, prompt(11, 2), slot=0, sampling=GREEDY)
    generate(driver, [stream], 4, 5)
    assert_parity(oracle, "one", stream)
    driver.close()
    limits = AdapterLimits(allow_other_base=True, text_part_only=True)
    judged = judge_folder(tmp_path / "one", spec_of(model), limits)
    partial = judged.manifest.partial
    assert partial is not None
    assert partial.of_images == of_images
    assert partial.text.endswith(f"; {of_images} modules of the part for images are left out")


def test_what_is_no_lora_of_the_part_for_images_is_refused(tmp_path: Path) -> None:
    model = make_model("smolvlm")
    lora = LoraConfig(r=3, target_modules=["q_proj"], bias="lora_only")
    add_adapter(model, "one", lora, 0).save_pretrained(tmp_path, selected_adapters=["one"])
    with pytest.raises(AdapterError, match="vision_model"):
        pack_folder(tmp_path / "one", spec_of(model), text_part_only=True)


def test_config_of_a_folder_is_read_whole(tmp_path: Path) -> None:
    folder = save_model(make_model("gemma3-images"), tmp_path)
    stored = json.loads((folder / "config.json").read_text())
    assert "vision_config" in stored
    assert read_config(folder).is_text_part


@pytest.mark.exhaustive
def test_the_text_part_of_kimi_as_its_maker_stores_it(tmp_path: Path) -> None:
    """transformers writes other names of layers than it reads."""
    settings = {**hub_models.SIZES, **VARIANTS["deepseek-v3"].settings, "model_type": "kimi_k2"}
    model = random_model(text_parts.kimi_k25, Kimi_K25ForConditionalGeneration, **settings)
    folder = save_model(model, tmp_path)
    (weights,) = folder.glob("*.safetensors")
    stored = {
        name.replace("language_model.model.blocks.", "language_model.model.layers."): tensor
        for name, tensor in load_file(weights).items()
    }
    assert "language_model.model.layers.0.self_attn.kv_b_proj.weight" in stored
    save_file(stored, weights)
    driver = Driver(folder)
    stream = Stream(driver, 0, prompt(17, 0), sampling=GREEDY)
    generate(driver, [stream], 4, 5)
    assert_parity(model, None, stream)
    driver.close()
