"""Tiny random base models and adapters, made and saved by transformers and PEFT: the oracle."""

import copy
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import PreTrainedModel

from tests.server.model.families.variants import VARIANTS

VOCAB = 97
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 112,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "bos_token_id": 1,
    "eos_token_id": 2,
    # Wide enough that logits differ by much more than rounding.
    "initializer_range": 0.15,
}

_NOT_MATRICES = ("norm", "ln_", "bias", "router.scale", "per_expert_scale")


def make_model(name: str, seed: int = 0, **overrides: Any) -> PreTrainedModel:
    """name: of a row of VARIANTS."""
    row = VARIANTS[name]
    # transformers writes into the dictionaries that a config is made of.
    settings = copy.deepcopy({**SIZES, **row.settings, **overrides})
    return random_model(row.config, row.model, seed, **settings)


def random_model(
    config_class: Any, model_class: Any, seed: int = 0, **settings: Any
) -> PreTrainedModel:
    """Random norms and biases too, which transformers makes of ones and zeros."""
    torch.manual_seed(seed)
    model: PreTrainedModel = model_class(config_class(**settings))
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            if any(part in parameter_name for part in _NOT_MATRICES):
                parameter.add_(torch.randn_like(parameter) * 0.3)
        for buffer_name, buffer in model.named_buffers():
            if "correction_bias" in buffer_name or "layer_scalar" in buffer_name:
                buffer.add_(torch.randn_like(buffer) * 0.3)
    model.train(False)
    return model


def save_model(model: PreTrainedModel, folder: Path, **options: Any) -> Path:
    model.save_pretrained(folder, **options)
    return folder


def add_adapter(
    model: PreTrainedModel | PeftModel, name: str, config: LoraConfig, seed: int
) -> PeftModel:
    """Wrap the model (once), add an adapter of random weights; B too, which PEFT leaves at zero."""
    if isinstance(model, PeftModel):
        model.add_adapter(name, config)
        peft = model
    else:
        peft = get_peft_model(model, config, adapter_name=name)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter_name, parameter in peft.named_parameters():
            if f".{name}" in parameter_name and "lora_" in parameter_name:
                noise = torch.randn(parameter.shape, generator=generator)
                parameter.copy_(noise * parameter.shape[-1] ** -0.5)
    peft.train(False)
    return peft


@torch.inference_mode()
def reference_logprobs(
    model: PreTrainedModel | PeftModel, adapter: str | None, ids: list[int]
) -> torch.Tensor:
    """Log-softmax after every token, float32 `[tokens, vocab]`."""
    inputs = torch.tensor([ids])
    if isinstance(model, PeftModel):
        if adapter is None:
            with model.disable_adapter():
                logits = model(input_ids=inputs).logits
        else:
            if model.active_adapters != [adapter]:  # to set one walks through all modules
                model.set_adapter(adapter)
            logits = model(input_ids=inputs).logits
    else:
        logits = model(input_ids=inputs).logits
    scores: torch.Tensor = logits[0].float().log_softmax(-1)
    return scores
