"""Readers of families with experts: defaults are transformers', other routing is refused."""

from typing import Any

import pytest
from msgspec.structs import replace
from transformers import GptOssConfig, MixtralConfig, Qwen3MoeConfig

from loraplex.server.model.families.registry import read_model
from loraplex.server.model.spec.model_spec import ModelSpec
from loraplex.server.model.spec.moe_spec import MoeSpec

SIZES: dict[str, Any] = {
    "vocab_size": 100,
    "hidden_size": 2048,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 32,
    "max_position_embeddings": 512,
    "eos_token_id": 2,
}
CONFIGS: dict[str, Any] = {
    "gpt_oss": GptOssConfig,
    "mixtral": MixtralConfig,
    "qwen3_moe": Qwen3MoeConfig,
}


def read(model_type: str, **changes: Any) -> ModelSpec:
    return read_model({**SIZES, "model_type": model_type, **changes})


def experts_of(model: ModelSpec) -> tuple[bool, ...]:
    return tuple(isinstance(layer.feed_forwards[0], MoeSpec) for layer in model.layers)


@pytest.mark.parametrize("model_type", CONFIGS)
def test_what_config_json_leaves_out_is_as_in_transformers(model_type: str) -> None:
    whole = CONFIGS[model_type](**SIZES).to_dict()
    expected = read_model({**whole, "model_type": model_type})
    assert replace(read(model_type), dtype=expected.dtype) == expected


def test_layers_with_experts() -> None:
    assert experts_of(read("qwen3_moe")) == (True,) * 4
    assert experts_of(read("qwen3_moe", mlp_only_layers=[0, 2])) == (False, True, False, True)
    assert experts_of(read("qwen3_moe", decoder_sparse_step=3)) == (False, False, True, False)


@pytest.mark.parametrize("key", ["num_experts", "num_local_experts"])
def test_both_names_of_the_number_of_experts(key: str) -> None:
    mlp = read("qwen3_moe", **{key: 9}).layers[0].feed_forwards[0]
    assert isinstance(mlp, MoeSpec)
    assert mlp.experts == 9


def test_noise_of_training_changes_nothing() -> None:
    assert read("mixtral", router_jitter_noise=0.1) == read("mixtral")


@pytest.mark.parametrize(
    ("model_type", "changes", "words"),
    [
        ("mixtral", {"num_experts_per_tok": 9}, "there are 8 experts"),
        ("mixtral", {"num_local_experts": 4, "num_experts": 5}, "must be the same"),
        ("mixtral", {"num_local_experts": 0}, "num_local_experts must be a positive"),
        ("mixtral", {"n_shared_experts": 1}, "n_shared_experts: experts that every token shares"),
        ("mixtral", {"sliding_window": 8, "layer_types": ["full_attention"] * 4}, "layer_types"),
        ("qwen3_moe", {"shared_expert_intermediate_size": 64}, "shared_expert_intermediate_size"),
        ("qwen3_moe", {"n_group": 8}, "groups of experts"),
        ("qwen3_moe", {"topk_group": 4}, "groups of experts"),
        ("qwen3_moe", {"scoring_func": "sigmoid"}, "scoring_func must be 'softmax'"),
        ("qwen3_moe", {"mlp_only_layers": 3}, "mlp_only_layers"),
        ("qwen3_moe", {"mlp_only_layers": ["0"]}, "mlp_only_layers"),
        ("qwen3_moe", {"decoder_sparse_step": 0}, "decoder_sparse_step"),
        ("qwen3_moe", {"quantization_config": {"quant_method": "mxfp4"}}, "mxfp4"),
        ("gpt_oss", {"swiglu_limit": 5.0}, "swiglu_limit must be 7"),
        ("gpt_oss", {"swiglu_alpha": 1.0}, "swiglu_alpha must be 1.702"),
        ("gpt_oss", {"hidden_act": "gelu"}, "hidden_act"),
        ("gpt_oss", {"layer_types": ["chunked_attention"] * 4}, "layer_types"),
        (
            "gpt_oss",
            {"quantization_config": {"quant_method": "mxfp4"}, "intermediate_size": 100},
            "multiple of 32",
        ),
    ],
)
def test_refused_by_name(model_type: str, changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match="not supported") as caught:
        read(model_type, **changes)
    assert words in str(caught.value)
