"""Patterns, grammars and structural tags, made and with their readers in Python."""

import json
import re
from typing import Any, NamedTuple

from hypothesis import strategies as st
from jsonschema import Draft202012Validator

from loraplex.router.shape.shape import Tag


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


def lark_source(node: Node) -> str:
    rules: list[str] = []
    return "\n".join([f"start: {lark(node, rules)}", *rules])


SCHEMAS: tuple[dict[str, Any], ...] = (
    {"type": "object", "properties": {"a": {"type": "integer"}}, "additionalProperties": False},
    {"enum": ["</t>", "<t>", {"a": [None]}]},
    {"type": "array", "items": {"type": "boolean"}, "maxItems": 2},
    {"type": "string", "maxLength": 5},
)


def made_tags(trigger: str) -> st.SearchStrategy[tuple[Tag, ...]]:
    return st.lists(
        st.tuples(st.sampled_from([">", "=b>", "ool:"]), st.sampled_from(SCHEMAS)),
        min_size=1,
        max_size=3,
        unique_by=lambda tag: tag[0],
    ).map(lambda tags: tuple(Tag(trigger + rest, schema, "</t>") for rest, schema in tags))


def after_tag(tags: tuple[Tag, ...], text: str) -> str:
    """What follows the tag that the text begins with; its value is valid."""
    tag = next(tag for tag in tags if text.startswith(tag.begin))
    value, stop = json.JSONDecoder().raw_decode(text[len(tag.begin) :])
    assert Draft202012Validator(tag.schema).is_valid(value), text
    rest = text[len(tag.begin) + stop :]
    assert rest.startswith(tag.end), text
    return rest[len(tag.end) :]


def check_tags(tags: tuple[Tag, ...], trigger: str, text: str) -> int:
    """Whether each trigger outside of tags begins one; how many tags there are."""
    count, rest = 0, text
    while trigger in rest:
        rest = after_tag(tags, rest[rest.index(trigger) :])
        count += 1
    return count
