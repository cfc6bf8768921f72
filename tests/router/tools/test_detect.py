"""What a template writes shows the format of its calls; an unknown template shows none."""

from pathlib import Path

import pytest

from loraplex.router.tools.registry import detect

TEMPLATES = Path(__file__).parents[2] / "adapters" / "chat" / "templates"
_TAGS = (
    '<tool_call>\\n{\\"name\\": <function-name>, \\"arguments\\": <args-json-object>}'
    "\\n</tool_call>"
)

# What the templates of these models write.
SOURCES = {
    "Qwen 3": (f'{{{{- "...return a json object:\\n{_TAGS}" }}}}', "hermes"),
    "Hermes 3": (f"{{{{ '<tools>' }}}}{_TAGS}", "hermes"),
    "Granite 4": ("<|start_of_role|>system<|end_of_role|>" + _TAGS, "hermes"),
    "Granite 3": ("{{ '<|start_of_role|>tools<|end_of_role|>' + tools | tojson }}", "granite"),
    "Qwen3-Coder": (
        "{{ '<tool_call>\\n<function=' + call.name + '>\\n<parameter=' + k + '>' }}</tool_call>",
        "qwen3_coder",
    ),
    "Seed-OSS": ("<seed:tool_call>\\n<function=f>\\n<parameter=a></function>", None),
    "GLM 4.5": (
        "<tool_call>{function-name}\\n<arg_key>{k}</arg_key>\\n<arg_value>{v}</arg_value></tool_call>",
        "glm",
    ),
    "keys alone": ('<tool_call>{"name": 1, "arguments": 2}<arg_key>k</arg_key></tool_call>', None),
    "Llama 3.1": (
        '{{ \'Respond in the format {"name": function name, "parameters": dictionary of\' }}',
        "llama3_json",
    ),
    "Llama 3.1 with built-in tools": (
        "{{ '<|python_tag|>' }}{{ '\"parameters\": ' + arguments }}",
        "llama3_json",
    ),
    "Llama 3.2 pythonic": ("{{ 'in the format [func_name1(params_name1=1), f(x)]' }}", "pythonic"),
    "Llama 3 custom": (
        "<function=example_function_name>{{ parameters }}</function>",
        "functionary",
    ),
    "Functionary 3.2": (
        "{{ '>>>all\\n' + m['content'] }}{{ '>>>' + tool_call['function']['name'] + '\\n' }}",
        "functionary_v3",
    ),
    "Mistral 7B v0.3": ("{{ '[TOOL_CALLS] [' + call | tojson }}", "mistral_list"),
    "Mistral Small 3.2": ("{{ '[TOOL_CALLS]' + name + '[ARGS]' + arguments }}", "mistral"),
    "Mistral with ids": (
        "{{ '[TOOL_CALLS]' + name + '[CALL_ID]' + id + '[ARGS]' }}",
        "mistral_ids",
    ),
    "DeepSeek V3": (
        "{{'<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>' + type + '<｜tool▁sep｜>' + name}}```json",
        "deepseek_v3",
    ),
    "DeepSeek V3.1": (
        "{{'<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>' + name + '<｜tool▁sep｜>' + arguments}}",
        "deepseek_v31",
    ),
    "Phi-4-mini": ("{{ '<|tool|>' + m['tools'] + '<|/tool|>' }}", "phi4_mini"),
    "Phi-4-mini of vLLM": ('as functools[{"name": [function name]}]', "phi4_mini"),
    "OLMo 3": ("within <function_calls></function_calls> tags{{ m.function_calls }}", "olmo3"),
    "no tools": ("{{ m.content }}", None),
    "text of tools": ("{{ tools | tojson }}{{ m.tool_calls | tojson }}", None),
}


@pytest.mark.parametrize(("source", "name"), SOURCES.values(), ids=SOURCES)
def test_a_template_shows_its_format(source: str, name: str | None) -> None:
    found = detect(source)
    assert (found and found.name) == name


@pytest.mark.parametrize(
    ("file", "name"),
    [
        ("channels", "harmony"),
        ("turns", None),
        ("documents", None),
        ("tags", None),
        ("kept_thoughts", "glm"),
        ("last_thoughts", "hermes"),
        ("tool_tags", "hermes"),
        ("ids_of_nine", "mistral_list"),
    ],
)
def test_whole_templates_show_theirs(file: str, name: str | None) -> None:
    found = detect((TEMPLATES / f"{file}.jinja").read_text())
    assert (found and found.name) == name
