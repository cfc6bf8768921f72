"""Llama 3.1 and 3.2. Pure."""

from loraplex.router.tools.formats.json_calls import JsonCalls

# {"name": …, "parameters": {…}}; {…}
LLAMA3_JSON = JsonCalls(
    "llama3_json",
    ("<|python_tag|>",),
    bare=True,
    between=";",
    arguments_key="parameters",
)
