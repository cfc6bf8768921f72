"""Timed patterns answer as `re.fullmatch` does, and what is not supported is refused."""

import re
import warnings
from contextlib import suppress

import pytest
from hypothesis import example
from hypothesis import strategies as st

from loraplex.adapters.base import base_modules
from loraplex.adapters.common.timed_pattern import PatternBudget, PatternError, TimedPattern
from loraplex.adapters.peft.tensor_names import NAMINGS
from tests.adapter_folders import small_base
from tests.grids import examples

BASE = small_base(num_layers=12)
ATOMS = st.sampled_from(
    ["a", "b", "q_proj", "layers", r"\.", ".", r"\d", r"\w", "[ab]", "[^a]", "[a-c_]", r"[\d.]"]
    + [r"\b", r"\B", "^", "$", r"\W", "_", "0", r"\s", "-", "{", "[]a]", r"\-"]
)
QUANTIFIERS = st.sampled_from(
    ["", "", "", "*", "+", "?", "*?", "+?", "{2}", "{1,2}", "{0,}", "{,1}"]
)
LOOKS = st.sampled_from(["?=", "?!", "?<=", "?<!"])
PATTERNS = st.recursive(
    st.tuples(ATOMS, QUANTIFIERS).map("".join),
    lambda inner: st.one_of(
        st.lists(inner, min_size=1, max_size=4).map("".join),
        st.tuples(inner, inner).map(lambda pair: f"(?:{pair[0]}|{pair[1]})"),
        st.tuples(inner, QUANTIFIERS).map(lambda pair: f"({pair[0]}){pair[1]}"),
        st.tuples(LOOKS, inner, QUANTIFIERS).map(lambda look: f"({look[0]}{look[1]}){look[2]}"),
    ),
    max_leaves=6,
)
# Short: `re` itself takes time exponential in the name for some of these patterns.
TEXTS = st.text("ab_.0q-", min_size=1, max_size=6)


def _reference(pattern: str) -> "re.Pattern[str] | None":
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return re.compile(pattern)
        except re.error:
            return None


@examples(400, 1500, PATTERNS, st.lists(TEXTS, min_size=1, max_size=4))
def test_equals_re_where_supported(pattern: str, names: list[str]) -> None:
    reference = _reference(pattern)
    try:
        ours = TimedPattern(pattern)
    except PatternError:
        assert reference is None or re.search(r"(\^|\$|b|B)[*+?{]|\{$|\{[^}]*\{", pattern)
        return
    assert reference is not None
    for name in names:
        assert ours.fullmatch(name) is bool(reference.fullmatch(name)), name


@examples(400, 1500, st.text("ab.*+?()[]{}|\\^$-,0129dwsbB:=!<P", max_size=14), TEXTS)
@example("{0}", "")
@example("a|{,2}b", "b")
@example("{b}", "{b}")
@example("[]--", "0")
def test_any_text_is_matched_as_re_does_or_refused(pattern: str, name: str) -> None:
    try:
        ours = TimedPattern(pattern)
    except PatternError:
        return
    reference = _reference(pattern)
    assert reference is not None, "accepted what re refuses"
    assert ours.fullmatch(name) is bool(reference.fullmatch(name))


# What trainers write, about text models and the text within larger ones.
TRAINERS = (
    r".*\.(q|k)_proj",
    r"model\.layers\.\d+\.mlp\.(gate|up|down)_proj",
    r"^lm_head$",
    # unsloth
    r"(?:.*?(?:vision|image|language|text).*?(?:self_attn|attention|attn|mlp|feed_forward|ffn|dense)"
    r".*?(?:q_proj|k_proj|v_proj|o_proj|gate_proj|up_proj|down_proj).*?)|(?:\bmodel\.layers\.[\d]{1,}"
    r"\.(?:self_attn|attention|attn|mlp)\.(?:(?:q_proj|k_proj|down_proj)))",
    r"(?:\bmodel\.layers\.[\d]{1,}(?!.*\.experts\.\d)\..*?(?:self_attn|attn|mixer|mlp|dense).*?"
    r"\.(?:(?:q_proj|v_proj|o_proj)))",
    # ms-swift
    r"^(model(?=\.).*\.(k_proj|up_proj|v_proj|down_proj|gate_proj|o_proj|q_proj))$",
    r"^(model\.language_model(?=\.).*\.(up_proj|down_proj|v_proj|q_proj|gate_proj|o_proj|k_proj))$",
    r"^(model)(?!.*(lm_head|output|emb|wte|shared)).*",
    r"^(language_model|model)(?!.*(lm_head|output|emb|wte|shared)).*",
    # LLaMA-Factory
    r"^(?!.*(?:visual|merger)).*(?:q_proj|v_proj|up_proj).*",
    r"^(?!.*patch_embed).*(?:proj).*",
    # axolotl
    r"model.language_model.layers.[\d]+.(mlp|cross_attn|self_attn).(up|down|gate|q|k|v|o)_proj",
    # by hand
    r"(?!.*layers\.(?:[01]|1\d)\.).*self_attn.*(?<!k_)proj",
    r".*layers\.(?!.*mlp)(?=\d+\.self).*(?<=q_)proj",
)


@pytest.mark.parametrize("pattern", TRAINERS)
def test_patterns_of_trainers_match_what_re_matches(pattern: str) -> None:
    compiled = TimedPattern(pattern)
    names = [naming.spelled(module.path) for naming in NAMINGS for module in base_modules(BASE)]
    spelled = [name for name in names if name is not None]
    expected = {name for name in spelled if re.fullmatch(pattern, name)}
    assert {name for name in spelled if compiled.fullmatch(name)} == expected
    assert expected


@pytest.mark.parametrize("around", ["{}", "(?={})a*", "(?!{})x"])
@pytest.mark.parametrize(
    "bad", [r"(a+)+b", r"(a|a)*b", r"(.*)*x", r"(a?){64}a{64}b", r".*.*.*.*.*.*.*.*x"]
)
def test_catastrophic_patterns_end(bad: str, around: str) -> None:
    with suppress(PatternError):
        assert not TimedPattern(around.format(bad)).fullmatch("a" * 64)


@pytest.mark.parametrize("pattern", ["((.?){2000}b|c)", "(?:(?:(?:(?:[ab])?){2,}){0,2}){2}"])
def test_a_match_that_takes_too_long_is_given_up(pattern: str) -> None:
    with pytest.raises(PatternError, match="too long"):
        TimedPattern(pattern).fullmatch("a" * 30 + "b" * 30 + "c")


def test_patterns_share_a_budget() -> None:
    names = [module.path for module in base_modules(BASE)]
    hasty = TimedPattern(".*Q", PatternBudget(cpu_s=0.001))
    with pytest.raises(PatternError, match="too long"):
        any(hasty.fullmatch(name) for name in 1000 * names)
    budget = PatternBudget(weight=6)
    TimedPattern("a+b?", budget)
    with pytest.raises(PatternError, match="too many parts"):
        TimedPattern("a{3}", budget)


@pytest.mark.parametrize(
    "pattern",
    [
        *(
            "(?<=a+)b",
            "(?<!a|bc)b",
            "(?>a)",
            "(?P<n>a)",
            r"(a)\1",
            "(?i)a",
            "a++",
            "a**",
            "*a",
            "(",
            ")",
            "[",
            "[z-a]",
        ),
        *(
            "a{9000}",
            "(" * 40 + ")" * 40,
            "x" * 5000,
            "(((a{99}){99}){99})",
            "\\",
            r"\x41",
            "[[a]]",
        ),
        *("a{3,2}", "^*", "(?", "[a", "(?=a"),
    ],
)
def test_unsupported_patterns_are_refused(pattern: str) -> None:
    with pytest.raises(PatternError):
        TimedPattern(pattern)


def test_a_refusal_can_be_shown() -> None:
    with pytest.raises(PatternError, match="bad character range") as refused:
        TimedPattern("[\x02-\x01]")
    assert str(refused.value).isprintable()
