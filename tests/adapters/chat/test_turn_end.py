"""What a chat template closes an assistant's turn with, over templates of the kinds in use."""

from typing import NamedTuple

import pytest
from hypothesis import strategies as st

from loraplex.adapters.chat.conversation import PROBES, Probe, TemplateFault, turn_ends
from loraplex.adapters.chat.template import ChatTemplate
from tests.grids import examples


class Kind(NamedTuple):
    """tokens: all added tokens of the tokenizer. ends: those that close an assistant's turn."""

    template: str
    tokens: tuple[str, ...]
    ends: set[str]
    special: dict[str, str] = {}


_EACH = "{% for m in messages %}"
_PROMPT = "{% if add_generation_prompt %}"
_PLAIN_ROLES = "<|user|>", "<|assistant|>", "<|system|>"
_S = {"bos_token": "<s>", "eos_token": "</s>"}
_CHATML = (
    _EACH + "{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>' + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
_IM = "<|im_start|>", "<|im_end|>", "<|endoftext|>"

KINDS: dict[str, Kind] = {
    "ChatML": Kind(_CHATML, _IM, {"<|im_end|>"}),
    "ChatML whose end is an added token that is no special one": Kind(
        _CHATML, ("<|im_end|>", " ", "\n\n"), {"<|im_end|>"}
    ),
    "ChatML written with the tokens of another tokenizer": Kind(_CHATML, ("<s>", "</s>"), set()),
    "Qwen 3: reasoning of the last turn": Kind(
        _EACH + "<|im_start|>{{ m.role }}\n{% if m.reasoning_content and loop.last %}<think>\n"
        "{{ m.reasoning_content }}\n</think>\n\n{% elif m.role == 'assistant' and loop.last %}"
        "<think>\n\n</think>\n\n{% endif %}{{ m.content }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}",
        (*_IM, "<think>", "</think>"),
        {"<|im_end|>"},
    ),
    "Llama 3: header, and another end where code is called": Kind(
        "{{ bos_token }}"
        + _EACH
        + "<|start_header_id|>{{ m.role }}<|end_header_id|>\n\n{{ m.content | trim }}"
        "{% if m.tool_calls %}<|eom_id|>{% else %}<|eot_id|>{% endif %}{% endfor %}"
        + _PROMPT
        + "<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}",
        ("<|eot_id|>", "<|eom_id|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>x"),
        {"<|eot_id|>"},
        {"bos_token": "<|begin_of_text|>"},
    ),
    "Llama 4": Kind(
        _EACH + "<|header_start|>{{ m.role }}<|header_end|>\n\n{% if m.content is string %}"
        "{{ m.content }}{% else %}{% for p in m.content %}{{ p.text }}{% endfor %}{% endif %}"
        "<|eot|>{% endfor %}" + _PROMPT + "<|header_start|>assistant<|header_end|>\n\n{% endif %}",
        ("<|eot|>", "<|header_start|>", "<|header_end|>"),
        {"<|eot|>"},
    ),
    "Llama 2: a space before the end": Kind(
        _EACH + "{% if m.role == 'user' %}{{ bos_token + '[INST] ' + m.content + ' [/INST]' }}"
        "{% else %}{{ ' ' + m.content + ' ' + eos_token }}{% endif %}{% endfor %}",
        ("<s>", "</s>"),
        {"</s>"},
        _S,
    ),
    "Mistral: refuses roles that do not alternate, marks are tokens": Kind(
        "{{ bos_token }}" + _EACH + "{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
        "{{ raise_exception('roles must alternate') }}{% endif %}{% if m.role == 'user' %}"
        "[INST]{{ m.content }}[/INST]{% else %}{{ m.content + eos_token }}{% endif %}{% endfor %}",
        ("<s>", "</s>", "[INST]", "[/INST]"),
        {"</s>"},
        _S,
    ),
    "Gemma: the assistant is the model": Kind(
        "{{ bos_token }}"
        + _EACH
        + "<start_of_turn>{{ 'model' if m.role == 'assistant' else m.role }}"
        "\n{{ m.content | trim }}<end_of_turn>\n{% endfor %}"
        + _PROMPT
        + "<start_of_turn>model\n{% endif %}",
        ("<bos>", "<start_of_turn>", "<end_of_turn>"),
        {"<end_of_turn>"},
        {"bos_token": "<bos>"},
    ),
    "Phi 3: the end of the text behind the last turn": Kind(
        _EACH
        + "<|{{ m.role }}|>\n{{ m.content }}<|end|>\n{% endfor %}"
        + _PROMPT
        + "<|assistant|>\n{% else %}{{ eos_token }}{% endif %}",
        ("<|end|>", "<|endoftext|>", *_PLAIN_ROLES),
        {"<|end|>"},
        {"eos_token": "<|endoftext|>"},
    ),
    "Zephyr": Kind(
        _EACH
        + "{{ '<|' + m.role + '|>\n' + m.content + eos_token }}\n{% endfor %}"
        + _PROMPT
        + "{{ '<|assistant|>\n' }}{% endif %}",
        ("</s>",),
        {"</s>"},
        _S,
    ),
    "Vicuna: words alone": Kind(
        _EACH
        + "{{ m.role | upper }}: {{ m.content }}\n{% endfor %}"
        + _PROMPT
        + "ASSISTANT:{% endif %}",
        ("<s>", "</s>"),
        set(),
        _S,
    ),
    "Alpaca: words, and the end of the text": Kind(
        _EACH + "### {{ 'Instruction' if m.role == 'user' else 'Response' }}:\n{{ m.content }}"
        "{% if m.role == 'assistant' %}{{ eos_token }}{% endif %}\n\n{% endfor %}"
        + _PROMPT
        + "### Response:\n{% endif %}",
        ("<s>", "</s>"),
        {"</s>"},
        _S,
    ),
    "DeepSeek: white space within tokens' names": Kind(
        "{{ bos_token }}" + _EACH + "{% if m.role == 'user' %}<｜User｜>{{ m.content }}{% else %}"
        "<｜Assistant｜>{{ m.content }}<｜end▁of▁sentence｜>{% endif %}{% endfor %}"
        + _PROMPT
        + "<｜Assistant｜><think>\n{% endif %}",
        ("<｜User｜>", "<｜Assistant｜>", "<｜end▁of▁sentence｜>", "<think>", "</think>"),
        {"<｜end▁of▁sentence｜>"},
    ),
    "GLM: the next speaker's mark is the end": Kind(
        "[gMASK]<sop>"
        + _EACH
        + "<|{{ m.role }}|>\n{{ m.content }}{% endfor %}"
        + _PROMPT
        + "<|assistant|>{% endif %}",
        (*_PLAIN_ROLES, "[gMASK]", "<sop>"),
        {"<|user|>"},
    ),
    "one mark opens every turn, the model's own included": Kind(
        _EACH + "<|turn|>{{ m.role }}: {{ m.content }}{% endfor %}", ("<|turn|>",), set()
    ),
    "the end stands between turns alone": Kind(
        "{{ bos_token }}" + _EACH + "{% if m.role == 'assistant' %}<|assistant|>{% else %}<|user|>"
        "{% endif %}{{ m.content }}{% if not loop.last %}</s>{% endif %}{% endfor %}"
        + _PROMPT
        + "</s><|assistant|>{% endif %}",
        ("<s>", "</s>", "<|user|>", "<|assistant|>"),
        {"</s>"},
        _S,
    ),
    "Harmony: the end of a message is not that of a turn": Kind(
        _EACH + "{% if m.role == 'user' %}<|start|>user<|message|>{{ m.content }}<|end|>{% else %}"
        "{% if m.thinking and loop.last %}<|start|>assistant<|channel|>analysis<|message|>"
        "{{ m.thinking }}<|end|>{% endif %}<|start|>assistant<|channel|>final<|message|>"
        "{{ m.content }}{{ '<|return|>' if loop.last else '<|end|>' }}{% endif %}{% endfor %}"
        + _PROMPT
        + "<|start|>assistant{% endif %}",
        ("<|start|>", "<|message|>", "<|channel|>", "<|end|>", "<|return|>"),
        {"<|return|>"},
    ),
    "Command R: upper case": Kind(
        "<BOS_TOKEN>"
        + _EACH
        + "<|START_OF_TURN_TOKEN|>{{ '<|CHATBOT_TOKEN|>' if m.role == 'assistant'"
        " else '<|USER_TOKEN|>' }}{{ m.content }}<|END_OF_TURN_TOKEN|>{% endfor %}"
        + _PROMPT
        + "<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>{% endif %}",
        ("<BOS_TOKEN>", "<|START_OF_TURN_TOKEN|>", "<|END_OF_TURN_TOKEN|>", "<|CHATBOT_TOKEN|>"),
        {"<|END_OF_TURN_TOKEN|>"},
    ),
    "reads lists of parts alone": Kind(
        _EACH + "<|im_start|>{{ m.role }}\n{% for p in m.content %}{{ p['text'] }}{% endfor %}"
        "<|im_end|>\n{% endfor %}" + _PROMPT + "<|im_start|>assistant\n{% endif %}",
        _IM,
        {"<|im_end|>"},
    ),
    "words before the end": Kind(
        _EACH + "{{ m.content }} THE END<|end|>{% endfor %}", ("<|end|>",), set()
    ),
    "the longer of two tokens": Kind(
        _EACH + "<u>{{ m.content }}<e><e>{% endfor %}", ("<u>", "<e>", "<e><e>"), {"<e><e>"}
    ),
    "refuses everything": Kind("{{ raise_exception('no') }}", ("</s>",), set()),
    "leaves the question out": Kind("{{ messages[-1].content }}</s>", ("</s>",), set()),
    "is no template": Kind("{% if %}", ("</s>",), set()),
}


def rendered(template: str, special: dict[str, str]) -> list[str | None]:
    def one(probe: Probe) -> str | None:
        try:
            return ChatTemplate(template, special).render(probe.messages, probe.options)
        except TemplateFault:
            return None

    return [one(probe) for probe in PROBES]


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS.keys())
def test_kinds(kind: Kind) -> None:
    added = {text: 10 + i for i, text in enumerate(kind.tokens)}
    found = turn_ends(rendered(kind.template, kind.special), added)
    assert found == tuple(sorted(added[text] for text in kind.ends))


MARKS = st.sampled_from(["<a>", "<b>", "<c>", "x", "\n", " ", "<b><c>"])
PIECES = st.lists(MARKS, max_size=3).map("".join)


@examples(40, 100, PIECES, PIECES, PIECES, st.booleans())
def test_an_end_stands_behind_the_answer_and_nowhere_in_what_the_model_writes(
    before: str, behind: str, opening: str, is_given: bool
) -> None:
    """before: what opens the assistant's turn. is_given: the prompt has it, not the model."""
    asked, said = f"U{{{{ m.content }}}}{opening}", f"{before}{{{{ m.content }}}}{behind}"
    turns = f"{{% if m.role == 'user' %}}{asked}{{% else %}}{said}{{% endif %}}{{% endfor %}}"
    prompt = f"{_PROMPT}{before if is_given else ''}{{% endif %}}"
    added = {"<a>": 1, "<b>": 2, "<c>": 3, "<b><c>": 4, "\n": 5}
    texts = {i: text for text, i in added.items()}
    ends = turn_ends(rendered(_EACH + turns + prompt, {}), added)
    for end in ends:
        assert behind.lstrip().startswith(texts[end])
        assert is_given or texts[end] not in before
    leads = [text for text in added if text.strip() and behind.lstrip().startswith(text)]
    opened, lead = opening + before, max(leads, key=len, default="")
    # What opens the turn may make one token with what the model writes before its answer.
    is_written = lead in opened and opened.rfind(lead) + len(lead) > len(opening)
    assert bool(ends) == bool(leads and (is_given or not is_written))
