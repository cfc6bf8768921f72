"""What of a model is left to the reference operations, and that its reason is named."""

from typing import Any

import pytest
from msgspec.structs import replace

from loraplex.launcher.known_models import served_families
from loraplex.server.model.families.registry import read_model
from loraplex.server.model.ops.kernel_limits import unsupported
from loraplex.server.model.spec.model_spec import ModelSpec, NormSpec, PositionScale
from tests.server.model.spec.layers import with_attention

LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 100,
    "hidden_size": 128,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "max_position_embeddings": 512,
}


def changed(attention: dict[str, Any], rope: dict[str, Any]) -> ModelSpec:
    model = read_model(LLAMA)
    layer = model.layers[0]
    turned = replace(layer.attention.rope, **rope)  # type: ignore[type-var]
    layer = with_attention(layer, **{"rope": turned, **attention})
    return replace(model, layers=(layer,) * model.num_layers)


def wide(name: str) -> NormSpec:
    return NormSpec(f"self_attn.{name}_norm", 128, 1e-6)


@pytest.mark.parametrize(
    ("attention", "rope"),
    [
        ({}, {}),
        ({"q_norm": wide("q"), "k_norm": wide("k")}, {}),
        ({"q_scale": PositionScale(0.1, 16)}, {}),
        ({"rope": None}, {}),
        ({}, {"rotary_dim": 32}),
        ({}, {"interleaved": True}),
        ({}, {"short_factors": (1.0,) * 32, "attention_factor": 1.2}),
        ({}, {"long_factors": (1.0,) * 32, "original_context": 64}),
        ({"softcap": 30.0}, {}),
        ({"scale": 0.1}, {}),
        ({"window": 64}, {}),
        ({"sinks": True}, {}),
    ],
)
def test_other_maths_of_attention_is_computed(
    attention: dict[str, Any], rope: dict[str, Any]
) -> None:
    assert unsupported(changed(attention, rope), "bfloat16", (9, 0)) is None


def test_experts_are_computed() -> None:
    config = {**LLAMA, "model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2}
    config["num_key_value_heads"] = 2
    assert unsupported(read_model(config), "bfloat16", (9, 0)) is None


def test_other_routers_and_late_norms_are_named() -> None:
    moe = read_model(served_families()["phimoe"].config)
    assert "one after the other" in str(unsupported(moe, "bfloat16", (9, 0)))
    for name in ("olmoe", "minimax_m2", "glm4_moe", "lfm2_moe", "ernie4_5_moe"):
        assert unsupported(read_model(served_families()[name].config), "bfloat16", (9, 0)) is None
    late = read_model(served_families()["hunyuan_v1_dense"].config)
    assert "before the rotation" in str(unsupported(late, "bfloat16", (9, 0)))


@pytest.mark.parametrize(
    ("head_dim", "served"),
    [
        (16, True),
        (80, True),
        (96, True),
        (256, True),
        (72, False),
        (272, True),
        (512, True),
        (528, False),
    ],
)
def test_head_sizes(head_dim: int, served: bool) -> None:
    said = unsupported(read_model({**LLAMA, "head_dim": head_dim}), "bfloat16", (9, 0))
    assert said is None if served else f"the model's is {head_dim}" in str(said)


def test_other_devices_and_dtypes_are_named() -> None:
    model = read_model(LLAMA)
    assert "compute capability 8.0" in str(unsupported(model, "bfloat16", (7, 5)))
    assert "not in float32" in str(unsupported(model, "float32", (9, 0)))


def test_no_sequence_is_long_within_the_original_context() -> None:
    factors = {"short_factors": (1.0,) * 32, "long_factors": (2.0,) * 32, "original_context": 64}
    model = changed({}, factors)
    (rope,) = {layer.attention.rope for layer in model.within(64).layers}
    assert rope is not None
    assert not rope.long_factors
    assert model.within(65) == model
