"""The linear matcher answers as `re.fullmatch` does, and refuses what it does not understand."""

import random
import re
import warnings

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from loraplex.adapters.base import base_modules
from loraplex.adapters.peft.module_pattern import Budget, ModulePattern
from loraplex.adapters.peft.pattern_syntax import PatternError
from loraplex.adapters.peft.tensor_names import NAMINGS
from tests.adapter_folders import small_base

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


@settings(max_examples=1500)
@given(PATTERNS, st.lists(TEXTS, min_size=1, max_size=4))
def test_equals_re_where_supported(pattern: str, names: list[str]) -> None:
    reference = _reference(pattern)
    try:
        ours = ModulePattern(pattern)
    except PatternError:
        assert reference is None or re.search(r"(\^|\$|b|B)[*+?{]|\{$|\{[^}]*\{", pattern)
        return
    assert reference is not None
    for name in names:
        assert ours.fullmatch(name) is bool(reference.fullmatch(name)), name


@settings(max_examples=1500)
@given(st.text("ab.*+?()[]{}|\\^$-,0129dwsbB:=!<P", max_size=14), TEXTS)
@example("{0}", "")
@example("a|{,2}b", "b")
@example("{b}", "{b}")
def test_any_text_is_matched_as_re_does_or_refused(pattern: str, name: str) -> None:
    try:
        ours = ModulePattern(pattern)
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
    compiled = ModulePattern(pattern)
    names = [naming.spelled(module.path) for naming in NAMINGS for module in base_modules(BASE)]
    spelled = [name for name in names if name is not None]
    expected = {name for name in spelled if re.fullmatch(pattern, name)}
    assert {name for name in spelled if compiled.fullmatch(name)} == expected
    assert expected


def test_catastrophic_patterns_end_at_once() -> None:
    bad = (r"(a+)+b", r"(a|a)*b", r"(.*)*x", r"(a?){64}a{64}b", r".*.*.*.*.*.*.*.*x")
    for pattern in (*bad, *(f"(?={each})a*" for each in bad), "(?:(?=(a|aa)+b)a|(?!(a*)*c)a)+b"):
        assert not ModulePattern(pattern).fullmatch("a" * 64)
    for pattern in bad:
        assert ModulePattern(f"(?!{pattern})a*").fullmatch("a" * 64)


def test_what_takes_too_long_or_too_much_is_given_up() -> None:
    looks = "".join(f"(?!.*{char}.{{9}}Z)" for char in "abcdefgh") + ".*Q"
    names = [module.path for module in base_modules(BASE)]
    assert not any(map(ModulePattern(looks).fullmatch, names))
    hasty = ModulePattern(looks, Budget(steps=1000))
    with pytest.raises(PatternError, match="too many steps"):
        any(map(hasty.fullmatch, names))
    # Its deterministic automaton has 2**24 states.
    blown_up, draw = ModulePattern(".*a.{24}"), random.Random(0)
    texts = ("".join(draw.choices("ab", k=500)) for _ in range(1000))
    with pytest.raises(PatternError, match="too much memory"):
        list(map(blown_up.fullmatch, texts))


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
        *("a{300}", "(" * 40 + ")" * 40, "x" * 5000, "(((a{99}){99}){99})", "\\", r"\x41", "[[a]]"),
        *("a{3,2}", "^*", "(?", "[a", "(?=a"),
    ],
)
def test_unsupported_patterns_are_refused(pattern: str) -> None:
    with pytest.raises(PatternError):
        ModulePattern(pattern)
