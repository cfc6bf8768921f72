"""A tiny Llama, PEFT adapters of it, and what it answers with them in float32."""

import json
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftConfig, PeftModel, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM

from loraplex.adapters.base import BaseSpec
from loraplex.adapters.judge import judge_folder
from loraplex.adapters.safetensors.file import open_weights
from loraplex.adapters.safetensors.floats import read_floats
from tests.adapter_folders import small_base

BASE = small_base(num_layers=3, names=("base",))
WEIGHTS = "adapter_model.safetensors"
IDS = torch.tensor([[5, 17, 3, 60, 42]])
CONFIG = LlamaConfig(
    vocab_size=BASE.vocab_size,
    hidden_size=BASE.hidden_size,
    intermediate_size=48,
    num_hidden_layers=BASE.num_layers,
    num_attention_heads=4,
    num_key_value_heads=2,
)


def causal() -> LlamaForCausalLM:
    torch.manual_seed(0)
    made = LlamaForCausalLM(CONFIG)
    made.train(False)
    return made


def save(folder: Path, model: Any, **options: Any) -> Path:
    """A PEFT adapter of this model with random A and B."""
    save_adapter(folder, get_peft_model(model, LoraConfig(**options)))
    config = json.loads((folder / "adapter_config.json").read_text())
    config["base_model_name_or_path"] = "base"
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder


def save_as_configured(folder: Path, config: dict[str, Any]) -> Path:
    """What PEFT makes of a whole `adapter_config.json`, which is kept as it is."""
    folder.mkdir()
    text = json.dumps(config)
    (folder / "adapter_config.json").write_text(text)
    loaded = PeftConfig.from_pretrained(str(folder))
    save_adapter(folder, get_peft_model(causal(), loaded))
    (folder / "adapter_config.json").write_text(text)
    return folder


def save_adapter(folder: Path, peft: Any) -> None:
    torch.manual_seed(1)
    with torch.no_grad():
        for name, parameter in peft.named_parameters():
            if "lora_" in name:
                parameter.normal_(std=0.2)
    peft.save_pretrained(folder, save_embedding_layers=False)


def logits_of_peft(folder: Path) -> Any:
    with torch.no_grad():
        return PeftModel.from_pretrained(causal(), str(folder))(IDS).logits


def logits_of_judged(folder: Path, base: BaseSpec = BASE) -> Any:
    """With the judged tensors added to the base's own weights."""
    model, adapter = causal(), judge_folder(folder, base).tensors
    assert adapter.modules
    assert judge_folder(folder).manifest.targets == judge_folder(folder, base).manifest.targets
    with open_weights(folder / WEIGHTS) as weights, torch.no_grad():
        for lora in adapter.ordinary:
            a, b = (
                torch.from_numpy(read_floats(weights.read(t), t.dtype).reshape(t.shape).copy())
                for t in (lora.a, lora.b)
            )
            delta = lora.scale * (b @ a)
            module: Any = model.get_submodule(BASE.module(lora.layer, lora.module).path)
            module.weight += delta.T if lora.module == "embed_tokens" else delta
        return model(IDS).logits


def assert_equal(expected: Any, folder: Path, base: BaseSpec = BASE) -> None:
    assert not torch.allclose(expected, causal()(IDS).logits, atol=1e-3), "the adapter does nothing"
    torch.testing.assert_close(logits_of_judged(folder, base), expected, atol=1e-5, rtol=0)
