"""Families whose maths is not Llama's by the GPU's kernels, in Triton's interpreter.

In decode graphs and in steps with prompts, with adapters and without: as the reference operations,
which parity's table holds to transformers.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.kernels.batches import interpreted
from tests.server.model.adapter_zoo import zoo_of
from tests.server.model.families.variants import VARIANTS
from tests.server.model.gpu_pair import Pair, assert_same, ordinary, small_pair
from tests.server.model.hub_models import make_model

pytestmark = [
    pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning"),
    # PEFT compares patterns with modules alone, though they hold for parameters too.
    pytest.mark.filterwarnings("ignore:The following .*_pattern keys:RuntimeWarning"),
    # Infinity is meant.
    pytest.mark.filterwarnings("ignore:overflow encountered in exp2:RuntimeWarning"),
    interpreted,
]
SMALL: dict[str, Any] = {"num_hidden_layers": 2, "hidden_size": 32, "intermediate_size": 48}
EVEN: dict[str, Any] = {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2}
LATENT: dict[str, Any] = {
    "hidden_size": 64,
    "kv_lora_rank": 32,
    "qk_rope_head_dim": 16,
    "routed_scaling_factor": 1.0,
}
DELTA = ["linear_attention", "full_attention"]
BOTH = ["sliding_attention", "full_attention"]
# Two layers that read the keys and values of two others.
FOUR = {"num_hidden_layers": 4, "layer_types": BOTH * 2, "num_kv_shared_layers": 2, "head_dim": 16}
# A row of parity's table and the backend of FlashInfer -> what differs from the row and from SMALL.
SERVED: dict[tuple[str, str], dict[str, Any]] = {
    ("apertus", "fa3"): {**EVEN},
    ("arcee", "fa2"): {**EVEN, "head_dim": 16, "initializer_range": 0.1},
    ("gemma2", "fa3"): {"head_dim": 16, "sliding_window": 5},
    ("gemma2-uncapped", "fa3"): {"layer_types": ["full_attention"] * 2},
    ("gemma3", "fa3"): {"head_dim": 16, "layer_types": BOTH},
    ("gemma3-capped", "fa2"): {"head_dim": 16, "layer_types": BOTH},
    ("gemma4", "fa3"): {"head_dim": 16, "global_head_dim": 32, "layer_types": BOTH},
    ("gemma4-inputs", "fa3"): {**FOUR, "global_head_dim": 32},
    ("gemma4-wide-mlp", "fa2"): {**FOUR, "global_head_dim": 64},
    ("gemma4-moe", "fa3"): {"head_dim": 16, "global_head_dim": 32, "layer_types": BOTH},
    ("deepseek-v2", "fa3"): {**LATENT},
    ("deepseek-v2", "fa2"): {**LATENT, "q_lora_rank": 32},
    ("deepseek-v2-groups", "fa3"): {**LATENT},
    ("deepseek-v3", "fa3"): {**LATENT},
    ("deepseek-v3-halves", "fa2"): {**LATENT, "first_k_dense_replace": 1},
    ("minicpm3", "fa2"): {**LATENT},
    ("mistral4", "fa3"): {**LATENT, "qk_nope_head_dim": 16},
    ("dbrx", "fa3"): {"d_model": 64, "hidden_size": 64, "num_attention_heads": 4},
    ("glm4", "fa3"): {"head_dim": 16},
    ("gpt-oss", "fa3"): {"head_dim": 16, "layer_types": BOTH},
    ("bloom", "fa3"): {"hidden_size": 64, "num_attention_heads": 4},
    ("mpt", "fa2"): {"hidden_size": 48, "num_attention_heads": 3},
    ("falcon-new", "fa2"): {**EVEN, "ffn_hidden_size": 48},
    ("gpt2", "fa3"): {"hidden_size": 64, "n_inner": 48},
    ("gpt2", "fa2"): {"hidden_size": 64, "n_inner": 48},
    ("gpt-neox", "fa3"): {"hidden_size": 64, "rotary_pct": 0.5},
    ("gptj", "fa3"): {"hidden_size": 64, "n_inner": 48, "rotary_dim": 8},
    ("granite", "fa3"): {"hidden_size": 64},
    ("granite-hybrid", "fa3"): {"hidden_size": 64, "layer_types": ["attention"] * 2},
    ("llama-gelu", "fa3"): {**EVEN},
    ("ministral3", "fa2"): {},
    ("mixtral", "fa3"): {},
    ("mixtral", "fa2"): {},
    ("mistral-window", "fa3"): {"hidden_size": 64, "sliding_window": 5},
    ("nemotron", "fa3"): {"head_dim": 16},
    ("olmo2", "fa3"): {},
    ("olmo2", "fa2"): {},
    ("olmo3", "fa3"): {"hidden_size": 64, "layer_types": BOTH},
    ("opt-narrow", "fa3"): {"hidden_size": 64, "ffn_dim": 48, "word_embed_proj_dim": 32},
    ("opt-narrow", "fa2"): {"hidden_size": 64, "ffn_dim": 48, "word_embed_proj_dim": 32},
    ("persimmon", "fa3"): {"hidden_size": 64, "partial_rotary_factor": 0.5},
    ("phi", "fa3"): {"hidden_size": 64},
    ("phi3", "fa3"): {"hidden_size": 64},
    ("phi3-long", "fa3"): {"hidden_size": 64, "original_max_position_embeddings": 6},
    ("phi3-long", "fa2"): {"hidden_size": 64, "original_max_position_embeddings": 6},
    ("qwen3-moe", "fa3"): {"head_dim": 16},
    ("qwen3-moe-dense-layer", "fa2"): {"head_dim": 16},
    ("qwen2-moe", "fa3"): {"shared_expert_intermediate_size": 32},
    ("granite-moe-shared", "fa2"): {"hidden_size": 64},
    ("qwen3.5", "fa3"): {"head_dim": 16, "layer_types": DELTA},
    ("qwen3.5", "fa2"): {"head_dim": 16, "layer_types": DELTA[::-1], "linear_conv_kernel_dim": 2},
    ("qwen3-next", "fa3"): {
        "head_dim": 16,
        "layer_types": DELTA,
        "shared_expert_intermediate_size": 32,
    },
    ("olmo-hybrid", "fa3"): {"hidden_size": 64, "layer_types": DELTA},
    ("lfm2", "fa3"): {"hidden_size": 64, "layer_types": ["conv", "full_attention"]},
    ("bamba", "fa2"): {"hidden_size": 64, "mamba_d_head": 32, "attn_layer_indices": [0]},
    ("granite-h", "fa3"): {"hidden_size": 64, "layer_types": DELTA},
    ("falcon-h1", "fa3"): {"hidden_size": 64},
    ("falcon-h1-normed", "fa2"): {"hidden_size": 64},
    ("nemotron-h", "fa3"): {"head_dim": 16},
    ("mamba2", "fa3"): {"num_heads": 6, "head_dim": 16},
    ("mamba2", "fa2"): {"num_heads": 6, "head_dim": 16},
    ("nemotron-h-moe", "fa3"): {"head_dim": 16, "layers_block_type": ["moe", "full_attention"]},
    ("nemotron-h-latent", "fa2"): {"head_dim": 16, "layers_block_type": ["moe", "full_attention"]},
    ("lfm2-moe", "fa2"): {"hidden_size": 64, "layer_types": ["conv", "full_attention"]},
    ("glm4-moe", "fa3"): {"head_dim": 16, "first_k_dense_replace": 0},
    ("ernie-moe", "fa2"): {"head_dim": 16},
    ("minimax-m2", "fa3"): {"head_dim": 16},
    ("qwen2-window", "fa3"): {"hidden_size": 64, "sliding_window": 5},
    ("youtu", "fa3"): {**LATENT},
    ("smollm3", "fa2"): {"no_rope_layer_interval": 2},
}
# Between them these have windows, sinks, norms behind, over each head and over all, rotations of a
# part, normed values, wide layers, learned positions, latents, experts, an MLP
# beside them, inputs of layers, keys of other layers. `graphs/test_gpu_path_prompts.py`
# has caps, and `tests/kernels` slopes, rotations of neighbours, other scales and layers without
# rotation.
ALWAYS = {
    ("youtu", "fa3"),
    ("gemma4-inputs", "fa3"),
    ("gemma4-moe", "fa3"),
    ("gpt-oss", "fa3"),
    ("gpt2", "fa2"),
    ("olmo2", "fa2"),
    ("nemotron-h", "fa3"),
    ("phi", "fa3"),
    ("qwen3.5", "fa3"),
}


@pytest.fixture(params=ordinary(SERVED, ALWAYS))
def pair(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Pair]:
    name, backend = request.param
    model = make_model(name, **{**SMALL, **SERVED[request.param]})
    zoo = zoo_of(VARIANTS[name])
    on_experts = VARIANTS[name].others()
    adapters = on_experts or {each: zoo[each] for each in ("rank64_everything", "rank3_rslora")}
    if "shared_expert_gate" in VARIANTS[name].targets:
        adapters = {"sparse": on_experts["sparse"], "rank3_rslora": zoo["rank3_rslora"]}
    with small_pair(model, adapters, tmp_path, monkeypatch, backend=backend) as found:
        yield found


def test_same_as_the_reference(pair: Pair) -> None:
    assert_same(pair, [0, -1, 1])
