"""What mlx-lm computes with an adapter is what PEFT computes with the converted one."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from peft import PeftModel
from safetensors.torch import load_file

from loraplex.adapters.errors import AdapterError, Findings
from loraplex.adapters.judge import judge_folder
from loraplex.adapters.peft.config import parse_config
from loraplex.adapters.peft.targeting import Targeting
from loraplex.adapters.peft.validate import AdapterLimits
from loraplex.adapters.safetensors.header import TensorInfo
from loraplex.launcher.convert.convert import ConversionOptions, convert_folder
from loraplex.launcher.convert.formats import MlxOptions, check_factors, plan_mlx
from loraplex.launcher.convert.plan import ConversionPlan
from tests.adapters.refusals import refusal
from tests.launcher.convert.folders import (
    BASE_NAME,
    HIDDEN,
    SCALE,
    SHAPES,
    VOCAB,
    Tensors,
    as_mlx_runs_it,
    layer_pairs,
    logits,
    mlx_config,
    model,
    pair,
    write_mlx,
)

pytestmark = pytest.mark.filterwarnings("ignore")
EMBED = pair("model.embed_tokens", VOCAB, HIDDEN, rank=4, seed=7)
HEAD = pair("lm_head", HIDDEN, VOCAB, rank=2, seed=8)
ATTENTION = {key: SHAPES[key] for key in ("self_attn.q_proj", "self_attn.v_proj")}


def converted(
    tmp_path: Path, tensors: Tensors, options: MlxOptions | None = None, **changes: Any
) -> Path:
    source, out = write_mlx(tmp_path / "mlx", tensors, **changes), tmp_path / "out"
    chosen = ConversionOptions(mlx=options or MlxOptions())
    convert_folder(source, out, None, AdapterLimits(), chosen)
    return out


@pytest.mark.parametrize(
    ("tensors", "tied"),
    [
        (layer_pairs(0, 1, 2), False),
        (layer_pairs(1, 2, keys=ATTENTION), False),
        (layer_pairs(1, rank=3) | layer_pairs(2, rank=8, keys=ATTENTION), False),
        (layer_pairs(0, 2) | layer_pairs(1, keys=ATTENTION), False),
        (layer_pairs(2) | EMBED | HEAD, False),
        (EMBED, False),
        (layer_pairs(2) | EMBED, True),
    ],
    ids=["all", "last layers", "ranks", "uneven", "embedding and head", "embedding", "tied"],
)
def test_peft_computes_what_mlx_does(tmp_path: Path, tensors: Tensors, tied: bool) -> None:
    out = converted(tmp_path, tensors, MlxOptions(ties_head=tied))
    ours = PeftModel.from_pretrained(model(tied), str(out))
    expected = logits(as_mlx_runs_it(tensors, tied=tied))
    assert float((expected - logits(model(tied))).abs().max()) > 0.1, "the adapter changes nothing"
    torch.testing.assert_close(logits(ours), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_values_are_the_same_bits(tmp_path: Path, dtype: torch.dtype) -> None:
    """And the product that serving computes is mlx-lm's, up to float32's rounding."""
    tensors = {name: tensor.to(dtype) for name, tensor in layer_pairs(0, 1).items()}
    out = converted(tmp_path, tensors)
    found = load_file(out / "adapter_model.safetensors")
    assert len(found) == len(tensors)
    for name, tensor in tensors.items():
        path, _, side = name.rpartition(".lora_")
        new = found[f"base_model.model.{path}.lora_{side.upper()}.weight"]
        assert new.dtype == dtype
        assert torch.equal(new.T.contiguous().view(torch.uint8), tensor.view(torch.uint8))
    x = np.linspace(-1, 1, HIDDEN)
    for module in judge_folder(out).tensors.ordinary:
        name = module.a.name.removeprefix("base_model.model.").removesuffix(".lora_A.weight")
        if tensors[f"{name}.lora_a"].shape[0] != HIDDEN:
            continue
        a, b = (tensors[f"{name}.lora_{side}"].double().numpy() for side in "ab")
        ours = found[module.b.name].double().numpy() @ (found[module.a.name].double().numpy() @ x)
        np.testing.assert_allclose(module.scale * ours, SCALE * ((x @ a) @ b), rtol=1e-6)


def test_the_config_names_what_has_tensors(tmp_path: Path) -> None:
    config = json.loads(
        (converted(tmp_path, layer_pairs(1, 2, keys=ATTENTION)) / "adapter_config.json").read_text()
    )
    assert config["target_modules"] == ["q_proj", "v_proj"]
    assert config["layers_to_transform"] == [1, 2]
    assert (config["r"], config["lora_alpha"]) == (4, 80)
    assert config["base_model_name_or_path"] == BASE_NAME


# The plan alone

Shapes = Mapping[str, tuple[int, ...]]


def infos(tensors: Shapes) -> list[TensorInfo]:
    return [TensorInfo(name, "F32", shape, 0, 4) for name, shape in tensors.items()]


Q: dict[str, tuple[int, ...]] = {
    "model.layers.0.self_attn.q_proj.lora_a": (8, 4),
    "model.layers.0.self_attn.q_proj.lora_b": (4, 6),
}


def planned(
    tensors: Shapes | None = None,
    options: MlxOptions | None = None,
    **changes: Any,
) -> ConversionPlan:
    return plan_mlx(mlx_config(**changes), infos(tensors or Q), options or MlxOptions())


def parameters(**values: Any) -> dict[str, Any]:
    return {"rank": 4, "scale": 20.0, "dropout": 0.0} | values


OLD = {"num_layers": None, "lora_layers": 16}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"fine_tune_type": "dora"}, "DoRA"),
        ({"fine_tune_type": None, "use_dora": True}, "DoRA"),
        ({"fine_tune_type": "full"}, "full"),
        ({"fine_tune_type": "prefix"}, "'prefix'"),
        ({"lora_parameters": None}, "lora_parameters"),
        ({"lora_parameters": {"rank": 4}}, "--scale"),
        ({"lora_parameters": parameters(scale="20")}, "--scale"),
        ({"lora_parameters": parameters(scale=True)}, "--scale"),
        ({"lora_parameters": parameters(keys=["self_attn.v_proj"])}, "self_attn.q_proj"),
        ({"lora_parameters": parameters(keys="q_proj")}, "list of names"),
        ({"model": 3}, "base's name"),
    ],
)
def test_refused_configs(change: dict[str, Any], words: str) -> None:
    with pytest.raises(AdapterError, match=words) as refused:
        planned(**change)
    assert refused.value.code == "invalid"


@pytest.mark.parametrize(
    ("tensors", "words"),
    [
        (Q | {"model.layers.0.self_attn.q_proj.m": (6,)}, "DoRA"),
        (Q | {"model.norm.weight": (8,)}, "model.norm.weight"),
        (Q | {"model.layers.0.self_attn.q_proj.lora_a_scales": (8, 1)}, "quantised"),
        ({"model.layers.0.self_attn.q_proj.lora_a": (8, 4)}, "not the other"),
        ({"a.b.lora_a": (8, 4), "a.b.lora_b": (5, 6)}, "do not fit"),
        ({"a.b.lora_a": (8,), "a.b.lora_b": (4, 6)}, "do not fit"),
        ({"a.b.lora_a": (8, 0), "a.b.lora_b": (0, 6)}, "do not fit"),
        ({"a.switch_mlp.up.lora_a": (4, 4, 8), "a.switch_mlp.up.lora_b": (4, 6, 4)}, "experts"),
        ({"model.embed_tokens.lora_a": (64, 4), "model.embed_tokens.lora_b": (4, 8)}, "--base"),
    ],
)
def test_refused_tensors(tensors: Shapes, words: str) -> None:
    with pytest.raises(AdapterError, match=words):
        planned(tensors)


def test_the_name_of_a_base_whose_factors_mlx_changes() -> None:
    config = mlx_config(model="mlx-community/Falcon-H1-1.5B-4bit")
    with pytest.raises(AdapterError, match="Falcon-H1"):
        check_factors(config, infos(Q), None)


def test_what_tells_whether_mlx_changes_factors_of_the_base() -> None:
    (note,) = check_factors(mlx_config(), infos(Q), None)
    assert note.startswith("not checked: whether the base is Falcon-H1")
    other = {"model.layers.0.mlp.up_proj.lora_a": (8, 4)}
    assert check_factors(mlx_config(), infos(Q | other), None) == ()
    for module in ("mamba.in_proj", "feed_forward.up_proj"):
        own = {f"model.layers.0.{module}.lora_a": (8, 4)}
        with pytest.raises(AdapterError, match="--base MODEL shows"):
            check_factors(mlx_config(), infos(Q | own), None)


def test_scale_of_2024() -> None:
    """`lora_layers` was renamed in October; in June `scale` lost the factor alpha / rank."""
    old = mlx_config(lora_parameters=parameters(alpha=16.0, scale=10.0)) | {"lora_layers": 16}
    del old["num_layers"], old["fine_tune_type"]
    with pytest.raises(AdapterError, match="10 from June on and 40 before"):
        plan_mlx(old, infos(Q), MlxOptions())
    assert alpha_of(plan_mlx(old, infos(Q), MlxOptions(scale=40.0))) == 160
    old["lora_parameters"]["alpha"] = 4
    assert alpha_of(plan_mlx(old, infos(Q), MlxOptions())) == 40
    assert alpha_of(planned(lora_parameters=parameters(alpha=16.0, scale=10.0))) == 40


def test_a_head_that_mlx_has_not() -> None:
    tensors = Q | {"lm_head.lora_a": (8, 4), "lm_head.lora_b": (4, 64)}
    assert planned(tensors).moves[2].name == "base_model.model.lm_head.lora_A.weight"
    with pytest.raises(AdapterError, match="ties it to its embedding"):
        planned(tensors, MlxOptions(ties_head=True))


JSON = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=5)),
    lambda child: st.one_of(
        st.lists(child, max_size=3), st.dictionaries(st.text(max_size=5), child, max_size=3)
    ),
    max_leaves=5,
)
NUMBER = st.one_of(JSON, st.just(10**400), st.floats(), st.integers(-3, 3))


@given(
    st.fixed_dictionaries(
        {},
        optional={
            "model": JSON,
            "num_layers": NUMBER,
            "lora_layers": NUMBER,
            "use_dora": JSON,
            "lora_parameters": st.one_of(
                JSON,
                st.dictionaries(
                    st.sampled_from(["rank", "scale", "alpha", "keys", "dropout"]), NUMBER
                ),
            ),
        },
    )
)
def test_any_config_is_planned_or_refused(config: dict[str, Any]) -> None:
    error = refusal(lambda: plan_mlx(config, infos(Q), MlxOptions()))
    assert error is None or (error.message.isprintable() and error.message.isascii())


def alpha_of(plan: ConversionPlan) -> float:
    alpha = json.loads(plan.config)["lora_alpha"]
    assert isinstance(alpha, int | float)
    return alpha


@pytest.mark.parametrize(
    ("change", "note"),
    [
        ({"num_layers": 1}, "num_layers is 1"),
        ({"lora_parameters": parameters(rank=8)}, "rank is 8"),
        ({"lora_parameters": parameters(alpha=16)}, "'alpha'"),
        ({"model": None}, "--base-name"),
    ],
)
def test_what_the_config_says_otherwise_is_noted(change: dict[str, Any], note: str) -> None:
    second = {name.replace("layers.0", "layers.1"): shape for name, shape in Q.items()}
    assert any(note in each for each in planned(Q | second, **change).notes)


def test_a_plain_config_has_no_notes() -> None:
    for num_layers in (-1, 1, 16):
        assert planned(num_layers=num_layers).notes == ()
    keys = parameters(keys=["self_attn.q_proj", "mlp.up_proj"])
    assert planned(lora_parameters=keys).notes == ()


def test_a_text_model_within_a_larger_one(tmp_path: Path) -> None:
    """mlx-lm's Gemma 3 has its text model so. `keys` are of a layer all the same; the tied head
    gets its name in that model."""
    plain = layer_pairs(0, 1, keys=ATTENTION) | EMBED
    tensors = {f"language_model.{name}": tensor for name, tensor in plain.items()}
    keys = [*ATTENTION, "language_model.model.embed_tokens"]
    options = MlxOptions(ties_head=True)
    out = converted(tmp_path, tensors, options, lora_parameters=parameters(keys=keys))
    found = {name.partition(".lora_")[0] for name in load_file(out / "adapter_model.safetensors")}
    assert len(found) == 2 * len(ATTENTION) + 2
    assert all(name.startswith("base_model.model.language_model.") for name in found)
    assert "base_model.model.language_model.lm_head" in found
    assert (
        planned({f"language_model.{name}": shape for name, shape in Q.items()}, num_layers=1).notes
        == ()
    )


PATHS = st.sets(
    st.tuples(st.integers(0, 5), st.sampled_from(sorted(SHAPES))), min_size=1, max_size=20
)


@given(places=PATHS, ranks=st.lists(st.sampled_from([1, 3, 4, 16]), min_size=20, max_size=20))
def test_targets_and_ranks_are_exact(places: set[tuple[int, str]], ranks: list[int]) -> None:
    """For any set of modules: those and no other are targeted, with rank and scale."""
    paths = {
        f"model.layers.{layer}.{key}": rank
        for (layer, key), rank in zip(sorted(places), ranks, strict=False)
    }
    tensors = {
        f"{path}.lora_{side}": shape
        for path, rank in paths.items()
        for side, shape in (("a", (8, rank)), ("b", (rank, 6)))
    }
    findings = Findings()
    config = parse_config(planned(tensors, num_layers=-1).config, findings)
    assert config is not None
    targeting = Targeting(config, findings)
    assert not findings
    for layer in range(6):
        for key in SHAPES:
            path = f"model.layers.{layer}.{key}"
            assert targeting.targets(path, is_other=False) is (path in paths)
            if path in paths:
                rank = targeting.lora_rank(path)
                assert rank == paths[path]
                assert config.scale(rank, targeting.lora_alpha(path)) == pytest.approx(
                    SCALE, rel=1e-15
                )
