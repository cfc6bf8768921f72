"""Tables that a training has resized: taken, or refused with every reason."""

import json
from copy import deepcopy
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file

from loraplex.adapters.base import BaseSpec
from loraplex.adapters.judge import judge_folder, seal_stored
from loraplex.adapters.manifest import AdapterManifest
from loraplex.adapters.peft.validate import AdapterLimits
from loraplex.adapters.safetensors.file import open_weights
from loraplex.adapters.safetensors.header import WEIGHTS_FILE
from tests.adapters.refusals import refusal, violation_codes
from tests.adapters.tiny_llama import BASE, WEIGHTS, causal

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")
KNOWN = msgspec.structs.replace(BASE, tokens={f"t{i}": i for i in range(60)})
TIED = msgspec.structs.replace(KNOWN, is_tied=True)
HEAD, EMBEDDING = "base_model.model.lm_head.weight", "base_model.model.model.embed_tokens.weight"
Tensors = dict[str, torch.Tensor]
# Devices that share the base.
SHARDS = pytest.mark.parametrize("shards", [1, 2])


def saved(folder: Path, rows: int, *, saves_tables: bool = True, **options: Any) -> Path:
    model = causal()
    model.config = deepcopy(model.config)  # which others share
    model.resize_token_embeddings(rows, mean_resizing=False)
    config = LoraConfig(**{"target_modules": ["q_proj"], "init_lora_weights": True} | options)
    get_peft_model(model, config).save_pretrained(folder, save_embedding_layers=saves_tables)
    written = json.loads((folder / "adapter_config.json").read_text())
    written["base_model_name_or_path"] = "base"
    (folder / "adapter_config.json").write_text(json.dumps(written))
    return folder


def changed(folder: Path, change: Any) -> Path:
    save_file(change(load_file(folder / WEIGHTS)), folder / WEIGHTS)
    return folder


def manifest(folder: Path, shards: int = 1) -> AdapterManifest:
    return judge_folder(folder, shared(KNOWN, shards)).manifest


def shared(base: BaseSpec, shards: int) -> BaseSpec:
    return msgspec.structs.replace(base, shards=shards)


@SHARDS
@pytest.mark.parametrize(
    ("rows", "options", "saves_tables"),
    [
        (62, {"trainable_token_indices": [60, 61, 4]}, True),
        (66, {"trainable_token_indices": [64, 65]}, True),
        (66, {"trainable_token_indices": {"embed_tokens": [64, 65], "lm_head": [65, 64]}}, False),
        (66, {"trainable_token_indices": {"embed_tokens": [64, 65], "lm_head": [65, 64]}}, True),
    ],
)
def test_trained_rows_of_resized_tables(
    rows: int, options: dict[str, Any], saves_tables: bool, shards: int, tmp_path: Path
) -> None:
    folder = saved(tmp_path, rows, saves_tables=saves_tables, **options)
    assert manifest(folder, shards).table_size == rows


@SHARDS
@pytest.mark.parametrize(
    ("base", "indices"),
    [
        (KNOWN, [64, 65]),
        (KNOWN, {"embed_tokens": [64, 65], "lm_head": [64]}),
        (KNOWN, {"embed_tokens": [64, 65], "lm_head": [63, 65]}),
        (KNOWN, {"lm_head": [64, 65]}),
        (TIED, [65]),
    ],
)
def test_new_ids_without_a_row_in_both_tables(
    base: BaseSpec, indices: Any, shards: int, tmp_path: Path
) -> None:
    """PEFT would load random rows there."""
    folder = saved(tmp_path, 66, saves_tables=False, trainable_token_indices=indices)
    codes = violation_codes(lambda: judge_folder(folder, shared(base, shards)))
    assert codes == {"resized_embeddings"}


@SHARDS
def test_new_ids_need_a_head_without_a_bias(shards: int, tmp_path: Path) -> None:
    folder = saved(tmp_path, 66, saves_tables=False, trainable_token_indices=[64, 65])
    modules = {
        name: msgspec.structs.replace(module, has_bias=name == "lm_head")
        for name, module in TIED.model_modules.items()
    }
    biased = msgspec.structs.replace(TIED, model_modules=modules, shards=shards)
    assert violation_codes(lambda: judge_folder(folder, biased)) == {"unsupported_feature"}


def test_a_head_that_follows_trained_rows_is_not_targeted(tmp_path: Path) -> None:
    options = {"target_modules": ["q_proj", "lm_head"], "trainable_token_indices": [3, 4]}
    folder = saved(tmp_path, BASE.vocab_size, saves_tables=False, **options)
    assert manifest(folder).targets
    assert violation_codes(lambda: judge_folder(folder, TIED)) == {"unsupported_feature"}


@pytest.mark.parametrize("end", [65, 66, 4000])
def test_an_end_must_be_an_id_of_the_adapter(end: int, tmp_path: Path) -> None:
    folder = saved(tmp_path, 66)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [5, end]}))
    if end == 65:
        assert manifest(folder).end_token_ids == (5, end)
    else:
        codes = violation_codes(lambda: judge_folder(folder, KNOWN))
        assert codes == {"bad_generation_config"}


@SHARDS
@pytest.mark.parametrize("options", [{}, {"modules_to_save": ["lm_head", "embed_tokens"]}])
@pytest.mark.parametrize("rows", [60, 62, 65, 128, KNOWN.most_ids])
def test_taken(rows: int, options: dict[str, Any], shards: int, tmp_path: Path) -> None:
    folder = saved(tmp_path, rows, **options)
    found = manifest(folder, shards)
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
        with open_weights(folder / WEIGHTS_FILE) as weights:
            assert seal_stored(weights, tensors, kept) is not None
            assert seal_stored(weights, tensors, without) is None
    assert len(digests) == 4


def test_of_tied_tables_one_is_enough(tmp_path: Path) -> None:
    folder = changed(saved(tmp_path, 62), lambda all: {k: v for k, v in all.items() if k != HEAD})
    assert violation_codes(lambda: judge_folder(folder, KNOWN)) == {"missing_tensor"}
    tables = judge_folder(folder, TIED).tensors.tables
    assert {(table.module, table.tensor.name) for table in tables} == {
        ("embed_tokens", EMBEDDING),
        ("lm_head", EMBEDDING),
    }


@pytest.mark.parametrize("rows", [61, 65])
def test_a_token_without_a_row(rows: int, tmp_path: Path) -> None:
    folder = saved(tmp_path, rows)
    added = {f"<{token_id}>": token_id for token_id in range(60, rows + 1)}
    (folder / "added_tokens.json").write_text(json.dumps(added))
    assert violation_codes(lambda: judge_folder(folder, KNOWN)) == {"resized_embeddings"}


@SHARDS
@pytest.mark.parametrize(
    ("rows", "is_known"), [(59, True), (KNOWN.most_ids + 1, True), (62, False)]
)
def test_tables_of_a_size_that_is_not_served(
    rows: int, is_known: bool, shards: int, tmp_path: Path
) -> None:
    folder = saved(tmp_path, rows)
    base = shared(KNOWN if is_known else BASE, shards)
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
        {"target_modules": ["q_proj", "embed_tokens"]},
        {"target_modules": ["q_proj", "lm_head"]},
    ],
)
def test_what_resized_tables_are_not_served_with(options: dict[str, Any], tmp_path: Path) -> None:
    folder = saved(tmp_path, 62, **options)
    codes = violation_codes(lambda: judge_folder(folder, KNOWN))
    assert codes <= {"unsupported_feature", "shape_mismatch", "unknown_tensor", "missing_tensor"}


@pytest.mark.parametrize("rows", [62, 66])
def test_they_count(rows: int, tmp_path: Path) -> None:
    folder = saved(tmp_path, rows)
    small = AdapterLimits(max_table_bytes=rows * BASE.hidden_size * 4 - 1)
    error = refusal(lambda: judge_folder(folder, KNOWN, small))
    assert error is not None
    assert {each.code for each in error.violations} == {"table_too_large"}
