"""A family is a reader and a line in the registry: one whose maths no other family has.

It is Gemma 2's, which transformers computes: soft caps on scores and logits, norms behind attention
and MLP, windows in every other layer, a scale of its own, a scaled embedding.
"""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec.structs import replace
from peft import LoraConfig
from transformers import (
    Gemma2Config,
    Gemma2ForCausalLM,
    Phi3Config,
    Phi3ForCausalLM,
    PreTrainedModel,
)

from server.model.families import family
from server.model.families.family import Family
from server.model.families.fields import Fields
from server.model.families.registry import FAMILIES, read_model
from server.model.families.rope import read_rope
from server.model.spec import ModelSpec, NormSpec, NormsSpec, Part
from tests.server.model import fake_flashinfer
from tests.server.model.adapter_zoo import ZOO
from tests.server.model.driver import Driver, Stream, generate
from tests.server.model.gpu_pair import Pair, answer
from tests.server.model.hub_models import (
    SIZES,
    add_adapter,
    random_model,
    reference_logprobs,
    save_model,
)
from tests.server.model.slabs import pack
from tests.server.model.test_parity import GREEDY, assert_parity, prompt

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")
ACTIVATIONS: dict[str, Any] = {"gelu_pytorch_tanh": "gelu_tanh", "silu": "silu"}
SETTINGS: dict[str, Any] = {
    "head_dim": 24,
    "query_pre_attn_scalar": 40,
    "sliding_window": 7,
    "attn_logit_softcapping": 2.0,
    "final_logit_softcapping": 3.0,
    "attn_implementation": "eager",
}
# What the GPU's kernels compute too: a Llama with norms behind and a soft cap on logits.
PLAIN_LAYERS: dict[str, Any] = {
    "head_dim": 16,
    "query_pre_attn_scalar": 16,
    "layer_types": ["full_attention"] * 2,
    "attn_logit_softcapping": None,
    "hidden_activation": "silu",
    "num_hidden_layers": 2,
    "hidden_size": 32,
    "intermediate_size": 48,
}


def read(fields: Fields, generation: Mapping[str, Any]) -> ModelSpec:
    config = fields.config
    sizes = family.read_sizes(fields)
    rope, max_context = read_rope(fields, sizes.positions)
    scale = fields.number(config, "query_pre_attn_scalar", 256) ** -0.5
    activation = ACTIVATIONS[config["hidden_activation"]]

    def norm(name: str) -> NormSpec:
        return NormSpec(name, sizes.hidden, sizes.epsilon, offset=1.0)

    norms = NormsSpec(
        pre_attention=norm("input_layernorm"),
        post_attention=norm("post_attention_layernorm"),
        pre_mlp=norm("pre_feedforward_layernorm"),
        post_mlp=norm("post_feedforward_layernorm"),
    )
    cap = config["attn_logit_softcapping"]
    layers = [
        family.layer(
            sizes,
            family.attention(sizes, rope, window, scale=scale, softcap=cap),
            norms=norms,
            activation=activation,
        )
        for window in family.read_windows(fields, sizes, config["sliding_window"])
    ]
    eos = family.read_eos(fields, generation, sizes, default=1)
    plain = family.model(fields, sizes, layers, max_context, eos, tied=True)
    return replace(
        plain,
        embedding=replace(plain.embedding, scale=sizes.hidden**0.5),
        norm=norm("model.norm"),
        head=replace(plain.head, softcap=config["final_logit_softcapping"]),
    )


@pytest.fixture(autouse=True)
def _registered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(FAMILIES, "gemma2", Family("Gemma2ForCausalLM", read))
    monkeypatch.setitem(FAMILIES, "phi3", Family("Phi3ForCausalLM", read_fused))


def read_fused(fields: Fields, generation: Mapping[str, Any]) -> ModelSpec:
    """Phi 3's: q, k and v are one module of the checkpoint and of PEFT, gate and up another."""
    sizes = family.read_sizes(fields)
    rope, max_context = read_rope(fields, sizes.positions)
    layer = family.layer(sizes, family.attention(sizes, rope))
    layer = replace(
        layer,
        qkv=replace(layer.qkv, parts=(Part("self_attn.qkv_proj", layer.qkv.out_features),)),
        gate_up=replace(layer.gate_up, parts=(Part("mlp.gate_up_proj", 2 * sizes.inner),)),
    )
    eos = family.read_eos(fields, generation, sizes)
    return family.model(fields, sizes, (layer,) * sizes.layers, max_context, eos)


def make_capped(**changes: Any) -> PreTrainedModel:
    settings = {**SIZES, **SETTINGS, **changes}
    return random_model(Gemma2Config, Gemma2ForCausalLM, **settings)


@pytest.mark.parametrize("chunk", [1, 5, 64])
def test_the_base_is_that_of_transformers(chunk: int, tmp_path: Path) -> None:
    model = make_capped()
    driver = Driver(save_model(model, tmp_path))
    streams = [
        Stream(driver, row, prompt(length, length), sampling=GREEDY)
        for row, length in enumerate((1, 4, 17, 40))
    ]
    generate(driver, streams, 9, chunk)
    for stream in streams:
        assert_parity(model, None, stream)
    driver.close()


def assert_adapters(
    model: PreTrainedModel, configs: Mapping[str, LoraConfig], folder: Path
) -> None:
    """In one batch with the base, what PEFT computes."""
    driver = Driver(save_model(model, folder))
    oracle: Any = model
    slots: dict[str | None, int] = {None: -1}
    first = 0
    for slot, (name, config) in enumerate(configs.items()):
        oracle = add_adapter(oracle, name, config, slot)
        layout, slab = pack(oracle, name)
        assert driver.load(slot, layout, slab, first).error is None
        slots[name], first = slot, first + sum(layout.runs)
    streams = {
        name: Stream(driver, row, prompt(9 + row, row), slot=slot, sampling=GREEDY)
        for row, (name, slot) in enumerate(slots.items())
    }
    generate(driver, list(streams.values()), 5, 4)
    for adapter, stream in streams.items():
        assert_parity(oracle, adapter, stream)
    driver.close()


def test_adapters_on_every_module_are_those_of_peft(tmp_path: Path) -> None:
    configs = {name: ZOO[name]() for name in ("rank16", "rank64_everything")}
    assert_adapters(make_capped(), configs, tmp_path)


def test_matrices_that_the_checkpoint_stores_fused(tmp_path: Path) -> None:
    settings = {**SIZES, "pad_token_id": 0, "tie_word_embeddings": False}
    model = random_model(Phi3Config, Phi3ForCausalLM, **settings)
    fused = ["qkv_proj", "gate_up_proj"]
    configs = {
        "fused": LoraConfig(r=8, lora_alpha=16, target_modules=fused),
        "others": LoraConfig(r=3, lora_alpha=3, target_modules=["o_proj", "down_proj"]),
    }
    assert_adapters(model, configs, tmp_path)


@pytest.mark.parametrize(
    "other",
    [
        {"attn_logit_softcapping": None},
        {"final_logit_softcapping": None},
        {"query_pre_attn_scalar": 24},
        {"sliding_window": 200},
        {"hidden_activation": "silu"},
    ],
    ids=lambda other: next(iter(other)),
)
def test_each_setting_changes_the_answer(other: dict[str, Any]) -> None:
    """Else parity would hold without it."""
    ids = prompt(17, 0)
    ours, theirs = (reference_logprobs(make_capped(**c), None, ids) for c in ({}, other))
    assert (ours - theirs).abs().max() > 0.01


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({}, None),
        ({"attn_logit_softcapping": 50.0}, "soft cap on attention's scores"),
        ({"query_pre_attn_scalar": 144}, "attention's scale of 0.0833333"),
        ({"hidden_activation": "gelu_pytorch_tanh"}, "activation gelu_tanh"),
        ({"layer_types": ["sliding_attention", "full_attention"]}, "--max-context of at most 7"),
    ],
)
def test_what_the_gpu_has_no_kernel_for_is_named(
    changes: dict[str, Any], reason: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_flashinfer.install(monkeypatch)
    from server.model.ops.attention_cuda import unsupported

    heads = {"head_dim": 64, "query_pre_attn_scalar": 64}
    config = make_capped(**{**PLAIN_LAYERS, **heads, **changes}).config
    model = read_model(json.loads(config.to_json_string()))
    said = unsupported(model, torch.bfloat16, (9, 0))
    assert said is None if reason is None else reason in str(said)
    fake_flashinfer.forget()


def test_layers_must_share_heads_and_modules() -> None:
    model = read_model(json.loads(make_capped(**PLAIN_LAYERS).config.to_json_string()))
    first, *others = model.layers
    attention = replace(first.attention, num_kv_heads=1)
    with pytest.raises(ValueError, match="same heads"):
        replace(model, layers=(replace(first, attention=attention), *others))


@pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") != "1", reason="kernels need Triton's interpreter"
)
@pytest.mark.parametrize("backend", ["fa2", "fa3"])
def test_the_gpu_path_has_norms_behind_and_capped_logits(
    backend: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In decode graphs, and in steps with prompts; with adapters and without."""
    model = make_capped(**PLAIN_LAYERS)
    adapters = {"all": ZOO["rank64_everything"](), "layers": ZOO["rank16"]()}
    pair = Pair(model, adapters, tmp_path, monkeypatch, backend=backend, max_running=4)
    slots = [0, -1, 1, 1]
    for chunk in (1, 4):
        found, expected = (answer(d, slots, GREEDY, chunk) for d in (pair.gpu, pair.reference))
        assert [s.output for s in found] == [s.output for s in expected]
        for ours, theirs in zip(found, expected, strict=True):
            for a, b in zip(ours.logprobs, theirs.logprobs, strict=True):
                assert dict(a.top) == pytest.approx(dict(b.top), abs=1e-4)
    assert pair.graphs
    pair.close()
    fake_flashinfer.forget()
