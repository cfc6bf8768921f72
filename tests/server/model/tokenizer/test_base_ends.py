"""Every id that a base's files name as the end of an answer, in its card and for its adapters."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import AddedToken, Tokenizer
from tokenizers.models import WordLevel

from loraplex.server.model.card import model_card, read_base_spec
from tests.adapter_folders import safetensors_bytes
from tests.server.worker.worker_process import VOCAB, write_model

WORDS = ["a", "b", "</s>", "<|end|>", "<|user|>", "<|call|>", "plain"]
S, END, USER, CALL, PLAIN = range(2, 7)
CHAT = (
    "{% for m in messages %}<|user|>{{ m.content }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|user|>{% endif %}"
)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Its config.json names id 2."""
    folder = write_model(tmp_path / "model")
    tokenizer = Tokenizer(WordLevel({word: i for i, word in enumerate(WORDS)}, "a"))
    tokenizer.add_special_tokens(["</s>", "<|end|>", "<|user|>", "<|call|>"])
    tokenizer.add_tokens([AddedToken("plain", special=False)])
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


@pytest.mark.parametrize(
    ("files", "ends"),
    [
        ({}, [S]),
        ({"generation_config.json": {"eos_token_id": [CALL, USER]}}, [USER, CALL]),
        ({"generation_config.json": {"eos_token_id": None, "top_p": 0.5}}, [S]),
        ({"tokenizer_config.json": {"eos_token": "<|end|>"}}, [S, END]),
        ({"tokenizer_config.json": {"eos_token": {"content": "plain"}}}, [S, PLAIN]),
        ({"special_tokens_map.json": {"eos_token": "<|call|>"}}, [S, CALL]),
        ({"tokenizer_config.json": {"chat_template": CHAT}}, [S, END]),
        (
            {"tokenizer_config.json": {"chat_template": CHAT.replace("<|end|>", "plain")}},
            [S, PLAIN],
        ),
        ({"tokenizer_config.json": {"chat_template": "{% if %}"}}, [S]),
        (
            {
                "tokenizer_config.json": {
                    "eos_token": "<|user|>",
                    "chat_template": [
                        {"name": "default", "template": CHAT},
                        {"name": "tool_use", "template": CHAT.replace("<|end|>", "<|call|>")},
                    ],
                },
                "generation_config.json": {"eos_token_id": PLAIN},
            },
            [END, USER, CALL, PLAIN],
        ),
    ],
)
def test_ends(folder: Path, files: dict[str, Any], ends: list[int]) -> None:
    for name, content in files.items():
        (folder / name).write_text(json.dumps(content))
    card = model_card(folder, names=("base",), dtype="float32", device="cpu", max_lora_rank=8)
    assert sorted(card.eos_token_ids) == ends
    assert read_base_spec(folder, ("base",)).eos_token_ids == card.eos_token_ids


def test_a_token_beyond_the_models_vocabulary_ends_nothing(folder: Path) -> None:
    """Nothing draws it; `eos_token` that the tokenizer lacks becomes such a token."""
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "vocab_size": len(WORDS)}))
    table = {"model.embed_tokens.weight": np.zeros((len(WORDS), 32), np.float32)}
    (folder / "model.safetensors").write_bytes(safetensors_bytes(table, "F32"))
    (folder / "tokenizer_config.json").write_text('{"eos_token": "<|nowhere|>"}')
    card = model_card(folder, names=("base",), dtype="float32", device="cpu", max_lora_rank=8)
    assert len(WORDS) < VOCAB
    assert card.eos_token_ids == (S,)
