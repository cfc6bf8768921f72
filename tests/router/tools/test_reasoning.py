"""Reasoning is split from the answer wherever the text is cut."""

import pytest

from loraplex.router.parts.division import DividedAnswer, Division
from loraplex.router.parts.parts import ToolCall
from loraplex.router.parts.reasoning import REASONING, detect_reasoning
from loraplex.router.tools.registry import FORMATS
from loraplex.router.tools.tools import Tool, Tools
from tests.router.tools.call_reading import Reading, read_cut_anywhere

# family, whether the prompt opened the reasoning, the answer, its reasoning, its text
CASES = [
    ("think", False, "<think>\nHm.\n\nYes.\n</think>\n\nIt is 4.", "Hm.\n\nYes.", "It is 4."),
    ("think", True, "Hm.\n</think>\n\n  It is 4.\n", "Hm.", "  It is 4.\n"),
    ("think", True, "<think>Hm.</think>It is 4.", "Hm.", "It is 4."),
    ("think", True, "\n  Hm.</think>It", "  Hm.", "It"),
    ("think", False, "\n <think>a</think>b", "a", "b"),
    ("think", False, "It is <think>4</think>.", "", "It is <think>4</think>."),
    ("think", False, "  <thin", "", "  <thin"),
    ("think", False, "\n4", "", "\n4"),
    ("think", False, "", "", ""),
    ("think", True, "It is", "It is", ""),
    ("think", True, "It is\n\n", "It is\n\n", ""),
    ("think", False, "<think>It is </thin", "It is </thin", ""),
    ("think", False, "<think></think>\n\nx</think>y", "", "x</think>y"),
    ("think", True, "a </think </think>b", "a </think ", "b"),
    ("mistral", False, "[THINK]a[1][/THINK][2]", "a[1]", "[2]"),
    (
        "granite",
        False,
        "Here's my thought process: Add.\n\nHere is my response:\n4",
        " Add.",
        "4",
    ),
    ("granite", False, "Here is my answer: 4", "", "Here is my answer: 4"),
    ("seed", False, "<seed:think>ä😀</seed:think>ö", "ä😀", "ö"),
    ("cohere", False, "<|START_THINKING|>a<|END_THINKING|>b", "a", "b"),
    ("response", False, "<think>a</think>\n<response>\n4\n</response>", "a", "4"),
    ("response", False, "<think>a</think>4</response>", "a", "4</response>"),
    ("response", False, "<think>a</think><response>4 </resp", "a", "4 </resp"),
    ("response", False, "<response>4</response>", "", "<response>4</response>"),
    (
        "channels",
        False,
        "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>final<|message|>4\n",
        "Hm.",
        "4\n",
    ),
    ("channels", False, "<|channel|>final<|message|>It is <|x|>", "", "It is <|x|>"),
    ("channels", True, "Hm.<|end|><|start|>assistant<|channel|>final<|message|>4", "Hm.", "4"),
    ("channels", False, "<|channel|>analysis<|message|>a<|start|>assistant<|channel|>fin", "a", ""),
    ("channels", False, "Plain.", "", "Plain."),
    (
        "channels",
        False,
        "<|channel|>analysis<|message|>a<|end|><|start|>assistant<|channel|>commentary<|message|>b"
        "<|end|><|start|>assistant<|channel|>analysis<|message|>c<|end|><|start|>assistant"
        "<|channel|>commentary to=functions.f <|constrain|>json<|message|>{}<|call|>",
        "ac",
        "b<|start|>assistant<|channel|>commentary to=functions.f <|constrain|>json<|message|>{}"
        "<|call|>",
    ),
    (
        "channels",
        False,
        " to=functions.f<|channel|>commentary json<|message|>{}<|call|>",
        "",
        " to=functions.f<|channel|>commentary json<|message|>{}<|call|>",
    ),
]


@pytest.mark.parametrize(("family", "begun", "answer", "reasoning", "text"), CASES)
def test_an_answer_is_split_wherever_it_is_cut(
    family: str, begun: bool, answer: str, reasoning: str, text: str
) -> None:
    found = read_cut_anywhere(lambda: REASONING[family].reader(begun), answer)
    assert found == Reading(text, reasoning, ())


def test_reasoning_comes_as_it_is_written() -> None:
    reader = REASONING["think"].reader()
    assert reader.feed("<think>\nOne, ").reasoning == "One, "
    assert reader.feed("two</th").reasoning == "two"
    assert reader.feed("ink>\n\n4").text == "4"


@pytest.mark.parametrize(
    ("prompt", "begun"),
    [
        ("<|im_start|>assistant\n<think>\n", True),
        ("<｜Assistant｜><think>", True),
        ("<|im_start|>assistant\n<think>\n\n</think>\n\n", False),
        ("<|im_start|>assistant\n", False),
    ],
)
def test_a_prompt_may_open_the_reasoning(prompt: str, begun: bool) -> None:
    assert REASONING["think"].begun(prompt) is begun


@pytest.mark.parametrize(
    ("source", "name"),
    [
        ("{{ m.content.split('</think>')[-1] }}", "think"),
        ("{{ '[THINK]' + m.reasoning + '[/THINK]' }}", "mistral"),
        ("{{ m.content }}", None),
    ],
)
def test_a_template_says_how_its_model_reasons(source: str, name: str | None) -> None:
    found = detect_reasoning(source)
    assert (found and found.name) == name


def test_calls_are_read_in_what_follows_the_reasoning() -> None:
    call = '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>'
    tools = Tools((Tool("f"),))
    division = Division(
        (lambda: REASONING["think"].reader(True), lambda: FORMATS["hermes"].reader(tools))
    )
    text = f"Should I say {call}? Yes.\n</think>\n\nSo:\n{call}"
    for pieces in ([text], text, *([text[:i], text[i:]] for i in range(1, len(text)))):
        answer = DividedAnswer(division, lambda: "id")
        said = "".join(answer.feed(piece, is_last=False).text for piece in pieces)
        assert said + answer.feed("", is_last=True).text == "So:"
        assert answer.reasoning == f"Should I say {call}? Yes."
        assert answer.calls == (ToolCall("id", "f", '{"a": 1}'),)


def test_messages_in_channels_are_reasoning_text_and_calls() -> None:
    turn = "<|start|>assistant"
    text = (
        f"<|channel|>analysis<|message|>Look it up.<|end|>{turn}"
        f"<|channel|>commentary<|message|>One moment.<|end|>{turn}"
        '<|channel|>commentary to=functions.f <|constrain|>json<|message|>{"a": 1}<|call|>'
    )
    tools = Tools((Tool("f"),))
    division = Division(
        (lambda: REASONING["channels"].reader(), lambda: FORMATS["harmony"].reader(tools))
    )
    for pieces in ([text], text, *([text[:i], text[i:]] for i in range(1, len(text)))):
        answer = DividedAnswer(division, lambda: "id")
        said = "".join(answer.feed(piece, is_last=False).text for piece in pieces)
        assert said + answer.feed("", is_last=True).text == "One moment."
        assert answer.reasoning == "Look it up."
        assert answer.calls == (ToolCall("id", "f", '{"a": 1}'),)


def test_a_template_of_channels_is_no_other_one() -> None:
    """`<|end|>` ends turns of Phi, too."""
    granite = "<think></think> and <response></response>{{ m.content.split('</think>')[1] }}"
    assert detect_reasoning(granite) is REASONING["response"]
    phi = "{{ '<|user|>' + m.content + '<|end|>' }}"
    channels = "{{ '<|start|>assistant<|channel|>analysis<|message|>' + m.thinking + '<|end|>' }}"
    assert detect_reasoning(phi) is None
    assert detect_reasoning(channels) is REASONING["channels"]
