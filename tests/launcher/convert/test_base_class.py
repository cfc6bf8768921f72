"""The class of transformers for a base: the one that the checkpoint's config names."""

import json
from pathlib import Path
from typing import Any

import pytest

from loraplex.launcher.convert.base_class import base_class

CASES: list[tuple[dict[str, Any], str]] = [
    (
        {"model_type": "qwen2_5_vl", "architectures": ["Qwen2_5_VLForConditionalGeneration"]},
        "Qwen2_5_VLForConditionalGeneration",
    ),
    ({"model_type": "llama", "architectures": ["LlamaForCausalLM"]}, "LlamaForCausalLM"),
    ({"model_type": "llama", "architectures": ["OwnForCausalLM"]}, "AutoModelForCausalLM"),
    ({"model_type": "llama"}, "AutoModelForCausalLM"),
]


@pytest.mark.parametrize(("config", "name"), CASES)
def test_the_class_of_a_base(tmp_path: Path, config: dict[str, Any], name: str) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert base_class(tmp_path, local_files_only=True).__name__ == name
