"""The tokens that an adapter's files name as the end of an answer, and what they make of it."""

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from loraplex.adapters.errors import AdapterError, Findings
from loraplex.adapters.judge import judge_folder, seal_stored
from loraplex.adapters.peft.files import own_ends
from loraplex.adapters.safetensors.file import open_weights
from loraplex.adapters.safetensors.header import WEIGHTS_FILE
from tests.adapter_folders import small_base, write_adapter
from tests.adapters.refusals import refusal

TOKENS = {"</s>": 2, "<|user|>": 7, "<|end|>": 8, "word": 20}
BASE = msgspec.structs.replace(small_base(), tokens=TOKENS, eos_token_ids=(2, 3))
MOST = BASE.most_ids - 1


def find(generation: Any, settings: dict[str, Any], base: Any = BASE) -> tuple[Any, list[str]]:
    """The ends and the codes of what was found."""
    findings = Findings()
    data = generation if isinstance(generation, bytes) else json.dumps(generation).encode()
    ends = own_ends(None if generation is None else data, settings, base, findings)
    error = refusal(findings.raise_if_any)
    return ends, [violation.code for violation in error.violations] if error else []


@pytest.mark.parametrize(
    ("generation", "settings", "ends"),
    [
        (None, {}, ()),
        (None, {"eos_token": "</s>"}, ()),
        (None, {"eos_token": "<|user|>"}, (7,)),
        (None, {"eos_token": {"__type": "AddedToken", "content": "<|end|>"}}, (8,)),
        (None, {"eos_token": None}, ()),
        (None, {"eos_token": ""}, ()),
        (None, {"eos_token": "<|nowhere|>"}, ()),
        (None, {"eos_token": 3}, ()),
        (None, {"eos_token": "word", "bos_token": 3}, (20,)),
        ({}, {}, ()),
        ({"eos_token_id": None, "temperature": "hot"}, {}, ()),
        ({"eos_token_id": 2}, {}, ()),
        ({"eos_token_id": 9}, {}, (9,)),
        ({"eos_token_id": [9, 2, 3, 8, 9]}, {"eos_token": "<|user|>"}, (7, 8, 9)),
        ({"eos_token_id": [MOST, 0]}, {}, (0, MOST)),
        ({"eos_token_id": []}, {}, ()),
    ],
)
def test_ends(generation: Any, settings: dict[str, Any], ends: tuple[int, ...]) -> None:
    assert find(generation, settings) == (ends, [])


@pytest.mark.parametrize(
    "generation",
    [
        *({"eos_token_id": value} for value in ("2", 2.0, True, -1, [2, "3"], [[2]], {"a": 1})),
        {"eos_token_id": MOST + 1},
        {"eos_token_id": 10**30},
        {"eos_token_id": list(range(4, 4 + 65)) if MOST > 70 else [True]},
        b"",
        b"[]",
        b'{"eos_token_id": 2, "eos_token_id": 7}',
        b"\xff",
    ],
)
def test_nonsense_is_refused(generation: Any) -> None:
    assert find(generation, {})[1] == ["bad_generation_config"]


def test_of_an_inferred_base_nothing_is_known() -> None:
    unknown = msgspec.structs.replace(BASE, digest="", tokens=None, eos_token_ids=(), vocab_size=0)
    assert find({"eos_token_id": 9}, {"eos_token": "</s>"}, unknown) == ((), [])
    assert find({"eos_token_id": -9}, {}, unknown)[1] == ["bad_generation_config"]


FILES: dict[str, dict[str, Any]] = {
    "none": {},
    "the base's": {"tokenizer_config.json": {"eos_token": "</s>"}, "generation_config.json": {}},
    "another": {"tokenizer_config.json": {"eos_token": "<|user|>"}},
    "the same by its id": {"generation_config.json": {"eos_token_id": [7, 2]}},
    "two": {"generation_config.json": {"eos_token_id": [7, 8]}},
}


def test_ends_are_part_of_what_an_adapter_is(tmp_path: Path) -> None:
    """Equal weights with other ends are another adapter; without own ends nothing is new."""
    digests, ends = {}, {}
    for number, (name, files) in enumerate(FILES.items()):
        folder = write_adapter(tmp_path / str(number), BASE)
        for file, content in files.items():
            (folder / file).write_text(json.dumps(content))
        judged = judge_folder(folder, BASE)
        digests[name], ends[name] = judged.manifest.digest, judged.manifest.end_token_ids
        with open_weights(folder / WEIGHTS_FILE) as weights:
            assert seal_stored(weights, judged.tensors, judged.manifest) == judged.seal
    assert ends == {"none": (), "the base's": (), "another": (7,), "the same by its id": (7,)} | {
        "two": (7, 8)
    }
    assert digests["none"] == digests["the base's"]
    assert digests["another"] == digests["the same by its id"]
    assert len(set(digests.values())) == 3


def test_a_file_that_is_too_large_is_refused(tmp_path: Path) -> None:
    folder = write_adapter(tmp_path / "adapter", BASE)
    (folder / "generation_config.json").write_text(" " * (1 << 20) + "{}")
    with pytest.raises(AdapterError) as caught:
        judge_folder(folder, BASE)
    assert [v.code for v in caught.value.violations] == ["file_too_large"]
