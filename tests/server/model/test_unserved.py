"""What is said of a base model that cannot be served: the one reason that matters, first.

The tables are of the shapes that models on the Hub have; none of them is complete.
"""

import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from transformers import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
)

from loraplex.launcher.__main__ import main
from loraplex.server.model.checkpoint.checkpoint import CheckpointError, check_folder
from loraplex.server.model.families.registry import architectures, missing_part, read_model
from tests.server.model.families.test_readers import LLAMA
from tests.server.model.hub_models import make_model, save_model

LISTED = "`loraplex info` lists what is"
ROPE = {"rope_theta": 1e6, "rope_type": "default"}
TEXT = {"hidden_size": 2048, "num_hidden_layers": 24, "vocab_size": 151936}

# Types of transformers of whose parts none is known to be missing: no reader knows their fields.
WITHOUT_READER = {
    *("axk1", "sarvam_mla"),
    *("apertus1p5_text", "aria_text", "beam", "bert-generation", "bitnet"),
    *("cohere2_moe", "cohere_compass_text"),
    *("flint", "fuyu", "gemma4_assistant", "gpt_neox_japanese"),
    *("granite_swa", "granitemoe_swa", "hy_v3", "hyperclovax", "iquestcoder", "jais2"),
    *("kolibri1", "mellum", "mimo_v2_flash", "nanochat", "modernbert-decoder"),
    *("sarvam_moe", "solar_open"),
}

# Of another type: whatever else they say, that is the reason.
OTHERS: dict[str, dict[str, Any]] = {
    "openai-gpt": {"architectures": ["OpenAIGPTLMHeadModel"], "n_embd": 768, "n_positions": 512},
    "megatron-bert": {"architectures": ["MegatronBertForMaskedLM"], "type_vocab_size": 2},
    "t5": {"architectures": ["T5ForConditionalGeneration"], "d_model": 512, "num_layers": 6},
    "whisper": {"architectures": ["WhisperForConditionalGeneration"], "d_model": 384},
    "mamba": {"architectures": ["MambaForCausalLM"], "state_size": 16},
    "longcat_flash": {"architectures": ["LongcatFlashForCausalLM"], "zero_expert_num": 256},
    "deepseek_v32": {
        "architectures": ["DeepseekV32ForCausalLM"],
        "index_topk": 2048,
        "quantization_config": {"quant_method": "fp8"},
        "num_nextn_predict_layers": 1,
    },
    "zamba2": {"architectures": ["Zamba2ForCausalLM"], "mamba_d_state": 64},
}


@pytest.mark.parametrize("model_type", OTHERS)
def test_of_another_type_that_alone_is_said(model_type: str) -> None:
    with pytest.raises(ValueError, match="not served") as caught:
        read_model({"model_type": model_type, **OTHERS[model_type]})
    sentence = str(caught.value)
    assert sentence.startswith(f"model type {model_type!r} is not served")
    assert len(sentence) < 160


LAYERS = ["linear_attention", "full_attention"]
# Fields of a configuration -> the part that they show.
PARTS: list[tuple[dict[str, Any], str]] = [
    ({"layer_types": LAYERS}, "linear attention with recurrent state"),
    ({"layer_types": LAYERS, "mamba_d_state": 16}, "state-space layers (Mamba's)"),
    ({"num_mem_blocks": 1, "mamba_d_state": 64}, "blocks of attention that several layers share"),
    ({"text_config": {"layer_types": LAYERS}, "vision_config": {}}, "linear attention"),
    ({"hybrid_override_pattern": "M-M*"}, "state-space layers"),
    ({"kv_lora_rank": 512, "index_topk": 2048}, "attention to tokens that an index chooses"),
    ({"text_config": {"index_topk": 2048}, "vision_config": {"depth": 2}}, "attention to tokens"),
    ({"kv_lora_rank": 512, "zero_expert_num": 256}, "experts that give back what they read"),
    ({"laurel_rank": 64, "altup_num_inputs": 4}, "several streams of a token (AltUp)"),
    ({"attention_chunk_size": 8192}, "attention in chunks"),
    ({"layer_types": ["conv", "full_attention"]}, "layers of convolutions"),
    ({"block_types": ["recurrent", "attention"]}, "recurrent layers"),
    ({"is_encoder_decoder": True}, "an encoder whose output the decoder attends to"),
    ({"type_vocab_size": 2}, "a reader of this form of encoder"),
    ({"pos_att_type": ["p2c"], "type_vocab_size": 2}, "scores of tokens with distances"),
    ({"use_attention_gate": True}, "a gate of what attention gives"),
    ({"n_positions": 1024}, "positions that are added in another form"),
    (
        {"text_config": {"model_type": "llama"}, "vision_config": {"depth": 2}},
        "a reader of the text part, of type 'llama', beside its encoder of images or sound",
    ),
    ({"audio_config": {"depth": 2}}, "a reader of the text part, beside its encoder"),
]


@pytest.mark.parametrize(("config", "part"), PARTS)
def test_the_missing_part_is_found_by_fields(config: dict[str, Any], part: str) -> None:
    with pytest.raises(ValueError, match="is not served: it needs") as caught:
        read_model({"model_type": "made_up", **config})
    assert f": it needs {part}" in str(caught.value)


@pytest.mark.parametrize(
    "config", [{"index_topk": None}, {"n_positions": 2048, "rotary_dim": 64}, {"layer_types": 3}]
)
def test_fields_that_show_no_missing_part(config: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="is not served; ") as caught:
        read_model({"model_type": "made_up", **config})
    assert str(caught.value).endswith(LISTED)


@pytest.mark.parametrize("model_type", ["made_up", 7, ["llama"], {}, "x" * 5000, "a\nb"])
def test_of_an_unknown_type_the_list_is_named(model_type: object) -> None:
    with pytest.raises(ValueError, match="is not served; ") as caught:
        read_model({"model_type": model_type, "layer_types": 3})
    assert str(caught.value).endswith(LISTED)
    assert len(str(caught.value)) < 260
    assert "\n" not in str(caught.value)


@cache
def configs_of_transformers() -> dict[str, dict[str, Any]]:
    """The config that each class of a causal or image-text model has by itself."""
    names = {*MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, *MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES}
    made: dict[str, dict[str, Any]] = {}
    for name in sorted(names - {"gemma4_assistant"}):  # which cannot be made without a model
        made[name] = json.loads(CONFIG_MAPPING[name]().to_json_string(use_diff=False))
    return made


def test_every_type_of_transformers_is_served_or_lacks_a_part() -> None:
    alone = set()
    for model_type, config in configs_of_transformers().items():
        if model_type in architectures():
            continue
        with pytest.raises(ValueError, match="is not served") as caught:
            read_model({**config, "model_type": model_type})
        sentence = str(caught.value)
        assert sentence.count("; ") + sentence.count(": ") == 1, sentence
        if sentence.endswith(LISTED):
            alone.add(model_type)
    assert alone == WITHOUT_READER - {"gemma4_assistant"}


def test_the_name_of_a_type_means_nothing() -> None:
    for model_type, config in configs_of_transformers().items():
        inner = config.get("text_config")
        if isinstance(inner, dict):
            inner.pop("model_type", None)
        assert missing_part({**config, "model_type": "made_up"}) == missing_part(
            {**config, "model_type": model_type}
        )


# Of a served type: the reason that comes first.
FORMS: dict[str, tuple[dict[str, Any], str]] = {
    "tagger": (
        {"architectures": ["LlamaForTokenClassification"], "id2label": {"0": "bad"}},
        "architectures: 'LlamaForTokenClassification' is no form that is served; served is Llama",
    ),
    "both ways": (
        {"model_type": "mistral", "architectures": ["MistralBidirectionalModel"]},
        "architectures: 'MistralBidirectionalModel' attends to later tokens, too; served is",
    ),
    "embeddings by code": (
        {
            "model_type": "mistral",
            "architectures": ["MistralModel"],
            "auto_map": {"AutoModel": "modeling_mistral.MistralModel"},
        },
        "auto_map: its vectors need code of its own ('modeling_mistral.MistralModel')",
    ),
    "hqq": (
        {"quantization_config": {"quant_method": "hqq", "nbits": 4}},
        "quantization_config: quantised weights ('hqq') are not served; of quantised weights FP8,"
        " NVFP4, AWQ, GPTQ, bitsandbytes and compressed-tensors (FP8, FP4, int4, int8) are read",
    ),
    "eetq": (
        {"quantization_config": {"quant_method": "eetq"}},
        "quantization_config: quantised weights ('eetq') are not served",
    ),
    "quark": (
        {"quantization_config": {"quant_method": "quark", "export": {}}},
        "quantization_config: quantised weights ('quark') are not served",
    ),
    "modelopt": (
        {"quantization_config": {"quant_method": "modelopt", "quant_algo": "W4A8_AWQ"}},
        "quantization_config: modelopt: quant_algo must be fp8 or nvfp4, got 'W4A8_AWQ'",
    ),
    "nvfp4": (
        {
            "quantization_config": {
                "quant_method": "compressed-tensors",
                "format": "nvfp4-pack-quantized",
                "config_groups": {"group_0": {"targets": ["Linear"], "weights": {"num_bits": 8}}},
            }
        },
        "quantization_config: compressed-tensors: num_bits must be 4, got 8",
    ),
    "mlx": ({"quantization": {"group_size": 64, "bits": 4}}, "quantization: quantised weights"),
    "code": (
        {"auto_map": {"AutoModelForCausalLM": "modeling_deci.DeciLMForCausalLM"}},
        "auto_map: the model needs code of its own ('modeling_deci.DeciLMForCausalLM')",
    ),
}


@pytest.mark.parametrize("form", FORMS)
def test_of_another_form_that_comes_first(form: str) -> None:
    changes, reason = FORMS[form]
    broken = {**LLAMA, "rms_norm_eps": 0, **changes}
    with pytest.raises(ValueError, match="not supported") as caught:
        read_model(broken)
    first, *others = str(caught.value).removeprefix("this model is not supported: ").split("; ")
    assert f"{first}; {'; '.join(others)}".startswith(reason)
    assert others[-1] == "rms_norm_eps must be a positive number, got 0"


@pytest.mark.parametrize("code", ["modeling_llama", "org/repo--modeling_llama"])
def test_code_under_the_name_of_the_served_class_is_left_out(code: str) -> None:
    mapped = {"AutoConfig": "configuration.C", "AutoModelForCausalLM": f"{code}.LlamaForCausalLM"}
    assert read_model({**LLAMA, "auto_map": mapped}) == read_model(LLAMA)


@pytest.mark.parametrize(
    "changes",
    [
        {"auto_map": "modeling_llama"},
        {"architectures": "LlamaForCausalLM"},
        {"architectures": {"a": 1}},
        {"quantization_config": "fp8"},
        {"quantization_config": [1]},
        {"rope_scaling": "linear"},
        {"rope_scaling": {"rope_type": ["linear"]}},
        {"num_hidden_layers": 10**9},
        {"model_type": "mistral", "architectures": [], "layer_types": 5},
        {"model_type": "mistral", "architectures": [], "layer_types": [["full_attention"]] * 2},
        {"hidden_act": ["silu"]},
    ],
)
def test_malformed_entries_are_refused_and_never_raise_otherwise(changes: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="not supported"):
        read_model({**LLAMA, "num_key_value_heads": 4, "sliding_window": 8, **changes})


@pytest.mark.parametrize("gone", ["hidden_size", "vocab_size", "num_attention_heads"])
def test_nothing_is_said_that_only_follows(gone: str) -> None:
    config = {key: value for key, value in LLAMA.items() if key != gone}
    with pytest.raises(ValueError, match="not supported") as caught:
        read_model({**config, "eos_token_id": 7})
    reason = f"{gone} must be a positive integer, got None"
    assert str(caught.value) == f"this model is not supported: {reason}"


ADAPTER = '{"base_model_name_or_path": "org/base"}'
FOLDERS: dict[str, tuple[dict[str, str], str]] = {
    "empty": ({}, "is empty: it has no config.json"),
    "an adapter": ({"adapter_config.json": ADAPTER}, "is a LoRA adapter, not a base model: serve"),
    "its base": ({"adapter_config.json": ADAPTER}, "serve its base model (org/base) and give"),
    "a broken adapter": ({"adapter_config.json": "[]"}, "is a LoRA adapter, not a base model"),
    "an adapter beside a config": (
        {"config.json": "LLAMA", "adapter_config.json": ADAPTER},
        "is a LoRA adapter",
    ),
    "gguf": ({"model.Q4_K_M.gguf": ""}, "has its weights in GGUF (model.Q4_K_M.gguf)"),
    "pickle": ({"config.json": "LLAMA", "pytorch_model.bin": ""}, "has only pytorch_model.bin"),
    "no weights": ({"config.json": "LLAMA", "training_args.bin": ""}, "has neither model.safete"),
    "other name": (
        {"config.json": "LLAMA", "weights.safetensors": ""},
        "has weights.safetensors, but neither",
    ),
    "maker's": ({"params.json": "{}", "consolidated.00.pth": ""}, "in its maker's own format"),
    "diffusers": ({"model_index.json": "{}"}, "is a pipeline of diffusers"),
    "checkpoints": (
        {f"checkpoint-{step}/config.json": "{}" for step in (500, 1500, 1000)},
        "has no config.json; did you mean FOLDER/checkpoint-1500 or FOLDER/checkpoint-1000 or",
    ),
    "checkpoints of an adapter": (
        {f"checkpoint-{step}/adapter_config.json": "{}" for step in (90, 100)},
        "is no base model; it holds LoRA adapters: checkpoint-100, checkpoint-90",
    ),
    "text": ({"notes.txt": ""}, "has no config.json; expected a model folder"),
    "another type before another format": (
        {"config.json": '{"model_type": "ctrl"}', "pytorch_model.bin": ""},
        "config.json: model type 'ctrl' is not served",
    ),
}


def write(folder: Path, files: dict[str, str]) -> Path:
    folder.mkdir()
    for name, text in files.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(json.dumps(LLAMA) if text == "LLAMA" else text)
    return folder


@pytest.mark.parametrize("kind", FOLDERS)
def test_folders(kind: str, tmp_path: Path) -> None:
    files, reason = FOLDERS[kind]
    folder = write(tmp_path / "it", files)
    with pytest.raises(CheckpointError) as caught:
        check_folder(folder)
    assert reason.replace("FOLDER", str(folder)) in str(caught.value)
    assert str(caught.value).startswith(str(folder))


def test_quantised_tensors_are_named_before_what_they_lack(tmp_path: Path) -> None:
    folder = save_model(make_model("llama2"), tmp_path / "model")
    weights = folder / "model.safetensors"
    data = weights.read_bytes()
    weights.write_bytes(data.replace(b"up_proj.weight", b"up_pro.qweight"))
    with pytest.raises(CheckpointError, match=r"weights are quantised \(model.*qweight\)"):
        check_folder(folder)


@pytest.mark.parametrize("command", [["serve"], ["info"], ["worker", "--port", "0"]])
@pytest.mark.parametrize("kind", ["empty", "another type before another format"])
def test_every_command_says_the_same_and_nothing_before(
    command: list[str], kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    files, reason = FOLDERS[kind]
    folder = write(tmp_path / "it", files)
    with pytest.raises(SystemExit) as end:
        main([*command, str(folder)])
    assert end.value.code == 1
    out, err = capsys.readouterr()
    (line,) = (out + err).splitlines()
    assert line.startswith(f"loraplex: {folder}")
    assert reason in line


def test_info_of_a_model(capsys: pytest.CaptureFixture[str]) -> None:
    main(["info", "demo"])
    assert "demo can be served\n  family      llama\n" in capsys.readouterr().out
    main(["info", "demo", "--json"])
    assert json.loads(capsys.readouterr().out)["layers"] == 6
