"""The linear matcher answers as `re.fullmatch` does, and refuses what it does not understand."""

import re
import warnings

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from adapters.module_pattern import ModulePattern
from adapters.pattern_syntax import PatternError

NAMES = (
    "model.layers.0.self_attn.q_proj",
    "model.layers.11.mlp.down_proj",
    "model.embed_tokens",
    "lm_head",
    "a",
)
ATOMS = st.sampled_from(
    ["a", "b", "q_proj", "layers", r"\.", ".", r"\d", r"\w", "[ab]", "[^a]", "[a-c_]", r"[\d.]"]
    + [r"\b", "^", "$", r"\W", "_", "0", r"\s", "-", "{", "[]a]", r"\-"]
)
QUANTIFIERS = st.sampled_from(
    ["", "", "", "*", "+", "?", "*?", "+?", "{2}", "{1,2}", "{0,}", "{,1}"]
)
PATTERNS = st.recursive(
    st.tuples(ATOMS, QUANTIFIERS).map("".join),
    lambda inner: st.one_of(
        st.lists(inner, min_size=1, max_size=4).map("".join),
        st.tuples(inner, inner).map(lambda pair: f"(?:{pair[0]}|{pair[1]})"),
        st.tuples(inner, QUANTIFIERS).map(lambda pair: f"({pair[0]}){pair[1]}"),
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
        assert reference is None or re.search(r"(\^|\$|b)[*+?{]|\{$|\{[^}]*\{", pattern)
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


@pytest.mark.parametrize(
    ("pattern", "matched"),
    [
        (r".*\.(q|k)_proj", {NAMES[0]}),
        (r"model\.layers\.\d+\.mlp\.(gate|up|down)_proj", {NAMES[1]}),
        (
            r"(?:.*?(?:language|text).*?(?:mlp).*?(?:q_proj).*?)|"
            r"(?:\bmodel\.layers\.[\d]{1,}\.(?:self_attn|mlp)\.(?:(?:q_proj|down_proj)))",
            {NAMES[0], NAMES[1]},
        ),
        (r"^lm_head$", {NAMES[3]}),
    ],
)
def test_patterns_seen_in_the_wild(pattern: str, matched: set[str]) -> None:
    compiled = ModulePattern(pattern)
    assert {name for name in NAMES if compiled.fullmatch(name)} == matched


def test_catastrophic_patterns_end_at_once() -> None:
    for pattern in (r"(a+)+b", r"(a|a)*b", r"(.*)*x", r"(a?){64}a{64}b", r".*.*.*.*.*.*.*.*x"):
        assert not ModulePattern(pattern).fullmatch("a" * 64)


@pytest.mark.parametrize(
    "pattern",
    [
        *(
            "(?=a)",
            "(?<=a)b",
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
        *("a{3,2}", "^*", "(?", "[a", r"\B"),
    ],
)
def test_unsupported_patterns_are_refused(pattern: str) -> None:
    with pytest.raises(PatternError):
        ModulePattern(pattern)
