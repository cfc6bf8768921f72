"""adapter_config.json: the three lists against PEFT itself, and every lie by name."""

import dataclasses
import json
from typing import Any

import pytest
from hypothesis import strategies as st
from peft import LoraConfig

from loraplex.adapters.errors import Findings
from loraplex.adapters.peft.config import (
    HARMLESS,
    MAX_CONFIG_BYTES,
    REFUSED,
    USED,
    PeftConfig,
    parse_config,
)
from tests.adapter_folders import adapter_config, small_base
from tests.adapters.refusals import refusal, violation_codes
from tests.grids import examples


def read(data: bytes) -> PeftConfig:
    findings = Findings()
    config = parse_config(data, findings)
    findings.raise_if_any()
    assert config is not None
    return config


def read_with(**changes: Any) -> PeftConfig:
    return read(json.dumps(adapter_config(small_base(), 8, ["q_proj"]) | changes).encode())


def test_every_field_of_the_installed_peft_is_in_exactly_one_list() -> None:
    fields = {field.name for field in dataclasses.fields(LoraConfig)}
    lists = [*USED, *HARMLESS, *REFUSED]
    assert fields - set(lists) == set(), "new in PEFT: decide what they mean for serving"
    assert len(lists) == len(set(lists))


def test_the_defaults_of_the_installed_peft_are_accepted() -> None:
    config = LoraConfig(target_modules=["q_proj"]).to_dict() | {"peft_type": "LORA"}
    plain = {k: sorted(v) if isinstance(v, set) else v for k, v in config.items()}
    parsed = read(json.dumps(plain).encode())
    assert (parsed.lora_rank, parsed.lora_alpha) == (LoraConfig().r, LoraConfig().lora_alpha)
    bare = read(b'{"peft_type": "LORA", "target_modules": ["q_proj"]}')
    assert (bare.lora_rank, bare.lora_alpha) == (LoraConfig().r, LoraConfig().lora_alpha)


@pytest.mark.parametrize(
    "changes",
    [
        {"lora_dropout": 0.1},
        {"init_lora_weights": "gaussian"},
        {"init_lora_weights": "eva", "eva_config": {"rho": 2.0}},
        {"init_lora_weights": "orthogonal"},
        {"init_lora_weights": "mica"},
        {"init_lora_weights": False},
        {"loftq_config": {"loftq_bits": 4}},
        {"qalora_group_size": 16},
        {"megatron_core": "megatron.core"},
        {"auto_mapping": {"base_model_class": "X"}},
        {"use_dora": False, "lora_bias": None, "modules_to_save": []},
        {"rank_pattern": None, "alpha_pattern": None},
        {"lora_alpha": 0.5},
        {"lora_alpha": -16},
        {"bias": "all"},
        {"bias": None},
        {"some_new_option": None, "another": False, "third": {}, "fourth": 0},
        {"target_modules": "all-linear"},
        {"target_modules": r".*\.(q|v)_proj"},
        {"layers_to_transform": [0], "layers_pattern": "layers"},
        {"layers_to_transform": 1},
        {"base_model_name_or_path": None},
    ],
)
def test_harmless_settings_are_accepted(changes: dict[str, Any]) -> None:
    read_with(**changes)


@pytest.mark.parametrize(
    ("changes", "code", "where"),
    [
        ({"peft_type": "LOHA"}, "unsupported_peft_type", "peft_type"),
        ({"peft_type": None}, "unsupported_peft_type", "peft_type"),
        ({"peft_type": "lora"}, "unsupported_peft_type", "peft_type"),
        ({"use_dora": "yes"}, "bad_value", "use_dora"),
        ({"use_dora": 1}, "bad_value", "use_dora"),
        ({"bias": "some"}, "bad_value", "bias"),
        ({"bias": True}, "bad_value", "bias"),
        ({"lora_bias": "yes"}, "bad_value", "lora_bias"),
        ({"trainable_token_indices": [-1]}, "bad_value", "trainable_token_indices"),
        ({"alora_invocation_tokens": []}, "bad_value", "alora_invocation_tokens"),
        ({"alora_invocation_tokens": [-1]}, "bad_value", "alora_invocation_tokens"),
        ({"alora_invocation_tokens": [True]}, "bad_value", "alora_invocation_tokens"),
        ({"alora_invocation_tokens": "<|x|>"}, "bad_value", "alora_invocation_tokens"),
        ({"alora_invocation_tokens": [1] * 1025}, "bad_value", "alora_invocation_tokens"),
        ({"target_parameters": [1]}, "bad_value", "target_parameters"),
        ({"layer_replication": [[0, 2]]}, "unsupported_feature", "layer_replication"),
        ({"use_qalora": True}, "unsupported_feature", "use_qalora"),
        ({"use_bdlora": {}}, "unsupported_feature", "use_bdlora"),
        ({"megatron_config": {"a": 1}}, "unsupported_feature", "megatron_config"),
        ({"arrow_config": {}}, "unsupported_feature", "arrow_config"),
        ({"velora_config": {}}, "unsupported_feature", "velora_config"),
        ({"kasa_config": {}}, "unsupported_feature", "kasa_config"),
        ({"monteclora_config": {}}, "unsupported_feature", "monteclora_config"),
        ({"lora_ga_config": {}}, "unsupported_feature", "lora_ga_config"),
        ({"init_lora_weights": "pissa"}, "unsupported_feature", "init_lora_weights"),
        ({"init_lora_weights": "pissa_niter_16"}, "unsupported_feature", "init_lora_weights"),
        ({"init_lora_weights": "olora"}, "unsupported_feature", "init_lora_weights"),
        ({"init_lora_weights": "corda"}, "unsupported_feature", "init_lora_weights"),
        ({"init_lora_weights": "loftq"}, "unsupported_feature", "init_lora_weights"),
        ({"init_lora_weights": "lora_ga"}, "unsupported_feature", "init_lora_weights"),
        ({"init_lora_weights": "tomorrow"}, "unsupported_feature", "init_lora_weights"),
        ({"use_new_maths": True}, "unknown_key", "use_new_maths"),
        ({"x\n": 1}, "unknown_key", "'x\\n'"),
        ({"r": 0}, "bad_value", "r"),
        ({"r": -1}, "bad_value", "r"),
        ({"r": None}, "bad_value", "r"),
        ({"r": True}, "bad_value", "r"),
        ({"r": 8.0}, "bad_value", "r"),
        ({"r": "8"}, "bad_value", "r"),
        ({"r": 10**30}, "bad_value", "r"),
        ({"lora_alpha": 0}, "bad_value", "lora_alpha"),
        ({"lora_alpha": 1e38}, "bad_value", "lora_alpha"),
        ({"lora_alpha": 10**400}, "bad_value", "lora_alpha"),
        ({"lora_alpha": "16"}, "bad_value", "lora_alpha"),
        ({"lora_alpha": None}, "bad_value", "lora_alpha"),
        ({"target_modules": None}, "bad_value", "target_modules"),
        ({"target_modules": []}, "bad_value", "target_modules"),
        ({"target_modules": ""}, "bad_value", "target_modules"),
        ({"target_modules": [1]}, "bad_value", "target_modules"),
        ({"target_modules": {"q_proj": 1}}, "bad_value", "target_modules"),
        ({"target_modules": ["q\u0440roj"]}, "bad_value", "target_modules"),
        ({"target_modules": "a" * 5000}, "bad_value", "target_modules"),
        ({"exclude_modules": 3}, "bad_value", "exclude_modules"),
        ({"use_rslora": "yes"}, "bad_value", "use_rslora"),
        ({"use_rslora": 1}, "bad_value", "use_rslora"),
        ({"fan_in_fan_out": "no"}, "bad_value", "fan_in_fan_out"),
        ({"rank_pattern": []}, "bad_value", "rank_pattern"),
        ({"rank_pattern": {"q_proj": 0}}, "bad_value", "rank_pattern['q_proj']"),
        ({"rank_pattern": {"q_proj": "4"}}, "bad_value", "rank_pattern['q_proj']"),
        ({"rank_pattern": {f"m{i}": 4 for i in range(2000)}}, "bad_value", "rank_pattern"),
        ({"alpha_pattern": {"q_proj": None}}, "bad_value", "alpha_pattern['q_proj']"),
        ({"alpha_pattern": {"": 4}}, "bad_value", "alpha_pattern"),
        ({"layers_to_transform": -1}, "bad_value", "layers_to_transform"),
        ({"layers_to_transform": [0, "1"]}, "bad_value", "layers_to_transform"),
        ({"layers_to_transform": True}, "bad_value", "layers_to_transform"),
        ({"layers_pattern": "layers"}, "bad_value", "layers_pattern"),
        ({"target_modules": "x", "layers_to_transform": 0}, "bad_value", "layers_to_transform"),
        ({"base_model_name_or_path": 7}, "bad_value", "base_model_name_or_path"),
        ({"base_model_name_or_path": "a\nb"}, "bad_value", "base_model_name_or_path"),
        ({"revision": ["main"]}, "bad_value", "revision"),
    ],
)
def test_each_lie_is_named(changes: dict[str, Any], code: str, where: str) -> None:
    findings = Findings()
    base = adapter_config(small_base(), 8, ["q_proj"])
    parse_config(json.dumps(base | changes).encode(), findings)
    with pytest.raises(Exception, match="cannot be served") as error:
        findings.raise_if_any()
    found = [(v.code, v.where) for v in error.value.violations]  # type: ignore[attr-defined]
    assert (code, where) in found


def test_all_violations_come_together() -> None:
    codes = violation_codes(lambda: read_with(use_qalora=True, r=0, new_key=1, peft_type="IA3"))
    assert codes == {"unsupported_feature", "bad_value", "unknown_key", "unsupported_peft_type"}


@pytest.mark.parametrize(
    "data",
    [
        *(b"", b"null", b"[]", b"1", b'"x"', b"{", b"\xff{}", b"\xef\xbb\xbf{}", b"{} {}"),
        b'{"r": 8, "r": 16}',
        b'{"lora_alpha": NaN}',
        b'{"lora_alpha": Infinity}',
        b'{"lora_alpha": -Infinity}',
        b'{"r": ' + b"9" * 10_000 + b"}",
        b'{"a":' * 40 + b"1" + b"}" * 40,
        b"[" * 200_000,
        b'{"a":' * 100_000,
    ],
)
def test_not_a_json_object(data: bytes) -> None:
    assert violation_codes(lambda: read(data)) == {"bad_config"}


def test_a_huge_config_is_not_parsed() -> None:
    data = b'{"x": "' + b"a" * MAX_CONFIG_BYTES + b'"}'
    assert violation_codes(lambda: read(data)) == {"file_too_large"}


def test_infinite_alpha_spelled_as_a_number_is_refused() -> None:
    config = json.dumps(adapter_config(small_base(), 8, ["q_proj"]) | {"lora_alpha": 7})
    data = config.replace('"lora_alpha": 7', '"lora_alpha": 1e999').encode()
    assert violation_codes(lambda: read(data)) == {"bad_value"}


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=6),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3)
    ),
    max_leaves=5,
)
KEYS = st.sampled_from(sorted(USED | HARMLESS | set(REFUSED))) | st.text(max_size=8)


@examples(300, 1500, st.dictionaries(KEYS, VALUES, max_size=5))
def test_any_config_is_read_or_refused(changes: dict[str, Any]) -> None:
    data = json.dumps(adapter_config(small_base(), 8, ["q_proj"]) | changes).encode()
    findings = Findings()
    config = parse_config(data, findings)
    assert config is not None or len(findings)


@examples(200, 500, st.binary(max_size=100))
def test_any_bytes_are_read_or_refused(data: bytes) -> None:
    findings = Findings()
    assert parse_config(data, findings) is not None or len(findings)


@pytest.mark.parametrize("key", ["rank_pattern", "alpha_pattern"])
def test_a_pattern_with_control_characters_is_shown_without_them(key: str) -> None:
    error = refusal(lambda: read_with(**{key: {"\x1b[2Jq_proj": "x"}}))
    assert error is not None
    assert error.message.isprintable()
    assert all(violation.message.isprintable() for violation in error.violations)
