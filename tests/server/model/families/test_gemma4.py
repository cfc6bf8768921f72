"""Gemma 4: layers that read the keys and values of others, and inputs of each layer."""

import json
import re
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from peft import LoraConfig
from safetensors.torch import load_file, save_file

from loraplex.adapters.base import MAX_NEW_IDS
from loraplex.adapters.errors import AdapterError
from loraplex.server.model.devices.sharding import shard_counts
from loraplex.server.model.families.registry import read_model
from loraplex.server.model.ops.memory import weights_bytes, workspace_bytes
from loraplex.server.model.spec.page_groups import page_groups
from tests.server.model.driver import Driver, Stream, engine_config, generate
from tests.server.model.families.gemma4 import FULL, WINDOWED, on_inputs
from tests.server.model.families.parity import (
    GREEDY,
    assert_parity,
    assert_parity_with,
    prompt,
)
from tests.server.model.hub_models import add_adapter, make_model, save_model
from tests.server.model.quantised.formats import FORMATS
from tests.server.model.slabs import pack_folder, spec_of

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")
EXHAUSTIVE = pytest.mark.exhaustive
# Both kinds of keys are read by two layers.
SIX: dict[str, Any] = {
    "num_hidden_layers": 6,
    "layer_types": [FULL, WINDOWED, FULL, WINDOWED, WINDOWED, FULL],
    "num_kv_shared_layers": 3,
}


def config_of(**changes: Any) -> dict[str, Any]:
    config: dict[str, Any] = json.loads(make_model("gemma4-inputs").config.to_json_string())
    return {**config, **changes}


def test_layers_read_the_last_keys_of_their_kind(tmp_path: Path) -> None:
    model = make_model("gemma4-inputs", **SIX)
    driver = Driver(save_model(model, tmp_path))
    found = read_model(json.loads(model.config.to_json_string()))
    assert [layer.attention.keys_of for layer in found.layers] == [None, None, None, 1, 1, 2]
    adapters = {
        **on_inputs(),
        "q": LoraConfig(r=4, lora_alpha=9, target_modules=["q_proj", "k_proj", "v_proj"]),
    }
    assert_parity_with(model, adapters, driver)


def test_layers_without_keys_have_no_pages() -> None:
    model = read_model(json.loads(make_model("gemma4-inputs", **SIX).config.to_json_string()))
    alone = msgspec.structs.replace(model, layers=model.layers[:3])
    groups, own = page_groups(model), page_groups(alone)
    assert groups.layers == (*own.layers, own.layers[1], own.layers[1], own.layers[2])
    assert (groups.width, groups.windows) == (own.width, own.windows)


def test_the_estimate_counts_the_table_and_what_layers_read() -> None:
    small, large = (
        read_model(config_of(hidden_size_per_layer_input=size, vocab_size_per_layer_input=1000))
        for size in (10, 20)
    )
    more = weights_bytes(large, "bfloat16", packed=True) - weights_bytes(
        small, "bfloat16", packed=True
    )
    of_layer = 2 * 64 * 10  # gate and projection
    assert more == 2 * (3 * 10 * (1000 + 64) + 10 + 3 * of_layer)
    engine = engine_config(Path(), max_step_tokens=100)
    rest = workspace_bytes(large, engine) - workspace_bytes(small, engine)
    assert rest == 2 * 100 * 4 * (2 * 3 * 20 + 3 * 10)  # and within the step of each layer


@pytest.mark.parametrize("body", ["model.language_model.", "language_model.model."])
def test_adapters_of_the_text_within_a_larger_model(body: str, tmp_path: Path) -> None:
    """As Unsloth and others name what they train."""
    model = make_model("gemma4-inputs")
    wrapped = add_adapter(model, "inputs", on_inputs()["inputs_and_layers"], 1)
    wrapped.save_pretrained(tmp_path, save_embedding_layers=False)
    spec, plain = spec_of(model), pack_folder(tmp_path / "inputs", spec_of(model))
    path = tmp_path / "inputs" / "adapter_model.safetensors"
    renamed = {
        re.sub(r"^base_model\.model\.model\.", f"base_model.model.{body}", name): tensor
        for name, tensor in load_file(path).items()
    }
    assert any(f"{body}per_layer_model_projection" in name for name in renamed)
    save_file(renamed, path)
    layout, slab = pack_folder(tmp_path / "inputs", spec)
    assert slab == plain[1]
    assert layout.sites == plain[0].sites


def test_stored_keys_that_nobody_reads_are_left_out(tmp_path: Path) -> None:
    model = make_model("gemma4-inputs")
    folder = save_model(model, tmp_path)
    path = folder / "model.safetensors"
    tensors = load_file(path)
    last = "model.layers.2.self_attn"
    assert f"{last}.k_proj.weight" not in tensors
    dead = {
        f"{last}.{name}.weight": torch.full((20, 64), float("nan"))
        for name in ("k_proj", "v_proj", "k_norm")
    }
    save_file({**tensors, **dead}, path)
    driver = Driver(folder)
    stream = Stream(driver, 0, prompt(11, 0), sampling=GREEDY)
    generate(driver, [stream], 4, 5)
    assert_parity(model, None, stream)
    driver.close()


def test_lora_of_keys_that_nobody_reads_is_left_out(tmp_path: Path) -> None:
    """As earlier versions of transformers had modules for it, though files may lack values."""
    model = make_model("gemma4-inputs")
    config = LoraConfig(r=2, target_modules=["q_proj", "k_proj"])
    add_adapter(model, "some", config, 1).save_pretrained(tmp_path)
    plain = pack_folder(tmp_path / "some", spec_of(model))
    path = tmp_path / "some" / "adapter_model.safetensors"
    stem = "base_model.model.model.layers.2.self_attn"
    dead = {
        f"{stem}.k_proj.lora_A.weight": torch.ones(2, 64),
        f"{stem}.k_proj.lora_B.weight": torch.ones(20, 2),
    }
    tensors = load_file(path)
    assert not dead.keys() & tensors.keys()
    save_file({**tensors, **dead}, path)
    layout, slab = pack_folder(tmp_path / "some", spec_of(model))
    assert slab == plain[1]
    assert layout.sites == plain[0].sites
    beyond = {name.replace("layers.2", "layers.7"): tensor for name, tensor in dead.items()}
    save_file({**tensors, **beyond}, path)
    with pytest.raises(AdapterError, match="layers.7"):
        pack_folder(tmp_path / "some", spec_of(model))


@pytest.mark.parametrize("form", ["ct-nvfp4", pytest.param("fp8-tensor", marks=EXHAUSTIVE)])
def test_quantised_experts_each_apart(form: str, tmp_path: Path) -> None:
    """As published checkpoints have them; transformers' own are two tensors a layer."""
    model = make_model("gemma4-moe", moe_intermediate_size=32)
    folder = save_model(model, tmp_path)
    path = folder / "model.safetensors"
    tensors: dict[str, torch.Tensor] = {}
    for name, tensor in load_file(path).items():
        stem, _, last = name.rpartition(".")
        if not stem.endswith(".experts"):
            tensors[name] = tensor
            continue
        parts = ("gate_proj", "up_proj") if last == "gate_up_proj" else (last,)
        values = [
            [FORMATS[form].pack(weight) for weight in of_one.chunk(len(parts))] for of_one in tensor
        ]
        for expert, found in enumerate(values):
            for part, (packed, _) in zip(parts, found, strict=True):
                module = f"{stem}.{expert}.{part}"
                tensors |= {f"{module}.{s}": t.contiguous().clone() for s, t in packed.items()}
        wanted = torch.stack([torch.cat([value for _, value in each]) for each in values])
        model.get_parameter(name).data.copy_(wanted)
    save_file(tensors, path)
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = FORMATS[form].config
    (folder / "config.json").write_text(json.dumps(config))
    driver = Driver(folder, activations="bf16")
    stream = Stream(driver, 0, prompt(11, 0), sampling=GREEDY)
    generate(driver, [stream], 4, 5)
    assert_parity(model, None, stream)
    driver.close()


def test_prompts_end_at_layers_that_read_others_keys(tmp_path: Path) -> None:
    """Behind these go only tokens whose result somebody needs, of several prompts and decodes."""
    model = make_model("gemma4-inputs", **SIX)
    driver = Driver(save_model(model, tmp_path))
    ops: Any = driver.executor._decoder.ops
    attend, rows = ops.attend, dict[int, list[int]]()

    def noted(plan: Any, layer: int, qkv: torch.Tensor, *rest: Any) -> torch.Tensor:
        rows.setdefault(layer, []).append(len(qkv))
        attended: torch.Tensor = attend(plan, layer, qkv, *rest)
        return attended

    ops.attend = noted
    unscored = msgspec.structs.replace(GREEDY, prompt_logprobs=None)
    plain = [Stream(driver, row, prompt(n, row), sampling=unscored) for row, n in enumerate((9, 4))]
    generate(driver, plain, 3, 5)
    assert rows[3] == rows[4] == rows[5]
    assert sum(rows[2]) == 9 + 4 + 2 * 2
    assert sum(rows[3]) == 2 * 3
    for stream in plain:
        scored = Stream(driver, 2 + stream.row, stream.tokens[: stream.prompt_len], sampling=GREEDY)
        generate(driver, [scored], 3, 64)
        assert scored.tokens == stream.tokens
        assert_parity(model, None, scored)
        for ours, theirs in zip(stream.logprobs, scored.logprobs, strict=True):
            assert dict(ours.top) == pytest.approx(dict(theirs.top), abs=1e-4)
    driver.close()


def test_drafts_change_no_answer(tmp_path: Path) -> None:
    model = make_model("gemma4-inputs", **SIX)
    driver = Driver(save_model(model, tmp_path))
    plain, drafted = (Stream(driver, row, prompt(9, 3), sampling=GREEDY) for row in range(2))
    generate(driver, [plain], 12, 64)
    began = driver.step
    said = plain.tokens
    # Every third token is wrong.
    drafted.draft = lambda tokens: [
        token if place % 3 else (token + 1) % 90
        for place, token in enumerate(said[len(tokens) : len(tokens) + 4], len(tokens))
    ]
    generate(driver, [drafted], 12, 64)
    assert drafted.tokens[: len(said)] == said
    assert driver.step - began < 10
    assert_parity(model, None, drafted)
    driver.close()


def test_no_adapter_has_new_ids_where_layers_have_a_table() -> None:
    with_table, without = (spec_of(make_model(name)) for name in ("gemma4-inputs", "gemma4"))
    assert with_table.most_ids == with_table.vocab_size
    assert without.most_ids == without.vocab_size + MAX_NEW_IDS


def test_devices_share_out_the_features_of_layers() -> None:
    settings = {"num_attention_heads": 12, "num_key_value_heads": 12}
    counts = [
        shard_counts(read_model(config_of(hidden_size_per_layer_input=size, **settings)))
        for size in (0, 8, 6)
    ]
    assert [set(each) for each in counts] == [{1, 2, 3, 4, 6, 12}, {1, 2, 4}, {1, 2, 3, 6}]


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"num_kv_shared_layers": 3}, "num_kv_shared_layers must leave a layer of each kind"),
        ({"num_kv_shared_layers": 2}, "num_kv_shared_layers must leave a layer of each kind"),
        ({"num_kv_shared_layers": -1}, "num_kv_shared_layers must leave a layer of each kind"),
        ({"num_kv_shared_layers": "2"}, "num_kv_shared_layers must leave a layer of each kind"),
        ({"is_causal": False}, "num_kv_shared_layers must be 0 where tokens see later ones"),
        ({"vocab_size_per_layer_input": 96}, "vocab_size_per_layer_input must be at least 97"),
        ({"hidden_size_per_layer_input": -4}, "hidden_size_per_layer_input must be"),
    ],
)
def test_refused_by_name(config: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        read_model(config_of(**config))
