"""Tiny random models for vectors, as their makers publish them, with adapters by PEFT."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from peft import LoraConfig, PeftModel
from tokenizers import Tokenizer
from transformers import (
    AutoModel,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3ForSequenceClassification,
    Qwen3Model,
)

from loraplex.launcher.bench.engine.offline import tokenizer_json
from tests.server.model.hub_models import add_adapter, random_model

QUERY = "Instruct: find what answers\nQuery:"
SIZE = 48
_VOCAB = 320
_END = 2
SETTINGS: dict[str, Any] = {
    "vocab_size": _VOCAB,
    "hidden_size": SIZE,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "bos_token_id": 1,
    "eos_token_id": _END,
    "initializer_range": 0.12,
}


def save_tokenizer(folder: Path) -> None:
    """As Qwen3's embeddings have it: an end follows every text."""
    tokenizer = json.loads(tokenizer_json(_VOCAB, (1, _END)))
    name = f"<|{_END}|>"
    end = {"SpecialToken": {"id": name, "type_id": 0}}
    tokenizer["post_processor"] = {
        "type": "TemplateProcessing",
        "single": [{"Sequence": {"id": "A", "type_id": 0}}, end],
        "pair": [
            {"Sequence": {"id": "A", "type_id": 0}},
            {"Sequence": {"id": "B", "type_id": 1}},
            end,
        ],
        "special_tokens": {name: {"id": name, "ids": [_END], "tokens": [name]}},
    }
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))


def save_embedder(folder: Path) -> Path:
    """A decoder without a head, with files of sentence-transformers; and its adapter `one`."""
    random_model(Qwen3Config, Qwen3Model, 3, **SETTINGS).save_pretrained(folder / "base")
    save_tokenizer(folder / "base")
    package = "sentence_transformers.models."
    modules = [
        {"idx": i, "name": str(i), "path": f"{i}_{kind}" if i else "", "type": package + kind}
        for i, kind in enumerate(("Transformer", "Pooling", "Normalize"))
    ]
    (folder / "base" / "modules.json").write_text(json.dumps(modules))
    (folder / "base" / "1_Pooling").mkdir()
    pooling = {"word_embedding_dimension": SIZE, "pooling_mode_lasttoken": True}
    (folder / "base" / "1_Pooling" / "config.json").write_text(json.dumps(pooling))
    prompts = {"prompts": {"query": QUERY}, "default_prompt_name": None}
    (folder / "base" / "config_sentence_transformers.json").write_text(json.dumps(prompts))
    lora = LoraConfig(r=4, target_modules=["q_proj", "v_proj", "down_proj"])
    model = AutoModel.from_pretrained(folder / "base", dtype="float32")
    add_adapter(model, "one", lora, 5).save_pretrained(folder, selected_adapters=["one"])
    return folder / "base"


class Oracle:
    """transformers and PEFT on a saved embedder: `vector` of a text."""

    def __init__(self, folder: Path) -> None:
        base = AutoModel.from_pretrained(folder / "base", dtype="float32")
        self._model = PeftModel.from_pretrained(base, folder / "one", adapter_name="one")
        self._model.train(False)
        self._tokenizer = Tokenizer.from_file(str(folder / "base" / "tokenizer.json"))

    def ids(self, text: str) -> list[int]:
        found: list[int] = self._tokenizer.encode(text).ids
        return found

    @torch.inference_mode()
    def vector(self, text: str, *, adapted: bool = False, dimensions: int | None = None) -> Any:
        inputs = torch.tensor([self.ids(text)])
        if adapted:
            states = self._model(input_ids=inputs).last_hidden_state
        else:
            with self._model.disable_adapter():
                states = self._model(input_ids=inputs).last_hidden_state
        vector = states[0, -1, :dimensions].double().numpy()
        return vector / np.linalg.norm(vector)


def save_classifier(folder: Path, **settings: Any) -> Path:
    """Its padding is its end, too, so that transformers judges the token before that."""
    config = {**SETTINGS, "pad_token_id": _END, **settings}
    model = random_model(Qwen3Config, Qwen3ForSequenceClassification, 4, **config)
    model.save_pretrained(folder / "base")
    save_tokenizer(folder / "base")
    return folder / "base"


def save_writer(folder: Path) -> Path:
    """A model for text, which says by two tokens whether a document fits."""
    random_model(Qwen3Config, Qwen3ForCausalLM, 6, **SETTINGS).save_pretrained(folder / "base")
    save_tokenizer(folder / "base")
    model = Qwen3ForCausalLM.from_pretrained(folder / "base", dtype="float32")
    lora = LoraConfig(r=4, target_modules=["q_proj", "v_proj", "down_proj"])
    add_adapter(model, "one", lora, 5).save_pretrained(folder, selected_adapters=["one"])
    return folder / "base"
