"""The module table: names, and modules that only some layers have."""

import pytest

from loraplex.adapters.base import BaseSpec, ExpertWeight, ModuleShape, base_modules, module_name

EXPERTS = "mlp.experts.{}.gate_proj"


@pytest.mark.parametrize(
    ("path", "name"),
    [
        ("self_attn.q_proj", "q_proj"),
        ("mlp.gate_proj", "gate_proj"),
        (EXPERTS, "experts.gate_proj"),
        ("block_sparse_moe.experts.{}.w1", "experts.w1"),
        ("lm_head", "lm_head"),
    ],
)
def test_a_short_name_says_whether_each_expert_has_the_module(path: str, name: str) -> None:
    assert module_name(path) == name


def test_a_layer_has_the_modules_of_its_kind_and_experts_are_one_module() -> None:
    base = BaseSpec(
        digest="0" * 64,
        names=("base",),
        num_layers=3,
        hidden_size=32,
        vocab_size=64,
        layer_modules={
            "q_proj": ModuleShape("self_attn.q_proj", 32, 32),
            "gate_proj": ModuleShape("mlp.gate_proj", 32, 48, layers=(1,)),
            "experts.gate_proj": ModuleShape(EXPERTS, 32, 24, experts=128, layers=(0, 2)),
        },
        model_modules={"lm_head": ModuleShape("lm_head", 32, 64)},
    )
    assert [(module.layer, module.name) for module in base_modules(base)] == [
        (0, "q_proj"),
        (0, "experts.gate_proj"),
        (1, "q_proj"),
        (1, "gate_proj"),
        (2, "q_proj"),
        (2, "experts.gate_proj"),
        (-1, "lm_head"),
    ]
    of_experts = [module for module in base_modules(base) if module.shape.is_of_experts]
    assert of_experts[0].path == "model.layers.0.mlp.experts.{}.gate_proj"


def test_a_tensor_of_all_experts_lies_in_a_module() -> None:
    assert ExpertWeight("mlp.experts.down_proj", ("experts.down_proj",)).holder == "mlp.experts"
