"""Reading config.json: every family, both spellings of RoPE, and what is refused by name."""

import json
from typing import Any

import pytest
import torch
from msgspec.structs import replace
from transformers import CONFIG_MAPPING
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.pytorch_utils import Conv1D

from loraplex.adapters.base import ExpertWeight, LayerModules
from loraplex.server.model.families.registry import read_model
from loraplex.server.model.ops.rope import inverse_frequencies
from loraplex.server.model.spec.base_spec import base_spec
from loraplex.server.model.spec.model_spec import ModelSpec, PositionScale, RopeSpec
from tests.server.model.families.variants import LLAMA3_ROPE, VARIANTS, rows
from tests.server.model.hub_models import make_model
from tests.server.model.spec.layers import with_attention

LLAMA = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 100,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 512,
}


def read(generation: dict[str, Any] | None = None, **changes: Any) -> ModelSpec:
    return read_model({**LLAMA, **changes}, generation)


def rope_of(model: ModelSpec) -> RopeSpec:
    (rope,) = {layer.attention.rope for layer in model.layers}
    assert rope is not None
    return rope


def refusal(**changes: Any) -> str:
    with pytest.raises(ValueError, match=r"not supported|not served|no model_type") as caught:
        read(**changes)
    return str(caught.value)


def stacked_shape(layer: LayerModules, stored: ExpertWeight) -> tuple[int, int, int]:
    """[experts, out, in], or as `stored` turns it."""
    parts = [layer.modules[part] for part in stored.parts]
    ((experts, in_features),) = {(part.experts, part.in_features) for part in parts}
    out_features = sum(part.out_features for part in parts)
    if stored.transposed:
        return experts, in_features, out_features
    return experts, out_features, in_features


@pytest.mark.parametrize("name", VARIANTS)
def test_base_spec_is_the_module_table_of_transformers(name: str) -> None:
    model: Any = make_model(name)
    config = read_model(json.loads(model.config.to_json_string()))
    spec = base_spec(config, "d" * 64, ("base",)).text_part
    decoder = model.get_decoder()
    modules = dict(decoder.named_modules())
    layers = next(each for each in ("h", "blocks", "layers") if hasattr(decoder, each))
    assert spec.num_layers == config.num_layers == 3
    weights = [weight for layer in spec.layers for weight in layer.expert_weights]
    of_experts = {part for weight in weights for part in weight.parts}
    routers = {name for layer in spec.layers for name in layer.sites.get("router", ())}
    names = {
        (short, of.path)
        for layer in spec.layers
        for short, of in layer.modules.items()
        if short not in routers  # which the zoo names by their weights
    }
    targets = {*VARIANTS[name].targets, *VARIANTS[name].beside, *of_experts}
    assert {short for short, _ in names} == targets - routers
    for index, layer in enumerate(spec.layers):
        assert layer.path == f"model.layers.{index}"
        has = {short for short, path in names if f"{layers}.{index}.{path}" in modules}
        ordinary = {s for s, shape in layer.modules.items() if not shape.is_of_experts}
        assert ordinary - routers == has
        for short in has:
            shape = layer.modules[short]
            module: Any = modules[f"{layers}.{index}.{shape.path}"]
            weight = module.weight.T if isinstance(module, Conv1D) else module.weight
            assert shape.path.endswith(short)
            assert tuple(weight.shape) == (shape.out_features, shape.in_features)
        for stored in layer.expert_weights:
            tensor = decoder.get_parameter(f"layers.{index}.{stored.path}")
            assert tuple(tensor.shape) == stacked_shape(layer, stored)
    embed, head = spec.model_modules["embed_tokens"], spec.model_modules["lm_head"]
    embedding: Any = decoder.get_input_embeddings().weight
    output: Any = model.get_output_embeddings().weight
    assert tuple(embedding.shape) == (embed.in_features, embed.out_features)
    assert tuple(output.shape) == (head.out_features, head.in_features)


def test_equal_layers_share_their_tables() -> None:
    layers = base_spec(read(num_hidden_layers=100), "d" * 64, ("base",)).layers
    assert [layer.path for layer in layers] == [f"model.layers.{index}" for index in range(100)]
    assert len({(id(layer.modules), id(layer.sites)) for layer in layers}) == 1


@pytest.mark.parametrize("name", VARIANTS)
def test_inverse_frequencies_equal_those_of_transformers(name: str) -> None:
    model: Any = make_model(name)
    config = read_model(json.loads(model.config.to_json_string()))
    decoder = model.get_decoder()
    rotary = getattr(decoder, "rotary_emb", None) or getattr(decoder, "pos_emb", None)
    if rotary is None or getattr(model.config, "alibi", False):
        assert not any(attention.rope for attention in config.attentions.values())
        return
    for index, attention in config.attentions.items():
        by_kind = hasattr(rotary, "layer_types")
        prefix = f"{decoder.config.layer_types[index]}_" if by_kind else ""
        rope = attention.rope
        if rope is None:
            of = decoder.config
            assert of.layer_types[index] == "full_attention" or not of.no_rope_layers[index]
            continue
        found = inverse_frequencies(rope, attention.head_dim)
        if hasattr(rotary, "embed_positions"):  # sines of positions, then cosines
            assert torch.equal(found.sin(), rotary.embed_positions[1, : len(found)])
            continue
        expected = getattr(rotary, f"{prefix}inv_freq")
        assert torch.equal(found, expected)
        factor = getattr(rotary, f"{prefix}attention_scaling")
        factor = decoder.config.rope_parameters.get("short_mscale", factor)
        assert rope.attention_factor == pytest.approx(factor)


@pytest.mark.parametrize("truncate", [True, False])
@pytest.mark.parametrize("extra", [{}, {"mscale": 1.0, "mscale_all_dim": 0.5}, {"beta_fast": 16}])
def test_yarn_options(truncate: bool, extra: dict[str, Any]) -> None:
    rope = {
        "rope_type": "yarn",
        "rope_theta": 1e6,
        "factor": 4.0,
        "original_max_position_embeddings": 128,
        "truncate": truncate,
        **extra,
    }
    model = make_model("llama2", rope_parameters=rope)
    config = read_model(json.loads(model.config.to_json_string()))
    expected, factor = ROPE_INIT_FUNCTIONS["yarn"](model.config)
    got = inverse_frequencies(rope_of(config), config.layers[0].attention.head_dim)
    assert torch.allclose(got, expected, rtol=1e-6, atol=0)
    assert rope_of(config).attention_factor == pytest.approx(factor)


def test_both_spellings_of_rope_agree() -> None:
    old = {k: v for k, v in LLAMA3_ROPE.items() if k != "rope_theta"}
    theta = LLAMA3_ROPE["rope_theta"]
    assert (
        read(rope_parameters=LLAMA3_ROPE)
        == read(rope_theta=theta, rope_scaling=old)
        == read(rope_theta=theta, rope_scaling={**old, "type": "llama3"})
    )
    oldest = {"type": "linear", "factor": 4.0}
    assert rope_of(read(rope_scaling=oldest)).factor == 4.0


@pytest.mark.parametrize("name", rows(VARIANTS))
def test_a_context_that_is_not_said_is_that_of_transformers(name: str) -> None:
    config = json.loads(make_model(name).config.to_json_string())
    gone = {key: value for key, value in config.items() if key != "max_position_embeddings"}
    if len(gone) == len(config):
        return  # text_config says it
    kind: Any = CONFIG_MAPPING[config["model_type"]]
    usual = kind.from_dict({key: value for key, value in gone.items() if key != "time_step_limit"})
    # Mamba-2 alone has none.
    positions = getattr(usual, "max_position_embeddings", 262144)
    said = {**gone, "max_position_embeddings": positions}
    assert read_model(gone) == read_model(said)


def test_context() -> None:
    yarn = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512}
    assert read().max_context == 512
    assert read(rope_scaling=yarn).max_context == 2048
    assert read(rope_scaling={"type": "linear", "factor": 2.0}).max_context == 1024
    assert read(rope_scaling={"type": "dynamic", "factor": 2.0}).max_context == 512


@pytest.mark.parametrize(
    ("config", "generation", "expected"),
    [
        ({"eos_token_id": 7}, None, (7,)),
        ({"eos_token_id": [7, 8, 7]}, None, (7, 8)),
        ({"eos_token_id": 7}, {"eos_token_id": [9, 7]}, (9, 7)),
        ({"eos_token_id": 7}, {"temperature": 0.5}, (7,)),
        ({}, None, (2,)),
        ({"eos_token_id": None}, None, ()),
    ],
)
def test_end_of_sequence_ids(
    config: dict[str, Any], generation: dict[str, Any] | None, expected: tuple[int, ...]
) -> None:
    assert read(generation, **config).eos_token_ids == expected


def test_windows() -> None:
    mistral: dict[str, Any] = {
        "model_type": "mistral",
        "architectures": [],
        "num_key_value_heads": 2,
    }
    assert read(**mistral, sliding_window=100).windows == (100, 100)
    assert read(**mistral, sliding_window=512).windows == (None, None)
    assert read(**mistral, sliding_window=None).windows == (None, None)
    assert read(**mistral, sliding_window=0).windows == (None, None)
    assert read(**mistral, max_position_embeddings=9999).windows == (4096, 4096)
    qwen: dict[str, Any] = {
        "model_type": "qwen2",
        "architectures": ["Qwen2ForCausalLM"],
        "sliding_window": 64,
    }
    assert read(**qwen).windows == (None, None)
    assert read(**{**qwen, "sliding_window": 0}, use_sliding_window=True).windows == (None, None)
    assert read(**qwen, use_sliding_window=True, max_window_layers=1).windows == (None, 64)
    kinds = ["sliding_attention", "full_attention"]
    assert read(**qwen, use_sliding_window=True, layer_types=kinds).windows == (64, None)
    assert read(**mistral, sliding_window=100, layer_types=kinds).windows == (100, None)


def test_windows_that_contexts_cannot_leave_are_none() -> None:
    config = read(model_type="mistral", architectures=[], num_key_value_heads=2, sliding_window=100)
    assert config.within(101).windows == (100, 100)
    assert config.within(100).windows == (None, None)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"model_type": "ctrl"}, "ctrl"),
        ({"model_type": None}, "model_type"),
        ({"architectures": ["LlamaForTokenClassification"]}, "LlamaForCausalLM"),
        ({"hidden_act": "mish"}, "mish"),
        ({"quantization_config": {"bits": 4}}, "quantization_config"),
        ({"auto_map": {"AutoModelForCausalLM": "x.Y"}}, "auto_map"),
        ({"is_causal": False}, "is_causal"),
        ({"is_causal": None}, "is_causal"),
        ({"is_causal": 0}, "is_causal must be true or false"),
        ({"num_key_value_heads": 3}, "4 attention heads"),
        ({"head_dim": 15}, "head_dim"),
        ({"vocab_size": "many"}, "vocab_size"),
        ({"hidden_size": -1}, "hidden_size"),
        ({"rms_norm_eps": 0}, "rms_norm_eps"),
        ({"rope_scaling": {"rope_type": "longrope"}}, "short_factor must be a list of 8"),
        ({"rope_scaling": {"rope_type": "proportional"}}, "proportional"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "low_freq_factor"),
        ({"rope_scaling": {"type": "linear"}}, "factor"),
        ({"rope_theta": "big"}, "rope_theta"),
        ({"rope_parameters": {"full_attention": {"rope_theta": 1.0}}}, "rope_parameters"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"eos_token_id": 100}, "eos_token_id"),
        ({"eos_token_id": "</s>"}, "eos_token_id"),
    ],
)
def test_refused_by_name(changes: dict[str, Any], words: str) -> None:
    assert words in refusal(**changes)


LONG = {"type": "longrope", "short_factor": [1.0] * 8, "long_factor": [2.0] * 8}
MINISTRAL: dict[str, Any] = {"rope_type": "yarn", "factor": 2.0, "llama_4_scaling_beta": 0.1}


@pytest.mark.parametrize(
    ("model_type", "changes", "words"),
    [
        ("phi3", {"attention_bias": True}, "attention_bias"),
        ("phi3", {"mlp_bias": True}, "mlp_bias"),
        ("phi3", {"lm_head_bias": True}, "lm_head_bias"),
        ("phi3", {"interpolate_factor": 2}, "interpolate_factor"),
        ("phi3", {"layer_types": ["full_attention"] * 2}, "layer_types"),
        ("phi3", {"rope_scaling": {"type": "linear", "factor": 2.0}}, "rope_type"),
        ("phi3", {"rope_scaling": {**LONG, "short_factor": [1.0] * 7}}, "short_factor"),
        ("phi3", {"rope_scaling": {**LONG, "long_factor": 3}}, "long_factor"),
        ("phi3", {"rope_scaling": {**LONG, "long_factor": [0.0] * 8}}, "long_factor"),
        ("phi3", {"rope_scaling": LONG, "partial_rotary_factor": 0.5}, "short_factor"),
        ("phi3", {"partial_rotary_factor": 0.2}, "even part"),
        ("phi3", {"partial_rotary_factor": 1.5}, "partial_rotary_factor"),
        ("glm4", {"partial_rotary_factor": "half"}, "partial_rotary_factor"),
        ("phi3", {"rope_scaling": LONG, "original_max_position_embeddings": 0.5}, "at least 1"),
        ("qwen2", {"max_window_layers": None}, "max_window_layers must be an integer"),
        ("smollm3", {"layer_types": 3}, "layer_types must be a list"),
        ("phimoe", {"layer_types": 3}, "layer_types must be a list"),
        ("codegen", {"n_embd": 62, "n_head": 2}, "n_embd must be a multiple of 4"),
        ("bloom", {"n_inner": 100}, "n_inner"),
        ("bloom", {"n_head": 4, "num_attention_heads": 2}, "n_head"),
        ("bloom", {"pretraining_tp": 2, "slow_but_exact": True}, "slow_but_exact"),
        ("deepseek_v3", {"head_dim": 2}, "head_dim must be 64"),
        ("youtu", {"head_dim": 2}, "head_dim must be 64"),
        ("mistral4", {"head_dim": 5}, "head_dim must be 128"),
        ("gemma3_text", {"rope_scaling": {**MINISTRAL, "truncate": False}}, "truncate"),
        ("gemma3_text", {"rope_scaling": {"type": "linear", "factor": 2.0}}, "rope_type"),
        ("bamba", {"partial_rotary_factor": 1.0}, "partial_rotary_factor must be 0.5"),
        ("bloom", {"apply_residual_connection_post_layernorm": True}, "apply_residual"),
        ("mpt", {"expansion_ratio": 2}, "expansion_ratio"),
        ("mpt", {"attn_config": {"alibi_bias_max": 16}}, "alibi_bias_max"),
        ("mpt", {"attn_config": {"qk_ln": True}}, "qk_ln"),
        ("mpt", {"attn_config": {"clip_qkv": -1.0}}, "clip_qkv"),
        ("dbrx", {"attn_config": {"clip_qkv": -1}}, "clip_qkv"),
        ("dbrx", {"attn_config": {"rope_theta": 5.0}, "rope_theta": 6.0}, "rope_theta"),
        ("dbrx", {"ffn_config": {"moe_normalize_expert_weights": 2.0}}, "moe_normalize"),
        ("dbrx", {"ffn_config": {"ffn_act_fn": {"name": "gelu"}}}, "hidden_act"),
        ("falcon", {"n_embed": 32}, "n_embed"),
        ("falcon", {"multi_query": False, "num_kv_heads": 2}, "num_kv_heads"),
        ("falcon", {"num_ln_in_parallel_attn": 2}, "num_ln_in_parallel_attn"),
        ("falcon", {"new_decoder_architecture": True, "parallel_attn": False}, "parallel_attn"),
        ("gptj", {"tie_word_embeddings": True}, "tie_word_embeddings"),
        ("gptj", {"n_embd": 64, "n_head": 4, "n_layer": 2, "rotary_dim": 18}, "rotary_dim"),
        ("gpt2", {"add_cross_attention": True}, "add_cross_attention"),
        (
            "gpt_neo",
            {"num_heads": 4, "num_layers": 2, "attention_types": [[["local"], 1]]},
            "attention_types",
        ),
        (
            "gpt_neo",
            {"num_heads": 4, "num_layers": 1, "attention_types": [[["odd"], 1]]},
            "attention_types",
        ),
        ("opt", {"_remove_final_layer_norm": True}, "_remove_final_layer_norm"),
        ("opt", {"word_embed_proj_dim": 0}, "word_embed_proj_dim"),
        ("olmo", {"clip_qkv": -8.0}, "clip_qkv"),
        ("olmo2", {"clip_qkv": 8.0}, "clip_qkv"),
        ("olmo2", {"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ("olmo3", {"rope_parameters": {"rope_theta": 1e4}}, "rope_parameters"),
        ("olmo3", {"rope_theta": 1e4}, "rope_theta"),
        ("olmo3", {"rope_scaling": {"type": "yarn", "factor": 2.0, "truncate": False}}, "truncate"),
        ("helium", {"head_dim": 8}, "hidden_size"),
        ("exaone4", {"sliding_window_pattern": "LLLG"}, "sliding_window_pattern"),
        ("smollm3", {"no_rope_layers": [1]}, "no_rope_layers"),
        ("smollm3", {"no_rope_layers": [1, 2]}, "no_rope_layers"),
        ("smollm3", {"layer_types": ["sliding_attention"] * 2}, "use_sliding_window"),
        ("ministral3", {"rope_parameters": {"rope_type": "yarn", "factor": 2.0}}, "scaling_beta"),
        ("ministral3", {"layer_types": ["full_attention"] * 2}, "layer_types"),
        ("modernbert", {"classifier_pooling": ["cls"]}, "classifier_pooling must be cls or mean"),
    ],
)
def test_refused_of_one_family(model_type: str, changes: dict[str, Any], words: str) -> None:
    family: dict[str, Any] = {"model_type": model_type, "architectures": []}
    family |= {"num_key_value_heads": 2, "head_dim": 16, "eos_token_id": 2}
    assert words in refusal(**{**family, **changes})


def test_phi_reads_both_names_of_long_rope() -> None:
    phi: dict[str, Any] = {
        "model_type": "phi3",
        "architectures": [],
        "max_position_embeddings": 8192,
        "eos_token_id": 2,
    }
    model = read(**phi, rope_scaling=LONG)
    assert model == read(**phi, rope_scaling={**LONG, "type": "su"})
    assert model.short_context == 4096
    assert model.within(4096).short_context is None


def test_ministral_grows_queries_by_the_original_context() -> None:
    family: dict[str, Any] = {"model_type": "ministral3", "architectures": []}
    family |= {"num_key_value_heads": 2}
    table = {**MINISTRAL, "original_max_position_embeddings": 64}
    scale = read(**family, rope_parameters=table).layers[0].attention.q_scale
    assert scale == PositionScale(0.1, 64)
    usual = read(**family).layers[0].attention
    assert usual.q_scale == PositionScale(0.1, 16384)
    assert usual.rope is not None
    assert usual.rope.kind == "yarn"


def test_what_says_the_usual_changes_nothing() -> None:
    assert read(is_causal=True, hidden_act="silu", quantization_config=None) == read()
    assert read(hidden_act="swish", architectures=["LLaMAForCausalLM"]) == read()


def test_every_problem_at_once() -> None:
    text = refusal(hidden_act="mish", vocab_size=0, rope_scaling={"type": "su"})
    assert "hidden_act" in text
    assert "vocab_size" in text
    assert "'su'" in text


def test_layers_must_share_modules() -> None:
    model = read()
    first, *others = model.layers
    qkv = replace(first.attention.qkv, bias=not first.attention.qkv.bias)
    with pytest.raises(ValueError, match="same modules"):
        replace(model, layers=(with_attention(first, qkv=qkv), *others))


GRANITE: dict[str, Any] = {
    **LLAMA,
    "model_type": "granitemoehybrid",
    "architectures": ["GraniteMoeHybridForCausalLM"],
}


@pytest.mark.parametrize("kinds", [None, ["mamba", "conv"], ["linear_attention"] * 2, "all"])
def test_granite_needs_layers_that_attend(kinds: object) -> None:
    with pytest.raises(ValueError, match="layer_types"):
        read_model({**GRANITE, "layer_types": kinds})


def test_older_names_of_kinds_are_read() -> None:
    model = read_model({**GRANITE, "layer_types": ["mamba", "attention"], "mamba_n_heads": 8})
    assert ([*model.states], [*model.attentions]) == ([0], [1])


def test_granite_without_experts_has_the_roles_of_llama() -> None:
    config = {**GRANITE, "layer_types": ["attention"] * 2}
    dense = read_model({**config, "num_local_experts": 0}).layers[0]
    assert [linear.role for linear in dense.linears] == ["qkv", "o", "gate_up", "down"]
    roles = [linear.role for linear in read_model(config).layers[0].linears]
    shared = ["shared_gate_up", "shared_down"]
    assert roles[2:] == ["router", "experts_gate_up", "experts_down", *shared]


def test_dbrx_turns_as_its_own_code_says() -> None:
    """transformers 5 leaves the key out, and would turn by 10,000."""
    sizes = {"d_model": 64, "n_heads": 4, "n_layers": 2, "vocab_size": 97}
    model = read_model({"model_type": "dbrx", **sizes, "attn_config": {"rope_theta": 5e5}})
    assert rope_of(model).theta == 5e5
