"""Calls as Hermes and Qwen write them."""

import pytest

from loraplex.router.tools.registry import FORMATS
from loraplex.router.tools.tools import Tool, Tools
from tests.router.tools.call_reading import Reading, read_cut_anywhere

TOOLS = Tools((Tool("find"), Tool("send"), Tool("other")), callable=("find", "send"))


def call(name: str, arguments: str) -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


HARD = '{"a": "</tool_call> {\\"}\\\\", "b": [{"ä": "😀"}, -1.5e3, null], "c": {}}'
CASES = {
    "one": (call("find", HARD), "", [("find", HARD)]),
    "several": (
        f"Well.\n{call('find', '{}')}\n{call('send', HARD)}",
        "Well.",
        [("find", "{}"), ("send", HARD)],
    ),
    "text around": (f"a\n{call('find', '{}')}\nb", "a\nb", [("find", "{}")]),
    "two in one": (
        '<tool_call>{"name":"find","arguments":{}}\n{"name":"send","arguments":{}}</tool_call>',
        "",
        [("find", "{}"), ("send", "{}")],
    ),
    "arguments before the name": (
        '<tool_call>{"id": 1, "arguments": {"a": "x\ny"}, "name": "find"}</tool_call>',
        "",
        [("find", '{"a": "x\\ny"}')],
    ),
    "no arguments": ('<tool_call>{"name": "find"}</tool_call>', "", [("find", "{}")]),
    "a line break within a string": (
        call("find", '{"a": "x\ny"}'),
        "",
        [("find", '{"a": "x\\ny"}')],
    ),
    "arguments as a string": (
        call("find", '"{\\"a\\": \\"\\\\u00e4\\ud83d\\ude00\\"}"'),
        "",
        [("find", '{"a": "\\u00e4😀"}')],
    ),
    "a brace is missing": (
        '<tool_call>\n{"name": "find", "arguments": {"a": 1}\n</tool_call>',
        "",
        [("find", '{"a": 1}')],
    ),
    "cut off": ('x <tool_call>{"name": "find", "arguments": {"a": "b', "x", [("find", '{"a": "b')]),
    "broken arguments": (
        '<tool_call>{"name": "find", "arguments": {"a": tru}}</tool_call> x',
        "x",
        [("find", '{"a": tru}}')],
    ),
}


@pytest.mark.parametrize(("answer", "text", "calls"), CASES.values(), ids=CASES)
def test_calls_are_read_wherever_the_answer_is_cut(
    answer: str, text: str, calls: list[tuple[str, str]]
) -> None:
    found = read_cut_anywhere(lambda: FORMATS["hermes"].reader(TOOLS), answer)
    assert found == Reading(text, "", tuple(calls))


@pytest.mark.parametrize(
    "answer",
    [
        call("other", "{}"),
        call("unknown", "{}"),
        "<tool_call>",
        "<tool_call>\n{",
        '<tool_call>{"name": "find", "arguments": [1]}</tool_call>',
        '<tool_call>{"name": find}</tool_call>',
        '<tool_call>{"arguments": {}}</tool_call>',
        "  Use <tool_call> to call.\n\n",
        "<tool_call",
    ],
)
def test_what_is_no_call_is_text(answer: str) -> None:
    found = read_cut_anywhere(lambda: FORMATS["hermes"].reader(TOOLS), answer)
    assert found == Reading(answer, "", ())


def test_a_call_comes_as_it_is_written() -> None:
    reader = FORMATS["hermes"].reader(TOOLS)
    assert reader.feed('Hm <tool_call>{"name": "find", "arg').text == "Hm"
    first = reader.feed('uments": {"a": "long').calls
    assert [(delta.name, delta.arguments) for delta in first] == [
        ("find", ""),
        (None, '{"a": "long'),
    ]
    assert reader.feed(" text").calls[0].arguments == " text"
