"""Whole answers as llguidance reads them: reasoning, then calls or a form."""

from typing import Any

import pytest

from loraplex.router.parts.reasoning import REASONING
from loraplex.router.shape.shape import (
    AnyJson,
    Choice,
    Grammar,
    JsonSchema,
    Shape,
    StructuralTag,
    Tag,
)
from loraplex.router.tools.compose import Frame, compose
from loraplex.router.tools.formats.glm import GLM
from loraplex.router.tools.formats.harmony import HARMONY
from loraplex.router.tools.registry import HERMES
from loraplex.router.tools.tools import Tool, ToolMode, Tools
from loraplex.server.protocol import NamesOnce
from tests.router.shape.test_rules import accepts

PLACE = Tool(
    "place",
    parameters={
        "type": "object",
        "properties": {"n": {"type": "integer"}},
        "required": ["n"],
        "additionalProperties": False,
    },
)
ANY = Tool("any", parameters={"type": "object", "properties": {"n": {"type": "integer"}}})
YES = Choice(("yes",), "p")
THINK = REASONING["think"]


def call(name: str, arguments: str = '{"n": 1}') -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


@pytest.mark.parametrize("shape", [YES, Grammar('start: "yes"', "lark", "p")])
@pytest.mark.parametrize(
    ("begun", "text", "is_accepted"),
    [
        (False, "yes", True),
        (False, "<think>\nso yes\n</think>\n\nyes", True),
        (False, "<think></think>yes", True),
        (False, "<think>so", False),
        (False, "so</think>yes", False),
        (False, "<think>so</think>no", False),
        (True, "so\n</think>\n\nyes", True),
        (True, "yes", False),
        (True, "so</think>", False),
    ],
)
def test_reasoning_comes_before_the_form(
    shape: Shape, begun: bool, text: str, is_accepted: bool
) -> None:
    assert accepts(compose(shape, Frame(THINK, begun)).grammar, text) is is_accepted


@pytest.mark.parametrize(
    ("mode", "shape", "text", "is_accepted"),
    [
        ("required", None, call("place"), True),
        ("required", None, f"{call('place')}\n{call('any')}", True),
        ("required", None, f"<think>so</think>\n\n{call('place')}", True),
        ("required", None, "text", False),
        ("required", None, call("place", '{"n": "x"}'), False),
        ("required", None, call("other"), False),
        ("required", YES, "yes", False),
        ("required", YES, call("place"), True),
        ("auto", None, f"text {call('any')} text", True),
        ("auto", None, call("other"), False),
        ("auto", YES, "yes", True),
        ("auto", YES, "<think>so</think>yes", True),
        ("auto", YES, call("any", '{"n": "x"}'), True),
        ("auto", YES, f"<think>so</think>{call('any')}", True),
        ("auto", YES, f"text {call('any')}", False),
        ("auto", YES, "no", False),
    ],
)
def test_calls(mode: ToolMode, shape: Shape | None, text: str, is_accepted: bool) -> None:
    frame = Frame(THINK, False, Tools((PLACE, ANY), mode), HERMES)
    assert accepts(compose(shape, frame).grammar, text) is is_accepted


OPEN, CLOSED = {"type": "object"}, {"type": "object", "additionalProperties": False}
SHORT = {"type": "object", "propertyNames": {"maxLength": 2}}
TAGS = (Tag("<a>", OPEN, "</a>"), Tag("<b>", CLOSED, "</b>"))
HARMONY_CALL = ("json<|message|>",)


@pytest.mark.parametrize(
    ("shape", "frame", "names_once"),
    [
        (AnyJson("p"), Frame(), NamesOnce(("{", "["))),
        (JsonSchema(CLOSED, "p"), Frame(), None),
        (JsonSchema(SHORT, "p"), Frame(), NamesOnce(("{", "["), run_out=True)),
        (YES, Frame(), None),
        (StructuralTag(TAGS, ("<",), "p"), Frame(), NamesOnce(("<a>", "<b>"))),
        (AnyJson("p"), Frame(THINK), NamesOnce(("{", "["), "<think>", "</think>")),
        (AnyJson("p"), Frame(THINK, begun=True), NamesOnce(("{", "["), "", "</think>")),
        (None, Frame(tools=Tools((ANY,)), tool_format=HARMONY), NamesOnce(HARMONY_CALL)),
        (None, Frame(tools=Tools((PLACE,), "required"), tool_format=HARMONY), None),
        (YES, Frame(tools=Tools((ANY,)), tool_format=HERMES), NamesOnce(("<tool_call>",))),
        (AnyJson("p"), Frame(tools=Tools((ANY,)), tool_format=GLM), None),
    ],
)
def test_where_names_are_free(shape: Shape, frame: Frame, names_once: NamesOnce | None) -> None:
    assert compose(shape, frame).names_once == names_once


def test_one_call_where_one_was_named() -> None:
    tools = Tools((PLACE, ANY), "required", ("place",), named=True, parallel=False)
    grammar = compose(None, Frame(tools=tools, tool_format=HERMES)).grammar
    assert accepts(grammar, call("place"))
    assert not accepts(grammar, call("any"))
    assert not accepts(grammar, f"{call('place')}\n{call('place')}")


_THOUGHT = "<|channel|>analysis<|message|>so<|end|><|start|>assistant"
_SAID = "<|channel|>final<|message|>"
_CALLED = "<|channel|>commentary to=functions.place <|constrain|>json<|message|>"


@pytest.mark.parametrize(
    ("mode", "shape", "text", "is_accepted"),
    [
        (None, YES, f"{_SAID}yes", True),
        (None, YES, f"{_THOUGHT}{_SAID}yes", True),
        (None, YES, "yes", False),
        (None, YES, f"{_THOUGHT}yes", False),
        (None, YES, f"{_SAID}no", False),
        ("required", None, f'{_THOUGHT}{_CALLED}{{"n": 1}}<|call|>', True),
        ("required", None, f'{_CALLED}{{"n": 1}}', True),
        ("required", None, f"{_SAID}text", False),
        ("required", None, f'{_CALLED}{{"n": "x"}}', False),
        ("auto", None, f"{_THOUGHT}{_SAID}text", True),
        ("auto", YES, f"{_THOUGHT}{_SAID}yes", True),
        ("auto", YES, f'{_CALLED}{{"n": 1}}', True),
        ("auto", YES, f"{_SAID}no", False),
    ],
)
def test_messages_in_channels(
    mode: ToolMode | None, shape: Shape | None, text: str, is_accepted: bool
) -> None:
    tools = None if mode is None else Tools((PLACE, ANY), mode)
    frame = Frame(REASONING["channels"], False, tools, None if tools is None else HARMONY)
    assert accepts(compose(shape, frame).grammar, text) is is_accepted


@pytest.mark.parametrize(
    ("text", "is_accepted"),
    [
        ("yes", True),
        ("<think>so</think>\n<response>yes</response>", True),
        ("<think>so</think><response>yes", True),
        ("<think>so</think>yes", False),
        ("<think>so</think><response>no</response>", False),
    ],
)
def test_answers_between_tags(text: str, is_accepted: bool) -> None:
    assert accepts(compose(YES, Frame(REASONING["response"])).grammar, text) is is_accepted


TICKET: dict[str, Any] = {
    "type": "object",
    "properties": {"id": {"type": "integer"}, "note": {"type": "string"}},
    "required": ["id"],
    "additionalProperties": False,
}


@pytest.mark.parametrize(
    ("of_all", "of_id", "of_note"),
    [
        ({"strict": True, "propertyOrdering": ["note", "id"]}, {"format": "uint32"}, {"order": 1}),
        ({"name": "Ticket", "ui:order": ["*"]}, {"format": "int32"}, {"ui:widget": "textarea"}),
        ({"x-go-type": "Ticket"}, {"optional": True}, {"format": "password", "placeholder": "…"}),
        ({"title": "T"}, {"format": "double"}, {"format": "uri-reference", "writeOnly": True}),
    ],
)
def test_annotations_bind_nothing(
    of_all: dict[str, Any], of_id: dict[str, Any], of_note: dict[str, Any]
) -> None:
    """As OpenAPI, schemars, forms and other providers write them; in tools, too."""
    fields = TICKET["properties"]
    properties = {"id": fields["id"] | of_id, "note": fields["note"] | of_note}
    annotated = TICKET | of_all | {"properties": properties}
    assert compose(JsonSchema(annotated, "p")) == compose(JsonSchema(TICKET, "p"))
    plain, noted = (
        compose(None, Frame(tools=Tools((tool,), "required"), tool_format=HERMES))
        for tool in (Tool("f", parameters=TICKET), Tool("f", parameters=annotated))
    )
    assert noted == plain


@pytest.mark.parametrize(
    ("keyword", "value"),
    [
        ("pattern", "^(?!draft).*$"),
        ("not", {"pattern": "(?<=a)b"}),
        ("nullable", True),
        ("minLength", "2"),
        ("required", True),
    ],
)
def test_tools_that_are_not_strict_bind_what_can_be_held(keyword: str, value: Any) -> None:
    """One such tool of a long list does not fail the request."""
    schema = TICKET | {"properties": {"id": {"type": "string", keyword: value}}}
    tools = Tools((Tool("f", parameters=schema), PLACE), "required")
    grammar = compose(None, Frame(tools=tools, tool_format=HERMES)).grammar
    assert accepts(grammar, call("f", '{"id": "ab"}'))
    assert not accepts(grammar, call("place", '{"n": "x"}'))
