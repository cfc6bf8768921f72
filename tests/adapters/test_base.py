"""The module table: names, and modules that only some layers have."""

import pytest

from loraplex.adapters.base import (
    BaseSpec,
    ExpertWeight,
    LayerModules,
    ModuleShape,
    base_modules,
    module_name,
)

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


def base_of(*layers: LayerModules) -> BaseSpec:
    head = {"lm_head": ModuleShape("lm_head", 32, 64)}
    return BaseSpec("0" * 64, ("base",), 32, 64, layers, head)


def test_a_layer_has_modules_of_its_own_and_experts_are_one_module() -> None:
    q_proj = {"q_proj": ModuleShape("self_attn.q_proj", 32, 32)}
    dense = q_proj | {"gate_proj": ModuleShape("mlp.gate_proj", 32, 48)}
    sparse = q_proj | {"experts.gate_proj": ModuleShape(EXPERTS, 32, 24, experts=128)}
    base = base_of(
        LayerModules("model.layers.0", sparse, {}),
        LayerModules("model.layers.1", dense, {}),
        LayerModules("model.layers.2", sparse, {}),
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


def test_one_short_name_has_the_shape_and_the_path_of_its_layer() -> None:
    base = base_of(
        LayerModules(
            "model.layers.0", {"o_proj": ModuleShape("attn.o_proj", 16, 32)}, {"o": ("o_proj",)}
        ),
        LayerModules(
            "tower.blocks.0", {"o_proj": ModuleShape("o_proj", 48, 8)}, {"o": ("o_proj",)}
        ),
    )
    assert [(module.layer, module.path) for module in base_modules(base)] == [
        (0, "model.layers.0.attn.o_proj"),
        (1, "tower.blocks.0.o_proj"),
        (-1, "lm_head"),
    ]
    assert [base.of_site(layer, "o", 0).out_features for layer in (0, 1)] == [32, 8]
    assert base.of_site(-1, "lm_head", 0).out_features == 64


def test_a_tensor_of_all_experts_lies_in_a_module() -> None:
    assert ExpertWeight("mlp.experts.down_proj", ("experts.down_proj",)).holder == "mlp.experts"
