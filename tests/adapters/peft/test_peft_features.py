"""What PEFT itself saves of features that change the maths: refused by name, weights unfetched."""

import json
from pathlib import Path
from typing import Any

import pytest
from peft import LoraConfig, get_peft_model
from safetensors.torch import save_file
from transformers import LlamaConfig, LlamaForCausalLM

from loraplex.adapters.judge import judge_folder
from loraplex.adapters.ref import AdapterRef
from loraplex.adapters.sources.hub import HubSource
from loraplex.adapters.store.store import AdapterStore
from tests.adapter_folders import small_base
from tests.adapters.refusals import refusal, violation_codes
from tests.adapters.stub_hub import running_hub

pytestmark = pytest.mark.filterwarnings("ignore")
BASE = small_base(names=("base",))
WEIGHTS = "adapter_model.safetensors"

# Feature -> the options that switch it on, and the key that is named.
FEATURES: dict[str, tuple[dict[str, Any], str]] = {
    "pissa": ({"init_lora_weights": "pissa"}, "init_lora_weights"),
    "olora": ({"init_lora_weights": "olora"}, "init_lora_weights"),
    "layers doubled": ({"layer_replication": [[0, 2], [1, 2]]}, "layer_replication"),
}


def save(folder: Path, **options: Any) -> Path:
    """An adapter as PEFT saves it."""
    config = LlamaConfig(
        vocab_size=BASE.vocab_size,
        hidden_size=BASE.hidden_size,
        intermediate_size=48,
        num_hidden_layers=BASE.num_layers,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    options = {"task_type": "CAUSAL_LM", "target_modules": ["q_proj"]} | options
    get_peft_model(LlamaForCausalLM(config), LoraConfig(**options)).save_pretrained(folder)
    written = json.loads((folder / "adapter_config.json").read_text())
    (folder / "adapter_config.json").write_text(
        json.dumps(written | {"base_model_name_or_path": "base"})
    )
    return folder


def refused_by_the_store(folder: Path, tmp_path: Path) -> set[str]:
    """The codes, after a fetch of the small files alone from a Hub."""
    with running_hub() as hub:
        hub.publish("org/a", folder)
        store = AdapterStore(tmp_path / "store", BASE, {"hub": HubSource(hub.endpoint)})
        codes = violation_codes(lambda: store.admit(AdapterRef("hub", "org/a"), None))
        assert hub.downloads("adapter_config.json") == 1
        assert hub.downloads(WEIGHTS) == 0
    return codes


@pytest.mark.parametrize("feature", FEATURES)
def test_refused_before_its_weights_are_fetched(feature: str, tmp_path: Path) -> None:
    options, key = FEATURES[feature]
    folder = save(tmp_path / "a", **options)
    assert refused_by_the_store(folder, tmp_path) == {"unsupported_feature"}
    error = refusal(lambda: judge_folder(folder, BASE))
    assert error is not None
    assert error.violations[0].where == key


@pytest.mark.parametrize(
    ("files", "code"),
    [
        ({"added_tokens.json": '{"<new>": 64}'}, "added_tokens"),
        ({"chat_template.jinja": b"\xff"}, "bad_chat_template"),
    ],
)
def test_so_are_added_tokens(files: dict[str, Any], code: str, tmp_path: Path) -> None:
    folder = save(tmp_path / "a")
    judge_folder(folder, BASE)
    for name, content in files.items():
        (folder / name).write_bytes(content.encode() if isinstance(content, str) else content)
    assert refused_by_the_store(folder, tmp_path) == {code}


@pytest.mark.parametrize(
    ("targets", "code"),
    [
        (["experts.0.w1", "block_sparse_moe.gate"], "unknown_target"),
        (r".*vision_tower.*q_proj", "unknown_target"),
        (r"(?!.*layers).*q_proj", "unknown_target"),
        (r"(?i)lm_head.*q_proj", "bad_pattern"),
    ],
)
def test_so_is_what_this_base_does_not_have(targets: Any, code: str, tmp_path: Path) -> None:
    folder = tmp_path / "a"
    folder.mkdir()
    config = {"peft_type": "LORA", "base_model_name_or_path": "base", "target_modules": targets}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    save_file({}, folder / WEIGHTS)
    assert refused_by_the_store(folder, tmp_path) == {code}
