"""Gemma: what each setting does."""

from typing import Any

import pytest

from loraplex.server.model.families.registry import read_model
from loraplex.server.model.spec.model_spec import RopeSpec
from tests.server.model.families.parity import prompt
from tests.server.model.hub_models import make_model, reference_logprobs

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")


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
    ours, theirs = (reference_logprobs(make_model("gemma2", **c), None, ids) for c in ({}, other))
    assert (ours - theirs).abs().max() > 0.01


GEMMA3: dict[str, Any] = {
    "model_type": "gemma3_text",
    "vocab_size": 100,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 8,
    "num_attention_heads": 4,
    "max_position_embeddings": 1024,
}
EXPERTS: dict[str, Any] = {
    "model_type": "gemma4_text",
    "hidden_size_per_layer_input": 0,
    "enable_moe_block": True,
    "num_experts": 8,
    "top_k_experts": 2,
    "moe_intermediate_size": 32,
}
LINEAR = {"rope_type": "linear", "factor": 8.0}


@pytest.mark.parametrize(
    "spelled",
    [
        {"rope_theta": 3e5, "rope_local_base_freq": 200.0, "rope_scaling": LINEAR},
        {
            "rope_parameters": {
                "full_attention": {**LINEAR, "rope_theta": 3e5},
                "sliding_attention": {"rope_type": "default", "rope_theta": 200.0},
            }
        },
    ],
    ids=["transformers 4", "transformers 5"],
)
def test_gemma3_rotates_by_kind_of_layer(spelled: dict[str, Any]) -> None:
    model = read_model({**GEMMA3, **spelled, "sliding_window": 512})
    full = RopeSpec("linear", 3e5, 8.0)
    windowed = RopeSpec("default", 200.0)
    kinds = [(512, windowed)] * 5 + [(None, full)] + [(512, windowed)] * 2
    assert [(x.attention.window, x.attention.rope) for x in model.layers] == kinds
    assert model.max_context == 1024  # with the factor


def test_gemma3_has_defaults() -> None:
    model = read_model({**GEMMA3, "max_position_embeddings": 9999, "sliding_window_pattern": 2})
    assert model.windows == (4096, None) * 4
    thetas = [layer.attention.rope and layer.attention.rope.theta for layer in model.layers]
    assert thetas == [1e4, 1e6] * 4


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"use_bidirectional_attention": True}, "is_causal is false"),
        ({"use_bidirectional_attention": True, "sliding_window": 1}, "must be at least 2"),
        ({"use_bidirectional_attention": "vision"}, "use_bidirectional_attention must be false"),
        ({"attn_logit_softcapping": 50.0}, "attn_logit_softcapping must be null"),
        ({"rope_parameters": {"rope_type": "default"}}, "rope_parameters must have tables"),
        ({"rope_parameters": 3}, "rope_parameters must be a table"),
        ({"rope_scaling": ["linear"]}, "rope_scaling must be a table"),
        ({"rope_parameters": {"full_attention": 8}}, "full_attention must be a table"),
        ({"sliding_window_pattern": 0}, "sliding_window_pattern"),
        ({"hidden_activation": ["gelu"]}, "hidden_activation must be one of"),
        ({"final_logit_softcapping": -1}, "final_logit_softcapping"),
        ({"model_type": "gemma", "hidden_activation": "relu"}, "hidden_activation must be gelu"),
        ({"model_type": "gemma", "hidden_act": "mish"}, "hidden_act must be one of"),
        ({"model_type": "gemma2", "query_pre_attn_scalar": 0}, "query_pre_attn_scalar"),
        ({**EXPERTS, "num_experts": None}, "num_experts must be"),
        ({**EXPERTS, "top_k_experts": 9}, "top_k_experts is 9, but there are 8 experts"),
        ({**EXPERTS, "moe_intermediate_size": 0}, "moe_intermediate_size must be"),
        ({**EXPERTS, "hidden_activation": "relu"}, "silu or gelu_tanh with experts"),
    ],
)
def test_refused_by_name(config: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        read_model({**GEMMA3, **config})
