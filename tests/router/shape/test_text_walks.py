"""Whatever the masks of a pattern, a grammar or tags let through is of that form."""

import json
import re
from typing import Any, NamedTuple

from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from jsonschema import Draft202012Validator

from router.shape.compose import grammar_of
from router.shape.shape import Grammar, Regex, StructuralTag, Tag
from tests.router.shape.walks import BYTES

SEEDS = 5
MOST = 600


class Node(NamedTuple):
    """A regular language. kind: text, one of (a class of characters), all, any, times."""

    kind: str
    text: str = ""
    parts: tuple["Node", ...] = ()
    least: int = 1
    most: int = 1


LEAVES = st.one_of(
    st.text("ab/\\\"'.+-é漢😀 {[", min_size=1, max_size=4).map(lambda text: Node("text", text)),
    st.sampled_from(["a-z", "0-9A-F", "à-ÿ", "^a-z\\n", "_", "xy"]).map(lambda c: Node("class", c)),
)


def _several(inner: st.SearchStrategy[Node]) -> st.SearchStrategy[Node]:
    parts = st.lists(inner, min_size=1, max_size=3).map(tuple)
    counts = st.tuples(st.integers(0, 2), st.integers(0, 3))
    return st.one_of(
        parts.map(lambda parts: Node("all", parts=parts)),
        parts.map(lambda parts: Node("any", parts=parts)),
        st.builds(
            lambda part, counts: Node("times", "", (part,), counts[0], counts[0] + counts[1] or 1),
            inner,
            counts,
        ),
    )


NODES = st.recursive(LEAVES, _several, max_leaves=8)


def pattern(node: Node) -> str:
    match node.kind:
        case "text":
            return re.escape(node.text)
        case "class":
            return f"[{node.text}]"
        case "times":
            return f"(?:{pattern(node.parts[0])}){{{node.least},{node.most}}}"
        case kind:
            return "(?:" + ("" if kind == "all" else "|").join(map(pattern, node.parts)) + ")"


def lark(node: Node, rules: list[str]) -> str:
    """The name of the node's rule, which goes to `rules`."""
    inner = [lark(part, rules) for part in node.parts]
    match node.kind:
        case "text":
            body = json.dumps(node.text, ensure_ascii=False)
        case "class":
            body = f"/[{node.text}]/"
        case "times":
            body = f"{inner[0]}{{{node.least},{node.most}}}"
        case kind:
            body = (" " if kind == "all" else " | ").join(inner)
    name = f"r{len(rules)}"
    rules.append(f"{name}: {body}")
    return name


def many(count: int) -> settings:
    return settings(
        max_examples=count,
        deadline=None,
        derandomize=True,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )


@many(100)
@given(NODES)
def test_patterns(node: Node) -> None:
    answers = BYTES.answers(grammar_of(Regex(pattern(node), "pattern")), SEEDS, MOST)
    assert answers
    for text in answers:
        assert re.fullmatch(pattern(node), text), text


@many(50)
@given(NODES)
def test_grammars(node: Node) -> None:
    rules: list[str] = []
    source = "\n".join([f"start: {lark(node, rules)}", *rules])
    answers = BYTES.answers(grammar_of(Grammar(source, "lark", "grammar")), SEEDS, MOST)
    assert answers
    for text in answers:
        assert re.fullmatch(pattern(node), text), (source, text)


SCHEMAS: tuple[dict[str, Any], ...] = (
    {"type": "object", "properties": {"a": {"type": "integer"}}, "additionalProperties": False},
    {"enum": ["</t>", "<t>", {"a": [None]}]},
    {"type": "array", "items": {"type": "boolean"}, "maxItems": 2},
    {"type": "string", "maxLength": 5},
)
TAGS = st.lists(
    st.tuples(st.sampled_from(["<t>", "<t=b>", "<tool:"]), st.sampled_from(SCHEMAS)),
    min_size=1,
    max_size=3,
    unique_by=lambda tag: tag[0],
).map(lambda tags: tuple(Tag(begin, schema, "</t>") for begin, schema in tags))


def after_tag(tags: tuple[Tag, ...], text: str) -> str:
    """What follows the tag that the text begins with; its value is valid."""
    tag = next(tag for tag in tags if text.startswith(tag.begin))
    value, stop = json.JSONDecoder().raw_decode(text[len(tag.begin) :])
    assert Draft202012Validator(tag.schema).is_valid(value), text
    rest = text[len(tag.begin) + stop :]
    assert rest.startswith(tag.end), text
    return rest[len(tag.end) :]


@many(40)
@given(TAGS)
def test_tags(tags: tuple[Tag, ...]) -> None:
    grammar = grammar_of(StructuralTag(tags, ("<t",), "tags"))
    answers = BYTES.answers(grammar, SEEDS, MOST, begin="see <t")
    assert answers
    for text in answers:
        rest = text
        while "<t" in rest:
            rest = after_tag(tags, rest[rest.index("<t") :])
