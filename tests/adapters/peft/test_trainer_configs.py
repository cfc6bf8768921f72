"""Configs as trainers write them: plain LoRA answers as with PEFT, all else is refused by name."""

from pathlib import Path
from typing import Any

import msgspec
import pytest

from loraplex.adapters.base import BaseSpec
from loraplex.adapters.judge import judge_folder
from tests.adapter_folders import write_adapter, write_config
from tests.adapters.refusals import violation_codes
from tests.adapters.tiny_llama import BASE, assert_equal, logits_of_peft, save_as_configured
from tests.adapters.trainer_configs import BASES, OTHER, PLAIN, Config

pytestmark = pytest.mark.filterwarnings("ignore")


def base_of(config: Config) -> BaseSpec:
    """The base that the config was written for, under its own name."""
    name = (config["base_model_name_or_path"] or "").lower()
    names = next((names for words, names in BASES.items() if words.lower() in name), ("base",))
    return msgspec.structs.replace(BASE, names=names)


@pytest.mark.parametrize("trainer", PLAIN)
def test_plain_lora_answers_as_with_peft(trainer: str, tmp_path: Path) -> None:
    config = PLAIN[trainer]
    folder = save_as_configured(tmp_path / "a", config)
    assert_equal(logits_of_peft(folder), folder, base_of(config))


@pytest.mark.parametrize("trainer", OTHER)
def test_what_changes_the_maths_is_refused(trainer: str, tmp_path: Path) -> None:
    config, code = OTHER[trainer]
    base = base_of(config)
    folder = write_adapter(tmp_path / "a", base)
    write_config(folder, config)
    codes = violation_codes(lambda: judge_folder(folder, base))
    # The file has nothing of what a configuration names beside LoRA.
    assert codes - {"missing_tensor"} == {code}


def test_another_base_is_refused(tmp_path: Path) -> None:
    other: Any = msgspec.structs.replace(BASE, names=("Qwen/Qwen2.5-7B",))
    folder = write_adapter(tmp_path / "a", other)
    for config in PLAIN.values():
        if config["base_model_name_or_path"]:
            write_config(folder, config)
            codes = violation_codes(lambda: judge_folder(folder, other))
            assert "wrong_base" in codes
