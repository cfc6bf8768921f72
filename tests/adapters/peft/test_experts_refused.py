"""LoRA on experts that is not served: every reason by name."""

from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
import pytest

from loraplex.adapters.base import BaseSpec
from loraplex.adapters.judge import judge_folder
from loraplex.adapters.merge.plan import plan_merge
from loraplex.adapters.merge.recipe import MergeMember, make_recipe
from loraplex.adapters.peft.validate import AdapterLimits
from tests.adapter_folders import adapter_config, safetensors_bytes, write_config
from tests.adapters.expert_bases import EXPERTS, HIDDEN, INNER, expert_base
from tests.adapters.refusals import violation_codes

BASE = expert_base()
LAYER = "base_model.model.model.layers.0."
GATE_UP, DOWN = "mlp.experts.gate_up_proj", "mlp.experts.down_proj"
Shapes = dict[str, tuple[int, int]]


def pair(path: str, rank: int, inputs: int, outputs: int) -> Shapes:
    stem = LAYER + path
    return {f"{stem}.lora_A.weight": (rank, inputs), f"{stem}.lora_B.weight": (outputs, rank)}


OUTER = pair("mlp.experts", 2 * EXPERTS, INNER, HIDDEN)
INNERMOST = pair("mlp.experts.base_layer", 2 * EXPERTS, HIDDEN, 2 * INNER)
OF_EXPERT = pair("mlp.experts.1.down_proj", 2, INNER, HIDDEN)


def written(folder: Path, shapes: Shapes, config: dict[str, Any], base: BaseSpec = BASE) -> Path:
    folder.mkdir()
    write_config(folder, adapter_config(base, 2, ()) | {"target_modules": []} | config)
    rng = np.random.default_rng(0)
    tensors: dict[str, npt.NDArray[np.float32]] = {
        name: rng.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()
    }
    (folder / "adapter_model.safetensors").write_bytes(safetensors_bytes(tensors))
    return folder


WHOLE = {"target_parameters": [GATE_UP, DOWN]}
EACH = {"target_modules": ["down_proj"]}
CASES: dict[str, tuple[Shapes, dict[str, Any], set[str]]] = {
    "as it should be": (OUTER | INNERMOST, WHOLE, set()),
    "as it should be, of one expert": (OF_EXPERT, EACH, set()),
    "no such expert": (
        pair("mlp.experts.4.down_proj", 2, INNER, HIDDEN),
        EACH,
        {"expert_out_of_range"},
    ),
    "no such module": (pair("mlp.experts.1.w2", 2, INNER, HIDDEN), EACH, {"unknown_module"}),
    "router": (
        OF_EXPERT | pair("mlp.gate", 2, HIDDEN, EXPERTS),
        {"target_modules": ["down_proj", "gate"]},
        set(),
    ),
    "router as a parameter": (
        OUTER | INNERMOST | pair("mlp.gate", 2, HIDDEN, EXPERTS),
        {"target_parameters": [GATE_UP, DOWN, "gate.weight"]},
        set(),
    ),
    "unknown parameter": (
        OUTER | INNERMOST,
        {"target_parameters": [GATE_UP, DOWN, "gate_up_proj_bias"]},
        {"unknown_target"},
    ),
    "both forms": (OUTER | OF_EXPERT, WHOLE | EACH, {"mixed_experts"}),
    "not targeted": (OUTER, EACH, {"untargeted_tensor"}),
    "deeper than is targeted": (
        OUTER | INNERMOST,
        {"target_parameters": [DOWN]},
        {"untargeted_tensor"},
    ),
    "half a pair": (
        {
            name: shape
            for name, shape in (OUTER | INNERMOST).items()
            if "experts.lora_A" not in name
        },
        WHOLE,
        {"lone_tensor"},
    ),
    "other rank": (OUTER | INNERMOST, WHOLE | {"r": 3}, {"rank_mismatch"}),
    "too large a rank": (
        OUTER | INNERMOST,
        WHOLE | {"rank_pattern": {"down_proj": 300}},
        {"rank_too_large", "rank_mismatch"},
    ),
    "wrong shape": (
        pair("mlp.experts", 2 * EXPERTS, INNER + 1, HIDDEN) | INNERMOST,
        WHOLE,
        {"shape_mismatch"},
    ),
    "changed roles in one of two": (
        pair("mlp.experts", 2 * EXPERTS, HIDDEN, INNER) | INNERMOST,
        WHOLE,
        {"shape_mismatch"},
    ),
    "of one expert, wrong shapes and ranks": (
        pair("mlp.experts.1.down_proj", 2, INNER + 1, HIDDEN)
        | pair("mlp.experts.2.down_proj", 3, INNER, HIDDEN),
        EACH,
        {"shape_mismatch", "rank_mismatch"},
    ),
    "activated": (OF_EXPERT, EACH | {"alora_invocation_tokens": [1]}, {"unsupported_feature"}),
    "activated, experts without tensors": (
        pair("mlp.gate", 2, HIDDEN, EXPERTS),
        {"target_modules": ["down_proj", "gate"], "alora_invocation_tokens": [1]},
        set(),
    ),
    "random initial values": (
        OUTER,
        WHOLE | {"init_lora_weights": False},
        {"missing_tensor"},
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_every_reason_is_named(case: str, tmp_path: Path) -> None:
    shapes, config, expected = CASES[case]
    folder = written(tmp_path / "a", shapes, config)
    if not expected:
        assert judge_folder(folder, BASE).manifest.nbytes == 4 * sum(
            a * b for a, b in shapes.values()
        )
        return
    assert violation_codes(lambda: judge_folder(folder, BASE)) == expected


def test_without_the_base_tensors_of_all_experts_cannot_be_checked(tmp_path: Path) -> None:
    folder = written(tmp_path / "a", OUTER | INNERMOST, WHOLE)
    assert "needs_base" in violation_codes(lambda: judge_folder(folder))


SWAPPED = pair("mlp.experts", 2 * EXPERTS, HIDDEN, INNER)


def test_old_files_with_changed_roles_are_read(tmp_path: Path) -> None:
    shapes = SWAPPED | pair("mlp.experts.base_layer", 2 * EXPERTS, 2 * INNER, HIDDEN)
    judged = judge_folder(written(tmp_path / "a", shapes, WHOLE), BASE)
    assert [module.lora_rank for module in judged.tensors.modules] == [2, 2, 2]


@pytest.mark.parametrize(
    ("version", "as_gpt_oss", "swapped"),
    [
        ("0.18.1", False, True),
        ("0.19.0", False, True),
        ("0.19.1", False, False),
        ("1.0.0", False, False),
        ("0.18.2.dev0", False, None),
        (None, False, None),
        ("0.18.0", True, False),
        ("0.19.0", True, None),
        ("0.21.2", True, None),
        (None, True, None),
    ],
)
def test_square_matrices_are_as_the_version_of_peft_says(
    version: str | None, as_gpt_oss: bool, swapped: bool | None, tmp_path: Path
) -> None:
    base = expert_base(inner=HIDDEN, as_gpt_oss=as_gpt_oss)
    shapes = pair("mlp.experts", 2 * EXPERTS, HIDDEN, HIDDEN)
    config = {"target_parameters": [DOWN], "peft_version": version}
    folder = written(tmp_path / "a", shapes, config, base)
    if swapped is None:
        assert violation_codes(lambda: judge_folder(folder, base)) == {"ambiguous_layout"}
        return
    (module,) = judge_folder(folder, base).tensors.modules
    assert getattr(module, "is_swapped", None) is swapped


@pytest.mark.parametrize("swapped", [False, True])
def test_square_matrices_are_as_the_others_are(swapped: bool, tmp_path: Path) -> None:
    """gpt-oss has square matrices in down, and others in gate and up."""
    base = expert_base(inner=HIDDEN, as_gpt_oss=True)
    sizes = (2 * HIDDEN, HIDDEN) if swapped else (HIDDEN, 2 * HIDDEN)
    shapes = pair("mlp.experts", 2 * EXPERTS, HIDDEN, HIDDEN)
    shapes |= pair("mlp.experts.base_layer", 2 * EXPERTS, *sizes)
    judged = judge_folder(written(tmp_path / "a", shapes, WHOLE, base), base)
    assert {getattr(module, "is_swapped", None) for module in judged.tensors.modules} == {swapped}


def test_adapters_with_experts_are_not_merged(tmp_path: Path) -> None:
    tensors = judge_folder(written(tmp_path / "a", OF_EXPERT, EACH), BASE).tensors
    recipe = make_recipe([MergeMember("1" * 64, 2.0)], "linear", 1.0, "total")
    codes = violation_codes(lambda: plan_merge(recipe, [tensors], BASE, AdapterLimits()))
    assert codes == {"unsupported_merge"}


def test_a_config_without_experts_keeps_its_identity(tmp_path: Path) -> None:
    """New fields of a config do not count where an adapter does not use them."""
    folder = written(tmp_path / "a", OF_EXPERT, EACH | {"peft_version": "0.18.0"})
    config = judge_folder(folder, BASE).tensors.config
    assert b"peft_version" not in msgspec.json.encode(config)
    assert b"target_parameters" not in msgspec.json.encode(config)


@pytest.mark.parametrize(
    ("targets", "lacks"), [("all-linear", False), (["down_proj", "gate"], True)]
)
def test_a_router_that_was_no_linear_module_is_not_missing(
    targets: str | list[str], lacks: bool, tmp_path: Path
) -> None:
    """Transformers 5 has none, and `all-linear` then leaves the router out."""
    judged = judge_folder(written(tmp_path / "a", OF_EXPERT, {"target_modules": targets}), BASE)
    assert any(site[1] == "gate" for site in judged.tensors.missing) == lacks
