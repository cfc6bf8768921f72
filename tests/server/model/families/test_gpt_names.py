"""Checkpoints of GPT-2's kin as their makers wrote them: other names, and masks beside weights."""

from pathlib import Path

import pytest
import torch
from peft import LoraConfig
from safetensors.torch import load_file, save_file

from loraplex.adapters.errors import AdapterError
from tests.server.model.driver import Driver, Stream, generate
from tests.server.model.families.parity import GREEDY, assert_parity, prompt
from tests.server.model.hub_models import add_adapter, make_model, save_model
from tests.server.model.slabs import pack_folder, spec_of

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")
MASK = torch.ones(1, 1, 4, 4)
# A row of parity's table -> how its tensors are named, how they were, and what lies beside them.
ROWS: dict[str, tuple[str, str, str]] = {
    "bloom": ("transformer.", "", "h.0.self_attention.masked_bias"),
    "codegen": ("transformer.", "transformer.", "transformer.h.0.attn.causal_mask"),
    "gpt2": ("transformer.", "", "h.0.attn.bias"),
    "gpt-neox": ("embed_out.", "lm_head.", "gpt_neox.layers.1.attention.bias"),
    "falcon": ("transformer.", "", "h.0.self_attention.rotary_emb.inv_freq"),
    "gptj": ("transformer.", "transformer.", "transformer.h.0.attn.masked_bias"),
    "mpt": ("transformer.", "transformer.", "transformer.blocks.0.attn.masked_bias"),
    "opt": ("model.decoder.", "decoder.", "decoder.layers.0.self_attn.masked_bias"),
}


@pytest.mark.parametrize("row", ROWS)
def test_as_their_makers_wrote_them(row: str, tmp_path: Path) -> None:
    model, (usual, old, beside) = make_model(row), ROWS[row]
    path = save_model(model, tmp_path) / "model.safetensors"
    stored = {
        old + name.removeprefix(usual) if name.startswith(usual) else name: tensor
        for name, tensor in load_file(path).items()
    }
    save_file({**stored, beside: MASK}, path)
    driver = Driver(tmp_path)
    stream = Stream(driver, 0, prompt(9, 1), sampling=GREEDY)
    generate(driver, [stream], 3, 5)
    assert_parity(model, None, stream)
    driver.close()


def test_adapters_on_the_head_under_its_older_name(tmp_path: Path) -> None:
    """GPT-NeoX's `lm_head` was `embed_out` in transformers 4."""
    targets = ["query_key_value", "lm_head"]
    config = LoraConfig(r=3, lora_alpha=6, target_modules=targets, rank_pattern={"lm_head": 5})
    model = add_adapter(make_model("gpt-neox"), "one", config, 1)
    model.save_pretrained(tmp_path, selected_adapters=["one"], save_embedding_layers=False)
    folder, base = tmp_path / "one", spec_of(model)
    expected = pack_folder(folder, base)[1]
    written, weights = folder / "adapter_config.json", folder / "adapter_model.safetensors"
    stored = load_file(weights)
    renamed = {name.replace(".lm_head.", ".embed_out."): of for name, of in stored.items()}
    assert len(renamed.keys() - stored.keys()) == 2
    save_file(renamed, weights)
    written.write_text(written.read_text().replace("lm_head", "embed_out"))
    assert pack_folder(folder, base)[1] == expected


def test_adapters_on_the_experts_of_dbrx_are_refused_by_name(tmp_path: Path) -> None:
    config = LoraConfig(r=3, target_modules=["Wqkv"], target_parameters=["mlp.w1"])
    model = add_adapter(make_model("dbrx"), "one", config, 1)
    model.save_pretrained(tmp_path, selected_adapters=["one"])
    with pytest.raises(AdapterError) as caught:
        pack_folder(tmp_path / "one", spec_of(model))
    said = {each.message for each in caught.value.violations}
    assert "target_parameters: the base model has no weight 'mlp.w1' that is served" in said
    assert any("no module transformer.blocks.0.ffn.experts.mlp" in each for each in said)
