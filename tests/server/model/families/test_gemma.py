"""Gemma: what each setting does, and what the GPU's kernels compute of it."""

import json
import os
from pathlib import Path
from typing import Any

import pytest

from server.model.families.registry import read_model
from server.model.ops.kernel_limits import unsupported
from server.model.spec import RopeSpec
from tests.server.model import fake_flashinfer
from tests.server.model.adapter_zoo import ZOO
from tests.server.model.families.parity import GREEDY, prompt
from tests.server.model.families.variants import SEVEN
from tests.server.model.gpu_pair import Pair, answer
from tests.server.model.hub_models import make_model, reference_logprobs

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")
# What the GPU's kernels compute too: a Llama with norms behind and a soft cap on logits.
PLAIN_LAYERS: dict[str, Any] = {
    "head_dim": 16,
    "query_pre_attn_scalar": 16,
    "layer_types": ["full_attention"] * 2,
    "attn_logit_softcapping": None,
    "num_hidden_layers": 2,
    "hidden_size": 32,
    "intermediate_size": 48,
}


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


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({}, None),
        ({"attn_logit_softcapping": 50.0}, "soft cap on attention's scores"),
        ({"query_pre_attn_scalar": 144}, "attention's scale of 0.0833333"),
        ({"layer_types": ["sliding_attention", "full_attention"]}, "--max-context of at most 7"),
    ],
)
def test_what_the_gpu_has_no_kernel_for_is_named(
    changes: dict[str, Any], reason: str | None
) -> None:
    heads = {"head_dim": 64, "query_pre_attn_scalar": 64}
    config = make_model("gemma2", **{**PLAIN_LAYERS, **heads, **changes}).config
    model = read_model(json.loads(config.to_json_string()))
    said = unsupported(model, "bfloat16", (9, 0))
    assert said is None if reason is None else reason in str(said)


@pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") != "1", reason="kernels need Triton's interpreter"
)
@pytest.mark.parametrize("backend", ["fa2", "fa3"])
def test_the_gpu_path_has_norms_behind_and_capped_logits(
    backend: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In decode graphs, and in steps with prompts; with adapters and without."""
    model = make_model("gemma2", **PLAIN_LAYERS)
    adapters = {"all": ZOO["rank64_everything"](SEVEN), "layers": ZOO["rank16"](SEVEN)}
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


GEMMA3: dict[str, Any] = {
    "model_type": "gemma3_text",
    "vocab_size": 100,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 8,
    "num_attention_heads": 4,
    "max_position_embeddings": 1024,
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
        ({"use_bidirectional_attention": True}, "use_bidirectional_attention must be false"),
        ({"attn_logit_softcapping": 50.0}, "attn_logit_softcapping must be null"),
        ({"rope_parameters": {"rope_type": "default"}}, "rope_parameters must have tables"),
        ({"rope_parameters": 3}, "rope_parameters must be a table"),
        ({"rope_scaling": ["linear"]}, "rope_scaling must be a table"),
        ({"rope_parameters": {"full_attention": 8}}, "full_attention must be a table"),
        ({"sliding_window_pattern": 0}, "sliding_window_pattern"),
        ({"hidden_activation": ["gelu"]}, "hidden_activation must be one of"),
        ({"final_logit_softcapping": -1}, "final_logit_softcapping"),
        ({"model_type": "gemma", "hidden_activation": "relu"}, "hidden_activation must be gelu"),
        ({"model_type": "gemma", "hidden_act": "relu"}, "hidden_act must be one of"),
        ({"model_type": "gemma2", "query_pre_attn_scalar": 0}, "query_pre_attn_scalar"),
    ],
)
def test_refused_by_name(config: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        read_model({**GEMMA3, **config})
