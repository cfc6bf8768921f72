"""Each form as llguidance reads it: which texts it accepts whole."""

from typing import Any

import pytest
from llguidance import LLMatcher

from loraplex.adapters.grammar.compile import GrammarError, compile_grammar
from loraplex.adapters.grammar.limits import GrammarLimits
from loraplex.adapters.grammar.vocabulary import Vocabulary
from loraplex.router.shape.lark import Lark
from loraplex.router.shape.rules import rules
from loraplex.router.shape.shape import (
    AnyJson,
    Choice,
    Grammar,
    JsonSchema,
    Regex,
    Shape,
    ShapeRefused,
    StructuralTag,
    Tag,
)
from loraplex.router.tools.compose import compose
from tests.vocabularies import byte_vocabulary

END = 0
BYTES: Vocabulary = byte_vocabulary(1, (END,), {END: b"<end>"})
LIMITS = GrammarLimits()


def matcher(grammar: str) -> LLMatcher:
    return compile_grammar(BYTES, grammar, LIMITS)


def accepts(grammar: str, text: str) -> bool:
    found = matcher(grammar)
    ids = [byte + 1 for byte in text.encode()]
    if found.validate_tokens(ids) < len(ids):
        return False
    found.consume_tokens(ids)
    return found.is_accepting()


def gbnf(source: str) -> Grammar:
    return Grammar(source, "gbnf", "p")


def schema(value: dict[str, Any] | bool, whitespace: str | None = None) -> JsonSchema:
    return JsonSchema(value, "p", whitespace)


PAIR = {
    "type": "object",
    "properties": {"é": {"type": "integer"}, "b": {"enum": ["x/*\n", None]}},
    "required": ["é", "b"],
    "additionalProperties": False,
}
JSON_GBNF = r"""
# of llama.cpp
root ::= object
value ::= object | string | number | "true"
object ::= "{" ws ( string ":" ws value ("," ws string ":" ws value)* )? "}" ws
string ::= "\"" ([^"\\\x7F\x00-\x1F] | "\\" (["\\/bfnrt] | "u" [0-9a-fA-F]{4}))* "\"" ws
number ::= "-"? [0-9]{1,3} ws
ws ::= [ \t\n]*
"""
SUM_GBNF = r"""
root ::= (term "=" ws term "\n")+
term ::= ([a-z] [a-z0-9_]* | [0-9]+) ws
ws ::= [ \t\n]*
"""
TAGS = StructuralTag(
    (Tag("<f=a>", {"type": "integer"}, "</f>"), Tag("<g/>", {"type": "boolean"}, "")),
    ("<f", "<g", "<f="),
    "p",
)
CASES: list[tuple[Shape, tuple[str, ...], tuple[str, ...]]] = [
    (AnyJson("p"), ("{}", '{"a": [1, 2]}', '{"a":{"b":null}}'), ("[1]", "1", "", "{}x")),
    (
        schema(PAIR),
        ('{"é":1,"b":"x/*\\n"}', '{"é": -1, "b": null}'),
        (
            '{"é":1}',
            '{"é":"1","b":null}',
            '{"é":1,  "b":null}',
            '{\n"é":1,"b":null}',
            '{"é":1,"b":null,"c":1}',
        ),
    ),
    (schema(PAIR, ""), ('{"é":1,"b":null}',), ('{"é": 1,"b":null}',)),
    (schema(PAIR, "[ ]*"), ('{   "é":1,"b":null}',), ('{\n"é":1,"b":null}',)),
    (schema(True), ("1", "[]", '"a"'), ("", "x")),
    (Regex("a|b/$", "p"), ("a", "b/"), ("ab/", "b", "a$")),
    (Regex("^[0-9]{2}\\n?$", "p"), ("12", "12\n"), ("1", "123")),
    (Regex(r"a\$", "p"), ("a$",), ("a",)),
    (Regex(r"a\\$", "p"), ("a\\",), ("a", "a\\$")),
    (Regex("", "p"), ("",), ("a",)),
    (Choice(("a", "ab", 'q"\n\\', "ab"), "p"), ("a", "ab", 'q"\n\\'), ("", "abab", "q")),
    (Choice(("",), "p"), ("",), ("a",)),
    (
        Grammar('start: "order " NUMBER\nNUMBER: /[0-9]{3}/', "lark", "p"),
        ("order 123",),
        ("order",),
    ),
    (gbnf(JSON_GBNF), ('{"a": {"b":12 , "c":"\\u00ff\\""}}', "{ }"), ('{"a":1234}', '{"a":"\n"}')),
    (gbnf(SUM_GBNF), ("x=1\n", "x1 = 22\ny=x\n"), ("x=1", "1x=1\n")),
    (gbnf('root ::= id "end" | "x" id\nid ::= [a-c]+ | [d-f]+'), ("abend", "xb", "fend"), ("end",)),
    (
        gbnf(r'root ::= . [^a-c\]] "\x41\u00e9\U0001F600\n"'),
        ("\nxAé😀\n",),
        ("aaAé😀\n", "a]Aé😀\n"),
    ),
    (gbnf('root ::= "a"{2} "b"{1,} "c"{0,2} "d"{ , 1}'), ("aab", "aabbccd"), ("ab", "aabccc")),
    (gbnf('root ::= (\n "a" # one\n | [a-]\n)\n  "b"'), ("ab", "-b"), ("b",)),
    (gbnf('root ::= "" | "(" root ")"'), ("", "(())"), ("(()",)),
    (TAGS, ("", "hi", "<", "a<f=a>12</f><g/>true.<g/>false"), ("a<f", "<f=b>", "<f=a>x</f>", "<g")),
]


@pytest.mark.parametrize(("shape", "good", "bad"), CASES)
def test_what_a_form_accepts(shape: Shape, good: tuple[str, ...], bad: tuple[str, ...]) -> None:
    writer = Lark()
    within = writer.source(f'"<" {rules(shape, writer)}')
    grammar = compose(shape).grammar
    for text in good:
        assert accepts(grammar, text), text
        assert accepts(within, f"<{text}"), text
    for text in bad:
        assert not accepts(grammar, text), text


@pytest.mark.parametrize(
    ("source", "says"),
    [
        ('x ::= "a"', "no rule `root`"),
        ("", "no rule `root`"),
        ('root ::= "a', "unexpected text"),
        ('\nroot ::= "a" y', "line 2: there is no rule y"),
        ('root ::= ("a"', "does not end"),
        ('root ::= "a")', "expected a rule's name"),
        ("root ::= *", "unexpected *"),
        ("root ::= [z-a]", "no such range"),
        ("root ::= []", "empty class"),
        ('root ::= "a"{3,1}', "no such repetition"),
        ('root ::= "a"{}', "no such repetition"),
        ('root ::= "a"{99999}', "repetitions"),
        ('::= "a"', "a rule's name before"),
        ('root ::= "a"\nroot ::= "b"', "twice"),
        (r'root ::= "\ud800"', "surrogate"),
        (r'root ::= "\UFFFFFFFF"', "surrogate"),
        ("root ::= " + "(" * 200 + '"a"' + ")" * 200, "groups in groups"),
    ],
)
def test_what_is_no_gbnf(source: str, says: str) -> None:
    with pytest.raises(ShapeRefused) as caught:
        compose(gbnf(source))
    assert says in caught.value.message
    assert caught.value.param == "p"


def test_a_tag_begins_with_a_trigger() -> None:
    tags = (Tag("<f>", True, "</f>"), Tag("f>", True, "</f>"))
    with pytest.raises(ShapeRefused) as caught:
        compose(StructuralTag(tags, ("<f",), "p"))
    assert caught.value.param == "p.structures[1].begin"


@pytest.mark.parametrize("pattern", ["(?=a)a", r"a\b", "a^b", "a$b", "(", "[z-a]", "*"])
def test_what_no_pattern_can_say_is_refused(pattern: str) -> None:
    with pytest.raises(GrammarError):
        matcher(compose(Regex(pattern, "p")).grammar)
