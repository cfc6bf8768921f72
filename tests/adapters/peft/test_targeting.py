"""Matching of modules, ranks and alphas, against PEFT's own functions."""

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from peft import LoraConfig
from peft.tuners.tuners_utils import check_target_module_exists
from peft.utils.other import get_pattern_key

from loraplex.adapters.common.timed_pattern import PatternBudget
from loraplex.adapters.errors import Findings
from loraplex.adapters.peft.config import parse_config
from loraplex.adapters.peft.targeting import Targeting
from tests.adapters.refusals import violation_codes

PATHS = (
    "model.layers.0.self_attn.q_proj",
    "model.layers.1.self_attn.v_proj",
    "model.layers.10.mlp.up_proj",
    "model.embed_tokens",
    "lm_head",
)
NAMES = st.sampled_from(
    ["q_proj", "proj", "self_attn.q_proj", "up_proj", "lm_head", "embed_tokens", *PATHS, "layers"]
)
PATTERNS = st.sampled_from(
    [
        "q_proj",
        ".*",
        r"layers\.1\..*",
        r"layers\.(0|1)\..*_proj",
        "^lm_head",
        "q.proj",
        r"\d+\.mlp\.\w+",
    ]
    + ["model.layers.0.self_attn.q_proj", "a|lm_head", "^model.layers.1.self_attn.v_proj", "proj"]
)
LAYERS = st.none() | st.integers(0, 10) | st.lists(st.sampled_from([0, 1, 10]), max_size=2)


def targeting(**config: Any) -> Targeting:
    findings = Findings()
    raw = {"peft_type": "LORA", "target_modules": ["q_proj"]} | config
    parsed = parse_config(json.dumps(raw).encode(), findings)
    findings.raise_if_any()
    assert parsed is not None
    result = Targeting(parsed, findings)
    findings.raise_if_any()
    return result


@settings(max_examples=400)
@given(
    st.lists(NAMES, min_size=1, max_size=3),
    LAYERS,
    st.none() | st.sampled_from(["layers", "h", ["h", "layers"], []]),
    st.none() | st.lists(NAMES, max_size=2) | PATTERNS,
)
def test_names_match_as_in_peft(names: list[str], layers: Any, pattern: Any, excluded: Any) -> None:
    options: dict[str, Any] = {"target_modules": names, "exclude_modules": excluded}
    if layers is not None and layers != []:
        options |= {"layers_to_transform": layers, "layers_pattern": pattern}
    theirs, ours = LoraConfig(**options), targeting(**options)
    for path in PATHS:
        expected = bool(check_target_module_exists(theirs, path))
        assert ours.targets(path, path == "lm_head") is expected, path


@settings(max_examples=200)
@given(PATTERNS)
def test_a_pattern_matches_as_in_peft(pattern: str) -> None:
    theirs, ours = LoraConfig(target_modules=pattern), targeting(target_modules=pattern)
    for path in PATHS:
        assert ours.targets(path, False) is bool(check_target_module_exists(theirs, path))


@settings(max_examples=400)
@given(st.lists(PATTERNS, unique=True, max_size=4))
def test_overrides_match_as_in_peft_in_the_order_of_the_file(patterns: list[str]) -> None:
    ranks = {pattern: index + 1 for index, pattern in enumerate(patterns)}
    ours = targeting(rank_pattern=ranks, alpha_pattern=ranks, r=99, lora_alpha=98)
    for path in PATHS:
        key = get_pattern_key(list(ranks), path)
        assert ours.lora_rank(path) == ranks.get(key, 99)
        assert ours.lora_alpha(path) == ranks.get(key, 98)


@pytest.mark.parametrize("config", [{"target_modules": ".*x.*"}, {"rank_pattern": {"x|y": 4}}])
def test_a_pattern_that_takes_too_long_is_refused(
    config: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    hasty = PatternBudget(cpu_s=0.001)
    monkeypatch.setattr("loraplex.adapters.peft.targeting.PatternBudget", lambda: hasty)

    def match() -> list[Any]:
        ours = targeting(**config)  # to compile counts, too
        return [(ours.targets(path, False), ours.lora_rank(path)) for path in 999 * PATHS]

    assert violation_codes(match) == {"bad_pattern"}


def test_all_linear_leaves_out_head_and_embedding() -> None:
    ours = targeting(target_modules="All-Linear")
    assert [path for path in PATHS if ours.targets(path, path in PATHS[3:])] == list(PATHS[:3])


@pytest.mark.parametrize(
    "config",
    [
        {"target_modules": "(a"},
        {"target_modules": "(?>a).*"},
        {"target_modules": r"(a)\1"},
        {"target_modules": "((((a{99}){99}){99}){99})"},
        {"exclude_modules": "*"},
        {"rank_pattern": {"a)|(b": 4}},
        {"rank_pattern": {"(?i)a": 4}},
        {"alpha_pattern": {f"(.?){{256}}{i}": 4 for i in range(64)}},
        {"layers_to_transform": [0], "layers_pattern": ["layers|h"]},
    ],
)
def test_patterns_that_are_not_understood_are_refused(config: dict[str, Any]) -> None:
    assert violation_codes(lambda: targeting(**config)) == {"bad_pattern"}
