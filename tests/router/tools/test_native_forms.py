"""Made-up calls in each native form: the reader finds them, and the grammar lets them through."""

import json
from functools import lru_cache
from random import Random
from typing import Any

import msgspec
import pytest
from llguidance import LLMatcher

from loraplex.adapters.grammar.compile import compile_grammar
from loraplex.adapters.grammar.limits import GrammarLimits
from loraplex.router.parts.parts import PartsReader
from loraplex.router.shape.lark import Lark
from loraplex.router.tools.formats.format import ToolFormat
from loraplex.router.tools.registry import FORMATS
from loraplex.router.tools.tools import Tool, Tools
from tests.grids import sparse
from tests.router.tools.call_reading import read
from tests.router.tools.cuts import check_cuts
from tests.router.tools.native import NATIVE, TOOLS, Call, call, honoured_tools, value
from tests.vocabularies import byte_vocabulary

COUNT = 200
BEFORE = ("", "Let me see.", 'A "quote", {braces}: [1] < 2', "ä\n\n😀")
AFTER = ("", "Done.", "(That is all)")
LIMITS = GrammarLimits()


def format_of(name: str) -> ToolFormat:
    return FORMATS[name.split()[0]]


def specials_of(name: str) -> dict[int, bytes]:
    """Tokens of the format's markers."""
    return {i + 3: marker.encode() for i, marker in enumerate(format_of(name).markers)}


def accepts(name: str, tools: Tools, answer: str, *, special: bool) -> bool:
    """special: the format's markers are special tokens."""
    specials = {2: b"</s>"} | (specials_of(name) if special else {})
    matcher = _matcher(name, msgspec.json.encode(tools), special).deep_copy()
    tokens = _tokens(answer, specials)
    return matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting()


@lru_cache
def _matcher(name: str, tools: bytes, special: bool) -> LLMatcher:
    specials = {2: b"</s>"} | (specials_of(name) if special else {})
    vocabulary = byte_vocabulary(40, (2,), specials)
    lark = Lark({text.decode(): i for i, text in specials.items()})
    start = format_of(name).rules(honoured_tools(msgspec.json.decode(tools, type=Tools)), lark)
    return compile_grammar(vocabulary, lark.source(start), LIMITS)


def _tokens(answer: str, specials: dict[int, bytes]) -> list[int]:
    rest, tokens = answer.encode(), list[int]()
    by_length = sorted(specials.items(), key=lambda item: -len(item[1]))
    while rest:
        found = next(((i, text) for i, text in by_length if rest.startswith(text)), None)
        tokens.append(found[0] if found else rest[0] + 40)
        rest = rest[len(found[1]) if found else 1 :]
    return tokens


def answer_of(name: str, calls: list[Call], before: str, after: str) -> tuple[str, str]:
    """An answer, and the text in it."""
    native = NATIVE[name]
    before = before if native.before else ""
    after = after if native.after else ""
    between = "\n" if before else ""
    begin = native.begin if before else ""
    answer = f"{begin}{before}{between}{native.write(calls)}{between if after else ''}{after}"
    return answer, f"{before}{between if after else ''}{after}"


def made_up(name: str, random: Random) -> tuple[list[Call], str, str]:
    """Calls, an answer with them and the text in it."""
    calls = [call(random) for _ in range(random.choice((1, 1, 2, 3)))]
    if NATIVE[name].any_values and random.random() < 0.5:
        free = {f"k{i}": value(random) for i in range(random.randrange(4))}
        calls[0] = ("look", free)
    return calls, *answer_of(name, calls, random.choice(BEFORE), random.choice(AFTER))


def check_reading(name: str, seed: str, cut: int, count: int = COUNT) -> None:
    """Try `count` answers, and cut one in `cut` of them at every byte."""
    random = Random(seed)
    for number in range(count):
        calls, answer, text = made_up(name, random)
        reading = read(reader_of(name), [answer])
        found = [(called, json.loads(arguments)) for called, arguments in reading.calls]
        assert (reading.text, found) == (text, calls), answer
        if number % cut == 0:
            check_cuts(lambda: reader_of(name), answer, reading)


def reader_of(name: str) -> PartsReader:
    return format_of(name).reader(Tools(TOOLS))


@pytest.mark.parametrize("name", sorted(NATIVE))
def test_made_up_calls_are_read(name: str) -> None:
    check_reading(name, name, cut=20, count=20)


@pytest.mark.exhaustive
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("name", sorted(NATIVE))
def test_all_of_them_are_read_wherever_they_are_cut(name: str) -> None:
    check_reading(name, name, cut=1)


@pytest.mark.parametrize(("name", "special"), sparse(sorted(NATIVE), [False, True]))
def test_the_grammar_lets_native_forms_through(name: str, special: bool) -> None:
    random = Random(name)
    strict = Tools(tuple(Tool(t.name, t.description, t.parameters, True) for t in TOOLS))
    for _ in range(COUNT // 10):
        calls = [call(random) for _ in range(random.choice((1, 2, 3)))]
        answer, _ = answer_of(name, calls, random.choice(BEFORE), random.choice(AFTER))
        if special and any(marker in repr(calls) for marker in format_of(name).markers):
            continue  # in a string it is text, not the token
        plain = NATIVE[name].write(calls)
        one = NATIVE[name].write(calls[:1])
        assert accepts(name, strict, answer, special=special), answer
        assert accepts(name, Tools(TOOLS), answer, special=special), answer
        required = Tools(TOOLS, "required")
        assert accepts(name, required, plain, special=special), plain
        assert accepts(name, Tools(TOOLS, "required", parallel=False), one, special=special), one


WRONG: dict[str, tuple[Tools, list[Call]]] = {
    "a tool that may not be called": (Tools(TOOLS, "required", ("now",)), [("look", {})]),
    "an unknown tool": (Tools(TOOLS, "required"), [("look_", {})]),
    "a wrong type": (Tools(TOOLS, "required"), [("look_up", {"query": "x", "limit": "12 or so"})]),
    "an argument is missing": (Tools(TOOLS, "required"), [("look_up", {"limit": 1})]),
    "an unknown argument": (Tools(TOOLS, "required"), [("look_up", {"query": "", "new": 1})]),
    "arguments of a tool without any": (Tools(TOOLS, "required"), [("now", {"a": 1})]),
    "two calls": (Tools(TOOLS, "required", parallel=False), [("now", {}), ("now", {})]),
    "two calls of the named": (Tools(TOOLS, "required", ("now",), named=True), [("now", {})] * 2),
    "two calls at most": (Tools(TOOLS, parallel=False), [("now", {}), ("now", {})]),
}


@pytest.mark.parametrize(("name", "special"), sparse(sorted(NATIVE), [False, True]))
def test_the_grammar_stops_what_is_wrong(name: str, special: bool) -> None:
    written = {wrong: (tools, NATIVE[name].write(calls)) for wrong, (tools, calls) in WRONG.items()}
    passed = [
        wrong
        for wrong, (tools, text) in written.items()
        if accepts(name, tools, text, special=special)
    ]
    assert passed == []


@pytest.mark.parametrize("name", sorted(NATIVE))
def test_text_alone_is_no_call(name: str) -> None:
    text = NATIVE[name].begin + "Just text."
    for special in (False, True):
        assert accepts(name, Tools(TOOLS), text, special=special)
        assert accepts(name, Tools(TOOLS, parallel=False), text, special=special)
        assert not accepts(name, Tools(TOOLS, "required"), text, special=special)
        assert not accepts(name, Tools(TOOLS, "required"), "", special=special)


def strict_tools(parameters: dict[str, Any] | None) -> Tools:
    return Tools((Tool("f", parameters=parameters, strict=True), Tool("g")))


@pytest.mark.parametrize("name", sorted(NATIVE))
def test_only_a_strict_tool_keeps_to_its_schema_by_itself(name: str) -> None:
    tools = strict_tools({"type": "object", "properties": {"a": {"type": "integer"}}})
    write = NATIVE[name].write
    for special in (False, True):
        assert accepts(name, tools, write([("f", {"a": 1})]), special=special)
        assert not accepts(name, tools, write([("f", {"a": "one"})]), special=special)
        assert accepts(name, tools, write([("g", {"a": "one"})]), special=special)


def test_values_of_python_are_read() -> None:
    random = Random(1)
    tools = Tools(TOOLS)
    for _ in range(COUNT):
        arguments = {f"k{i}": value(random) for i in range(3)}
        answer = f"[look({', '.join(f'{key}={item!r}' for key, item in arguments.items())})]"
        reading = read(FORMATS["pythonic"].reader(tools), [answer])
        assert reading == read(FORMATS["pythonic"].reader(tools), answer)
        assert [json.loads(found) for _, found in reading.calls] == [arguments]
