"""Answers drawn at random from a format's grammar are read as calls that keep to their schemas."""

import json
from random import Random

import jsonschema
import numpy as np
import pytest
from llguidance import LLMatcher
from msgspec.structs import replace

from loraplex.adapters.grammar.compile import compile_grammar
from loraplex.adapters.grammar.limits import GrammarLimits
from loraplex.router.shape.lark import Lark
from loraplex.router.tools.registry import FORMATS
from loraplex.router.tools.tools import Tool, Tools
from tests.grids import sparse
from tests.router.tools.call_reading import read
from tests.router.tools.native import NATIVE, honoured_tools
from tests.vocabularies import byte_vocabulary

_OFFSET = 10
_VOCABULARY = byte_vocabulary(_OFFSET, (2,), {2: b"</s>"})
_LENGTH = 600
_ANSWERS = 8
# Drawn more often, so that strings and lists end.
_ENDING = frozenset(b'"]}),<')
TOOLS = (
    Tool(
        "f",
        parameters={
            "type": "object",
            "properties": {
                "text": {"type": "string", "maxLength": 8},
                "kind": {"enum": ["a", "b c", None]},
                "on": {"type": "boolean"},
                "old": {"type": "string", "enum": ["x y", ""], "deprecated": True},
                "many": {"type": "array", "items": {"$ref": "#/$defs/n"}, "maxItems": 2},
                "either": {"anyOf": [{"type": "integer", "maximum": 99}, {"type": "null"}]},
            },
            "required": ["text", "many"],
            "additionalProperties": False,
            "$defs": {"n": {"type": "integer", "minimum": 0, "maximum": 9}},
        },
    ),
    Tool(
        "g.h",
        parameters={
            "type": "object",
            "properties": {"no name": {"type": "string", "maxLength": 3}},
            "required": ["no name"],
            "additionalProperties": False,
        },
    ),
    Tool("g"),
)
SCHEMAS = {tool.name: tool.parameters or {"maxProperties": 0} for tool in TOOLS}


@pytest.mark.parametrize(("name", "parallel"), sparse(sorted(FORMATS), [False, True]))
def test_what_the_grammar_lets_through_is_calls(name: str, parallel: bool) -> None:
    tools = Tools(TOOLS, "required", parallel=parallel)
    first = _matcher(name, tools)
    random = Random(name)
    finished = 0
    for _ in range(_ANSWERS):
        answer = _walk(random, first.deep_copy(), "")
        if answer is None:
            continue
        finished += 1
        reading = read(FORMATS[name].reader(tools), [answer])
        assert reading.text == "", answer
        assert reading.calls, answer
        assert parallel or len(reading.calls) == 1, answer
        _check(reading.calls)
    assert finished > _ANSWERS // 2


@pytest.mark.parametrize(("name", "parallel"), sparse(sorted(FORMATS), [False, True]))
def test_calls_among_text_keep_to_the_schemas_of_strict_tools(name: str, parallel: bool) -> None:
    tools = Tools(tuple(replace(tool, strict=True) for tool in TOOLS), parallel=parallel)
    first = _matcher(name, tools)
    random = Random(name)
    native = NATIVE[name].write([("f", {"text": "", "many": [1]})])
    called = 0
    for _ in range(3 * _ANSWERS):
        begin = native[: random.randrange(len(native) + 1)]
        answer = _walk(random, first.deep_copy(), begin)
        if answer is None:
            continue
        reading = read(FORMATS[name].reader(tools), [answer])
        assert parallel or len(reading.calls) <= 1, answer
        called += len(reading.calls)
        _check(reading.calls)
    assert called > _ANSWERS


def _matcher(name: str, tools: Tools) -> LLMatcher:
    lark = Lark()
    grammar = lark.source(FORMATS[name].rules(honoured_tools(tools), lark))
    return compile_grammar(_VOCABULARY, grammar, GrammarLimits())


def _walk(random: Random, matcher: LLMatcher, begin: str) -> str | None:
    """An answer that begins so; None where it does not come to its end."""
    drawn = bytearray(begin.encode())
    assert matcher.consume_tokens([byte + _OFFSET for byte in drawn])
    while len(drawn) < _LENGTH and not matcher.is_stopped():
        token = _draw(random, matcher.compute_bitmask())
        if token == 2:
            break
        assert matcher.consume_token(token)
        drawn.append(token - _OFFSET)
    return drawn.decode() if matcher.is_accepting() else None


def _check(calls: tuple[tuple[str, str], ...]) -> None:
    for called, arguments in calls:
        jsonschema.validate(json.loads(arguments), SCHEMAS[called])


def _draw(random: Random, mask: bytes) -> int:
    bits = np.unpackbits(np.frombuffer(mask, np.uint8), bitorder="little")
    allowed = [int(i) for i in np.flatnonzero(bits)]
    if 2 in allowed and random.random() < 0.7:
        return 2
    plain = [i for i in allowed if 32 <= i - _OFFSET < 127]
    ending = [i for i in allowed if i - _OFFSET in _ENDING]
    if ending and random.random() < 0.4:
        return random.choice(ending)
    return random.choice(plain if plain and random.random() < 0.9 else allowed)
