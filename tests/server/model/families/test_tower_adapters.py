"""Adapters on encoders of pictures and on projectors, against transformers' model with PEFT."""

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from peft import LoraConfig
from safetensors.torch import load_file, save_file

from loraplex.adapters.errors import AdapterError
from loraplex.server.model.lora.lora import Reach
from loraplex.server.model.ops import memory
from tests.server.model.driver import Driver
from tests.server.model.families.pictured import KINDS, Pictured, make_pictured, text
from tests.server.model.hub_models import add_adapter
from tests.server.model.slabs import pack, pack_folder, spec_of

pytestmark = pytest.mark.filterwarnings(
    "ignore::UserWarning", "ignore::FutureWarning", "ignore::RuntimeWarning"
)
# Names that encoders and text parts have in common, or that encoders alone have.
_SHORT = ["q_proj", "v_proj", "down_proj", "qkv", "proj", "fc1", "linear_fc2", "linear_1", "mlp.0"]
_TOWER = r".*(visual|vision_tower|projector|vision_model|connector).*"
_PRODUCTS = "qkv|fc1|linear_fc1|linear_1|out_proj|gate_proj|o_proj|projection_layer"
LORA: dict[str, dict[str, Any]] = {
    "texts": {
        "r": 3,
        "lora_alpha": 3,
        "target_modules": r".*(language_model|text_model).*(q_proj|v_proj)",
    },
    "short": {"r": 4, "lora_alpha": 4, "target_modules": _SHORT, "use_rslora": True},
    "every": {
        "r": 2,
        "lora_alpha": 1,
        "target_modules": "all-linear",
        "rank_pattern": {"qkv": 5, "out_proj": 7},
    },
    "tower": {
        "r": 8,
        "lora_alpha": 4,
        "target_modules": rf"{_TOWER}\.({_PRODUCTS})",
        "use_dora": True,
    },
}
# PEFT takes no module that wraps another one, so Gemma 4's are named apart.
_WRAPPED = r".*(language_model.*(q_proj|down_proj)|q_proj.linear|up_proj.linear|input_proj)"


def lora_of(kind: str) -> dict[str, dict[str, Any]]:
    """Configs of adapters for a kind of model."""
    if "gemma4" not in kind:
        return LORA
    short, tower = _WRAPPED, rf"{_TOWER}\.(q_proj|o_proj|gate_proj)\.linear"
    if kind == "gemma4_unified":  # whose encoder has no layers
        short, tower = r".*(q_proj|down_proj|patch_dense)", r".*(patch_dense|embedding_projection)"
    changes = {"short": {"target_modules": short}, "tower": {"target_modules": tower}}
    return {name: {**config, **changes.get(name, {})} for name, config in LORA.items()}


PARTS: list[list[list[int] | str]] = [
    [text(3, 0), "a", text(4, 1)],
    [text(1, 2), "b", "c", text(2, 3)],
    ["d", text(6, 4), "a", text(1, 5), "b"],
    [text(9, 6)],
]
SHORT = ("llava", "qwen2_5_vl")
ALL = [k if k in SHORT else pytest.param(k, marks=pytest.mark.exhaustive) for k in KINDS]


@pytest.fixture(scope="module", params=ALL)
def served(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Pictured]:
    folder = tmp_path_factory.mktemp("tower-adapters")
    make = partial(Driver, max_draft=4)
    found = Pictured(folder, make, kind=request.param, lora=lora_of(request.param))
    yield found
    found.driver.close()


@pytest.mark.parametrize("step_tokens", [22, 400])
def test_mixed_adapters_of_text_of_the_tower_of_both(served: Pictured, step_tokens: int) -> None:
    engine = served.engine(max_step_tokens=step_tokens)
    names = [None, *LORA]
    requests = [
        served.pictured(parts, adapter=served.digest(names[(i + shift) % 5]), max_tokens=3)
        for shift in range(5)
        for i, parts in enumerate(PARTS)
    ]
    served.assert_answers(engine, requests)


@pytest.mark.parametrize(
    "kind", ["qwen2_5_vl", pytest.param("qwen3_vl", marks=pytest.mark.exhaustive)]
)
def test_pictures_in_blocks_of_rows(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(memory._CHUNK_PATCHES, "cpu", 16)
    served = Pictured(tmp_path, kind=kind, lora=LORA)
    engine = served.engine(max_step_tokens=30)
    requests = [
        served.pictured(parts, adapter=served.digest(name), max_tokens=2)
        for name, parts in zip([*LORA, None], [*PARTS, PARTS[2]], strict=True)
    ]
    served.assert_answers(engine, requests)
    served.driver.close()


def test_results_are_shared_by_who_sees_alike_and_scales_are_of_the_tower_too(
    served: Pictured,
) -> None:
    engine, segments = served.engine(), []
    for name, scale in ((None, 1), ("texts", 1), ("short", 1), ("short", 1), ("short", 0.5)):
        request = served.pictured(
            [text(5, 20), "a", text(3, 21)],
            adapter=served.digest(name),
            adapter_scale=scale,
            max_tokens=3,
        )
        before = engine.segments
        key = engine.submit(request)
        engine.run()
        segments.append(engine.segments - before)
        if scale == 1:
            served.assert_right(engine, {key: request})
        else:
            for layer in (each for each in served.oracle.modules() if hasattr(each, "set_scale")):
                layer.set_scale("short", scale)
            served.assert_right(engine, {key: request})
            for layer in (each for each in served.oracle.modules() if hasattr(each, "set_scale")):
                layer.set_scale("short", 1)
    assert segments == [1, 0, 1, 0, 1]
    engine.assert_at_rest()


def test_steps_of_text_see_nothing_of_what_changes_the_tower(served: Pictured) -> None:
    """The kernels' table has records of the text part alone, and an adapter of the tower alone is
    none to a step."""
    engine, executor = served.engine(), served.driver.executor
    request = served.pictured([text(4, 40)], adapter=served.digest("tower"), max_tokens=2)
    engine.submit(request)
    engine.run()
    table = executor._table
    assert table.tower is not None
    assert table.device_table.num_sites == len(table.sites)
    slot = engine.scheduler.arena.slot(served.digest("tower") or "")
    assert table.of_tower(slot, 1.0)
    assert table.reach(np.array([slot])) is Reach.NONE
    assert not table.changes_outputs(np.array([slot]))  # though it is DoRA


@pytest.mark.parametrize(
    ("kind", "renames"),
    [
        ("qwen2_5_vl", {"model.visual.": "visual.", "model.language_model.": "model."}),
        (
            "llava",
            {
                "model.vision_tower.": "vision_tower.vision_model.",
                "model.multi_modal_projector.": "multi_modal_projector.",
                "model.language_model.": "language_model.model.",
            },
        ),
        ("llava", {"model.vision_tower.": "model.vision_tower.vision_model."}),
    ],
)
def test_names_of_earlier_versions(kind: str, renames: dict[str, str], tmp_path: Path) -> None:
    model = add_adapter(make_pictured(kind), "one", LoraConfig(r=2, target_modules=_SHORT), 1)
    expected = pack(model, "one")
    model.save_pretrained(tmp_path)
    file = tmp_path / "one" / "adapter_model.safetensors"
    tensors = load_file(file)
    for new, old in renames.items():
        assert any(f"base_model.model.{new}" in name for name in tensors)
        tensors = {name.replace(f"model.{new}", f"model.{old}"): t for name, t in tensors.items()}
    save_file(tensors, file)
    layout, slab = pack_folder(tmp_path / "one", spec_of(model))
    assert (layout.sites, slab) == (expected[0].sites, expected[1])


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (
            {"target_modules": ["qkv"], "alora_invocation_tokens": [5, 6]},
            "alora_invocation_tokens with modules of the part for images targeted",
        ),
        ({"target_modules": ["q_proj"], "modules_to_save": ["merger"]}, "modules_to_save.*merger"),
        ({"target_modules": ["qkv"], "bias": "all"}, "visual.blocks.0.norm"),
    ],
)
def test_refused_by_name(config: dict[str, Any], words: str) -> None:
    config = {"task_type": "CAUSAL_LM", **config}
    model = add_adapter(make_pictured("qwen2_vl"), "one", LoraConfig(r=2, **config), 1)
    with pytest.raises(AdapterError, match=words):
        pack(model, "one")


def test_a_base_that_reads_no_pictures_refuses_lora_of_the_tower(tmp_path: Path) -> None:
    lora = LoraConfig(r=2, target_modules=["qkv", "q_proj"])
    model = add_adapter(make_pictured(), "one", lora, 1)
    model.save_pretrained(tmp_path)
    with pytest.raises(AdapterError, match="belongs to the part for images, which is not served"):
        pack_folder(tmp_path / "one", spec_of(model).text_part)
