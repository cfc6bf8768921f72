"""The families of models that are served, and the way from `config.json` to a ModelSpec. Pure.

A key that would change the maths and is not implemented is refused by name; nothing is guessed.
"""

from collections.abc import Mapping
from typing import Any

from server.model.families import gemma, llama, mistral, qwen2, qwen3
from server.model.families.family import Family
from server.model.families.fields import Fields
from server.model.families.refusals import other_family, other_forms
from server.model.spec import ModelSpec

# By `model_type`. A new family is a reader and a line here.
FAMILIES: dict[str, Family] = {
    "gemma": Family("GemmaForCausalLM", gemma.read_gemma),
    "gemma2": Family("Gemma2ForCausalLM", gemma.read_gemma2),
    "gemma3_text": Family("Gemma3ForCausalLM", gemma.read_gemma3),
    "llama": Family("LlamaForCausalLM", llama.read),
    "mistral": Family("MistralForCausalLM", mistral.read),
    "qwen2": Family("Qwen2ForCausalLM", qwen2.read),
    "qwen3": Family("Qwen3ForCausalLM", qwen3.read),
}


def read_model(config: Mapping[str, Any], generation: Mapping[str, Any] | None = None) -> ModelSpec:
    """Read `config.json` (and `generation_config.json`, whose end-of-sequence ids win).

    Raises ValueError: of a model of another type with that alone, else with every unsupported
    or malformed key at once, what matters most first.
    """
    reason = other_family(config, FAMILIES)
    if reason is not None:
        raise ValueError(reason)
    family, fields = FAMILIES[config["model_type"]], Fields(config)
    for reason in other_forms(config, family.architecture):
        fields.refuse(reason)
    model = family.read(fields, generation or {})
    if fields.problems:
        raise ValueError("this model is not supported: " + "; ".join(fields.problems))
    return model.within(model.max_context)
