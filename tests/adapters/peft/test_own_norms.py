"""Norms in place of the base's, as PEFT saves them, and what is wrong with them."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from loraplex.adapters.base import BaseNorm, BaseSpec
from loraplex.adapters.errors import Violation
from loraplex.adapters.judge import judge_folder
from loraplex.adapters.peft.validate import AdapterLimits
from tests.adapter_folders import (
    adapter_config,
    lora_tensors,
    safetensors_bytes,
    small_base,
    write_config,
)
from tests.adapters.refusals import refusal

LIMITS = AdapterLimits()
_PLAIN = small_base(num_layers=2)
HIDDEN = _PLAIN.hidden_size
BASE = msgspec.structs.replace(
    _PLAIN,
    norms=(
        *(
            BaseNorm(f"model.layers.{layer}.{name}", size, place)
            for layer in range(2)
            for name, size, place in (
                ("input_layernorm", HIDDEN, 2 * layer),
                ("pre_feedforward_layernorm", HIDDEN, 2 * layer + 1),
                ("post_attention_layernorm", HIDDEN, -1),
                ("self_attn.q_norm", 8, -1),
            )
        ),
        BaseNorm("model.norm", HIDDEN, 4),
    ),
)
PREFIX = "base_model.model.model"
FIRST, SECOND = (f"{PREFIX}.layers.{layer}.input_layernorm.weight" for layer in (0, 1))
BOTH = {FIRST: (HIDDEN,), SECOND: (HIDDEN,)}
END = {f"{PREFIX}.norm.weight": (HIDDEN,)}
Shapes = Mapping[str, tuple[int, ...]]


def written(
    folder: Path,
    norms: Shapes,
    names: list[str],
    value: float = 0.5,
    body: str = PREFIX,
    **config: Any,
) -> Path:
    """body: what the adapter calls the base's."""
    folder.mkdir()
    found = lora_tensors(BASE, targets=("q_proj",))
    tensors = {name.replace(PREFIX, body, 1): numbers for name, numbers in found.items()}
    for name, shape in norms.items():
        tensors[name] = np.full(shape, value, np.float32)
    config |= {"modules_to_save": names}
    write_config(folder, adapter_config(BASE, 8, ["q_proj"]) | config)
    (folder / "adapter_model.safetensors").write_bytes(safetensors_bytes(tensors))
    return folder


@pytest.mark.parametrize(
    ("norms", "names", "places"),
    [
        (BOTH, ["input_layernorm"], [0, 2]),
        ({SECOND: (HIDDEN,)}, ["layers.1.input_layernorm"], [2]),
        (END, ["model.norm"], [4]),
        (BOTH | END, ["model.norm", "input_layernorm"], [0, 2, 4]),
    ],
)
def test_what_is_accepted(
    tmp_path: Path, norms: Shapes, names: list[str], places: list[int]
) -> None:
    folder = written(tmp_path / "a", norms, names)
    judged = judge_folder(folder, BASE, LIMITS)
    assert [norm.place for norm in judged.tensors.norms] == places
    assert {norm.tensor.name for norm in judged.tensors.norms} == norms.keys()
    assert set(judged.manifest.targets) == {name.rpartition(".")[2] for name in names} | {"q_proj"}
    assert judged.manifest.nbytes == sum(tensor.nbytes for tensor in judged.tensors.tensors)
    assert len(judge_folder(folder, None, LIMITS).tensors.norms) == len(places)


def test_names_of_no_module_are_passed_over(tmp_path: Path) -> None:
    names = ["input_layernorm", "other_norm", "classifier", "wte_of_others", "visual"]
    judged = judge_folder(written(tmp_path / "a", BOTH, names), BASE, LIMITS)
    assert [norm.place for norm in judged.tensors.norms] == [0, 2]


# A model that calls its LayerNorms otherwise.
INNER, LAST = "self_attn_layer_norm", "final_layer_norm"
NORMED = msgspec.structs.replace(
    _PLAIN,
    norms=(
        BaseNorm(f"model.layers.0.{INNER}", HIDDEN, 0, 9),
        BaseNorm("model.norm", HIDDEN, 4, 13),
    ),
)
OPT = f"{PREFIX}.decoder"
LN_1, LN_F = (
    {f"{OPT}.{name}.{part}": (HIDDEN,) for part in ("weight", "bias")}
    for name in (f"layers.0.{INNER}", LAST)
)
ALL = {name: shape for name, shape in (LN_1 | LN_F).items() if name.endswith("bias")}
# What PEFT saves beside modules of `modules_to_save` where `bias` is all.
COPIES = {f"{OPT}.{LAST}.{copy}.bias": (HIDDEN,) for copy in ("original_module", "modules_to_save")}


@pytest.mark.parametrize(
    ("norms", "names", "bias", "places"),
    [
        (ALL, [], "all", [9, 13]),
        ({}, [], "all", []),
        (LN_1, [INNER], "none", [0, 9]),
        (LN_F, [LAST], "none", [4, 13]),
        (LN_1 | LN_F, [f"layers.0.{INNER}", f"decoder.{LAST}"], "lora_only", [0, 9, 4, 13]),
        (ALL | LN_F | COPIES, [LAST], "all", [9, 4, 13]),
    ],
)
def test_biases_of_layer_norms(
    tmp_path: Path, norms: Shapes, names: list[str], bias: str, places: list[int]
) -> None:
    folder = written(tmp_path / "a", norms, names, body=OPT, bias=bias)
    judged = judge_folder(folder, NORMED, LIMITS)
    assert [norm.place for norm in judged.tensors.norms] == places


@pytest.mark.parametrize(
    ("norms", "names", "bias", "code"),
    [
        (ALL, [], "lora_only", "unknown_tensor"),
        (ALL, [INNER], "all", "missing_tensor"),
        (LN_1, [], "all", "unknown_tensor"),
        (LN_F, ["model.norm"], "none", "unknown_tensor"),
        ({f"{OPT}.layers.0.other_norm.bias": (HIDDEN,)}, [], "all", "unknown_tensor"),
    ],
)
def test_biases_that_do_not_fit(
    tmp_path: Path, norms: Shapes, names: list[str], bias: str, code: str
) -> None:
    """PEFT would leave out what the config does not name as the trained model does."""
    folder = written(tmp_path / "a", norms, names, body=OPT, bias=bias)
    assert {reason.code for reason in reasons(folder, NORMED)} == {code}


def reasons(folder: Path, base: BaseSpec = BASE) -> tuple[Violation, ...]:
    error = refusal(lambda: judge_folder(folder, base, LIMITS))
    assert error is not None
    assert error.code == "invalid"
    return tuple(error.violations)


@pytest.mark.parametrize(
    ("norms", "names", "config", "found"),
    [
        ({FIRST: (HIDDEN,)}, ["input_layernorm"], {}, {("missing_tensor", SECOND[17:-7])}),
        (
            {FIRST: (HIDDEN + 1,), SECOND: (1, HIDDEN)},
            ["input_layernorm"],
            {},
            {("shape_mismatch", FIRST), ("shape_mismatch", SECOND)},
        ),
        (BOTH, [], {}, {("unknown_tensor", FIRST), ("unknown_tensor", SECOND)}),
        (BOTH | END, ["model.norm"], {}, {("unknown_tensor", FIRST), ("unknown_tensor", SECOND)}),
        (
            BOTH | {FIRST.removeprefix("base_model.model."): (HIDDEN,)},
            ["input_layernorm"],
            {},
            {("duplicate_tensor", FIRST.removeprefix("base_model.model."))},
        ),
        (
            BOTH | {FIRST.replace("weight", "bias"): (HIDDEN,)},
            ["input_layernorm"],
            {},
            {("unknown_tensor", FIRST.replace("weight", "bias"))},
        ),
    ],
)
def test_tensors_that_do_not_fit(
    tmp_path: Path,
    norms: Shapes,
    names: list[str],
    config: dict[str, Any],
    found: set[tuple[str, str]],
) -> None:
    """All of them are listed."""
    folder = written(tmp_path / "a", norms, names, **config)
    assert {(reason.code, reason.where) for reason in reasons(folder)} == found


@pytest.mark.parametrize(
    ("names", "config", "words"),
    [
        (["post_attention_layernorm"], {}, "post_attention_layernorm is not served"),
        (["norm"], {}, "q_norm is not served"),
        (["input_layernorm", "up_proj"], {}, "'up_proj' is not served"),
        (["input_layernorm", "self_attn"], {}, "'self_attn' is not served"),
        (["input_layernorm"], {"alora_invocation_tokens": [3]}, "not with alora"),
    ],
)
def test_configs_that_are_not_served(
    tmp_path: Path, names: list[str], config: dict[str, Any], words: str
) -> None:
    folder = written(tmp_path / "a", BOTH, names, **config)
    messages = [r.message for r in reasons(folder) if r.where == "modules_to_save"]
    assert any(words in message for message in messages), messages


def test_a_norm_that_is_nowhere(tmp_path: Path) -> None:
    """Without the base only the file can have it."""
    folder = written(tmp_path / "a", {}, ["input_layernorm"])
    error = refusal(lambda: judge_folder(folder, None, LIMITS))
    assert error is not None
    assert {reason.code for reason in error.violations} == {"missing_tensor"}


def test_values_that_are_not_finite(tmp_path: Path) -> None:
    folder = written(tmp_path / "a", BOTH, ["input_layernorm"], value=float("nan"))
    assert {reason.code for reason in reasons(folder)} == {"not_finite"}


def test_a_base_that_devices_share(tmp_path: Path) -> None:
    folder = written(tmp_path / "a", BOTH, ["input_layernorm"])
    shared = msgspec.structs.replace(BASE, shards=2)
    assert refusal(lambda: judge_folder(folder, shared, LIMITS)) is None
