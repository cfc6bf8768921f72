"""Tables that a training has resized within the base's own: taken, or refused with every reason."""

import json
from copy import deepcopy
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file

from adapters.judge import is_intact, judge_folder
from adapters.manifest import AdapterManifest
from adapters.peft.validate import AdapterLimits
from tests.adapters.refusals import refusal, violation_codes
from tests.adapters.tiny_llama import BASE, WEIGHTS, causal

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")
KNOWN = msgspec.structs.replace(BASE, tokens={f"t{i}": i for i in range(60)})
TIED = msgspec.structs.replace(KNOWN, is_tied=True)
HEAD, EMBEDDING = "base_model.model.lm_head.weight", "base_model.model.model.embed_tokens.weight"
Tensors = dict[str, torch.Tensor]


def saved(folder: Path, rows: int, **options: Any) -> Path:
    model = causal()
    model.config = deepcopy(model.config)  # which others share
    model.resize_token_embeddings(rows, mean_resizing=False)
    config = LoraConfig(**{"target_modules": ["q_proj"], "init_lora_weights": True} | options)
    get_peft_model(model, config).save_pretrained(folder, save_embedding_layers=True)
    written = json.loads((folder / "adapter_config.json").read_text())
    written["base_model_name_or_path"] = "base"
    (folder / "adapter_config.json").write_text(json.dumps(written))
    return folder


def changed(folder: Path, change: Any) -> Path:
    save_file(change(load_file(folder / WEIGHTS)), folder / WEIGHTS)
    return folder


def manifest(folder: Path) -> AdapterManifest:
    return judge_folder(folder, KNOWN).manifest


@pytest.mark.parametrize("options", [{}, {"modules_to_save": ["lm_head", "embed_tokens"]}])
@pytest.mark.parametrize("rows", [60, 62])
def test_taken(rows: int, options: dict[str, Any], tmp_path: Path) -> None:
    folder = saved(tmp_path, rows, **options)
    found = manifest(folder)
    assert (found.table_size, found.added_tokens) == (rows, ())
    assert {"lm_head", "embed_tokens"} <= set(found.targets)


def test_added_tokens_are_part_of_the_identity(tmp_path: Path) -> None:
    folder = saved(tmp_path, 62)
    digests = {manifest(folder).digest}
    for added in ({"<a>": 60}, {"<b>": 60}, {"<a>": 60, "<b>": 61}):
        (folder / "added_tokens.json").write_text(json.dumps(added))
        found = manifest(folder)
        assert [token.id for token in found.added_tokens] == sorted(added.values())
        digests.add(found.digest)
        kept = msgspec.json.decode(msgspec.json.encode(found), type=AdapterManifest)
        tensors = judge_folder(folder, KNOWN).tensors
        without = msgspec.structs.replace(kept, added_tokens=())
        assert is_intact(folder, tensors, kept)
        assert not is_intact(folder, tensors, without)
    assert len(digests) == 4


def test_of_tied_tables_one_is_enough(tmp_path: Path) -> None:
    folder = changed(saved(tmp_path, 62), lambda all: {k: v for k, v in all.items() if k != HEAD})
    assert violation_codes(lambda: judge_folder(folder, KNOWN)) == {"missing_tensor"}
    tables = judge_folder(folder, TIED).tensors.tables
    assert {(table.module, table.tensor.name) for table in tables} == {
        ("embed_tokens", EMBEDDING),
        ("lm_head", EMBEDDING),
    }


def test_a_token_without_a_row(tmp_path: Path) -> None:
    folder = saved(tmp_path, 61)
    (folder / "added_tokens.json").write_text(json.dumps({"<a>": 60, "<b>": 61}))
    assert violation_codes(lambda: judge_folder(folder, KNOWN)) == {"resized_embeddings"}


@pytest.mark.parametrize(("rows", "is_known"), [(59, True), (65, True), (62, False)])
def test_tables_that_no_base_has_room_for(rows: int, is_known: bool, tmp_path: Path) -> None:
    folder = saved(tmp_path, rows)
    base = KNOWN if is_known else BASE
    assert violation_codes(lambda: judge_folder(folder, base)) == {"resized_embeddings"}


def shorter_head(tensors: Tensors) -> Tensors:
    return tensors | {HEAD: tensors[HEAD][:61].clone()}


def not_a_number(tensors: Tensors) -> Tensors:
    tensors[EMBEDDING][61, 3] = float("nan")
    return tensors


def of_numbers(tensors: Tensors) -> Tensors:
    return tensors | {HEAD: tensors[HEAD].to(torch.int32)}


@pytest.mark.parametrize(
    ("change", "codes"),
    [
        (shorter_head, {"resized_embeddings"}),
        (not_a_number, {"not_finite"}),
        (of_numbers, {"unsupported_dtype"}),
    ],
)
def test_hostile_tables(change: Any, codes: set[str], tmp_path: Path) -> None:
    folder = changed(saved(tmp_path, 62), change)
    assert violation_codes(lambda: judge_folder(folder, KNOWN)) == codes


@pytest.mark.parametrize(
    "options",
    [
        {"alora_invocation_tokens": [3]},
        {"trainable_token_indices": [60, 61]},
        {"target_modules": ["q_proj", "embed_tokens"]},
        {"target_modules": ["q_proj", "lm_head"]},
    ],
)
def test_what_resized_tables_are_not_served_with(options: dict[str, Any], tmp_path: Path) -> None:
    folder = saved(tmp_path, 62, **options)
    codes = violation_codes(lambda: judge_folder(folder, KNOWN))
    assert codes <= {"unsupported_feature", "shape_mismatch", "unknown_tensor", "missing_tensor"}


def test_they_count(tmp_path: Path) -> None:
    folder = saved(tmp_path, 62)
    small = AdapterLimits(max_table_bytes=62 * BASE.hidden_size * 4 - 1)
    error = refusal(lambda: judge_folder(folder, KNOWN, small))
    assert error is not None
    assert {each.code for each in error.violations} == {"table_too_large"}


def test_tokens_behind_the_tables_need_one_device(tmp_path: Path) -> None:
    shared = msgspec.structs.replace(KNOWN, shards=2)
    assert judge_folder(saved(tmp_path / "within", 62), shared).manifest.table_size == 62
    codes = violation_codes(lambda: judge_folder(saved(tmp_path / "behind", 66), shared))
    assert codes & {"unsupported_feature", "resized_embeddings"}
