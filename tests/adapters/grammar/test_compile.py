"""Grammars that are wrong, costly or hostile; each ends in time and takes nobody else with it."""

import contextlib
import json
import os
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loraplex.adapters.grammar.checker import GrammarChecker
from loraplex.adapters.grammar.compile import GrammarError, check_source, compile_grammar
from loraplex.adapters.grammar.deep_threads import run_deep
from loraplex.adapters.grammar.limits import GrammarLimits
from loraplex.adapters.grammar.vocabulary import make_vocabulary
from tests.lost_helpers import helpers, kill_helpers
from tests.vocabularies import byte_vocabulary, load

SPECIALS = {2: b"</s>", 3: b"<|call|>"}
VOCABULARY = byte_vocabulary(10, (2,), SPECIALS)
LIMITS = GrammarLimits(compile_s=1.5)


def schema(document: dict[str, Any]) -> str:
    return f"start: %json {json.dumps(document)}"


def chain(length: int, link: Any) -> str:
    rules = [f"r{i}: {link(f'r{i + 1}')}" for i in range(length)]
    return "\n".join(["start: r0", *rules, f'r{length}: "a"'])


def references(length: int, link: Any) -> str:
    kinds: dict[str, Any] = {f"a{i}": link({"$ref": f"#/$defs/a{i + 1}"}) for i in range(length)}
    return schema({"$ref": "#/$defs/a0", "$defs": kinds | {f"a{length}": {"type": "string"}}})


def optional(count: int) -> dict[str, Any]:
    return {"type": "object", "properties": {f"p{i}": {"type": "null"} for i in range(count)}}


FINE = {
    "1,000 optional properties": schema(optional(990)),
    "text": 'start: "a" | "b"',
    "enum of 5,000": schema({"enum": [f"value {i}" for i in range(5000)]}),
    "200 properties": schema({"type": "object", "properties": {f"ü{i}": {} for i in range(200)}}),
    "a long array": schema({"type": "array", "items": {"type": "null"}, "minItems": 10**9}),
    "a long string": schema({"type": "string", "maxLength": 10**9}),
    "a chain of rules": chain(3000, lambda rule: f'{rule} "x"'),
    "a chain of references": references(
        2000, lambda ref: {"type": "object", "properties": {"x": ref}}
    ),
    "references that double": references(30, lambda ref: {"allOf": [ref, ref]}),
    "quantifiers of quantifiers": "start: /(a{1000}){1000}/",
    "special tokens": 'start: <|call|> <[2]> "a"',
    "brackets in strings": 'start: "' + "(" * 500 + '"',
}
ENDLESS = "start: T\nT: " + " & ".join(f"/.*a{i}.*/" for i in range(24))
REFUSED = {
    "a deep group": 'start: A\nA: "' + "(" * 3 + '"' + "(" * 10_000,
    "a deep schema": "start: %json " + '{"items":' * 10_000 + "{}" + "}" * 10_000,
    "a deep expression": "start: /" + "(" * 200 + "a" + ")" * 200 + "/",
    "oneOf of oneOf": schema(
        {
            "allOf": [
                {"oneOf": [{"properties": {f"a{i}": {"type": t}}} for t in ("string", "number")]}
                for i in range(16)
            ]
        }
    ),
    "terminals that double": "start: T0\n"
    + "\n".join(f"T{i}: T{i + 1} T{i + 1}" for i in range(40))
    + '\nT40: "a"',
    "2,000 optional properties": schema(optional(2000)),
    "the same behind forced text": 'start: "'
    + "x" * 20
    + '" inner\ninner: %json '
    + json.dumps({"type": "array", "items": optional(2000), "minItems": 1}),
    "a loop of references": schema({"$ref": "#"}),
    "a long text": 'start: "' + "x" * 300_000 + '"',
    "look-ahead": "start: /(?=a)b/",
    "no grammar": "{",
    "an unknown token": "start: <|nope|>",
    "an id that is none": "start: <[99999]>",
    "a lone surrogate": 'start: "\ud800" \0',
}


@pytest.fixture(scope="module")
def checker() -> Iterator[GrammarChecker]:
    checker = GrammarChecker(VOCABULARY.tokens, LIMITS)
    yield checker
    checker.close()


@pytest.mark.parametrize("name", FINE)
def test_what_is_within_the_limits_compiles(checker: GrammarChecker, name: str) -> None:
    checker.check(FINE[name])
    matcher = run_deep(lambda: compile_grammar(VOCABULARY, FINE[name], LIMITS))
    assert not matcher.is_error()


@pytest.mark.parametrize("name", REFUSED)
def test_what_costs_too_much_or_is_wrong_is_refused(checker: GrammarChecker, name: str) -> None:
    with pytest.raises(GrammarError, match="."):
        checker.check(REFUSED[name])
    checker.check(FINE["text"])  # it goes on


def test_a_lost_process_says_what_it_lacked(checker: GrammarChecker) -> None:
    with pytest.raises(GrammarError, match="1.5 s of processor time"):
        checker.check(ENDLESS)


def test_what_serves_goes_first(checker: GrammarChecker) -> None:
    checker.check(FINE["text"])
    found = [process.nice() for process in helpers("loraplex.adapters.grammar.trial_process")]
    assert found
    assert set(found) == {min(19, os.nice(0) + 10)}


def test_a_process_that_died_idle_says_nothing_of_the_next_grammar(
    checker: GrammarChecker,
) -> None:
    for number in range(3):
        checker.check(f'start: "{number}"')
        kill_helpers("loraplex.adapters.grammar.trial_process")
        checker.check(f'start: "x{number}"')


def test_errors_say_nothing_of_llguidances_insides() -> None:
    with pytest.raises(GrammarError) as caught:
        compile_grammar(VOCABULARY, schema({"$ref": "#"}), LIMITS)
    assert str(caught.value) == "no answer can keep to the grammar"


def test_forced_text_may_be_any_of_its_tokens() -> None:
    vocabulary = make_vocabulary(load("llama-3"), 128_256, [128_001])
    ids = {vocabulary.tokenizer.greedy_tokenize(text)[0] for text in ("{", '{"', '{"name')}
    matcher = compile_grammar(vocabulary, 'start: "{\\"name"', LIMITS)
    mask = matcher.compute_bitmask()
    assert {i for i in range(128_256) if mask[i // 8] >> i % 8 & 1} == ids


@pytest.mark.parametrize(("depth", "fits"), [(100, True), (101, False)])
def test_nesting_counts_brackets_outside_of_strings(depth: int, fits: bool) -> None:
    text = "[" * depth + '"[[["' + "]" * depth
    if fits:
        check_source(text, GrammarLimits())
    else:
        with pytest.raises(GrammarError, match="nested more than 100 deep"):
            check_source(text, GrammarLimits())


@given(st.text(max_size=80))
def test_no_text_does_more_than_raise(text: str) -> None:
    with contextlib.suppress(GrammarError):
        compile_grammar(VOCABULARY, text, LIMITS)
