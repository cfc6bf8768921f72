"""A line of a batch's input to a request, or to what is wrong with it. Pure."""

from typing import Any

import msgspec

from loraplex.router.api.operations import OPERATIONS
from loraplex.router.call import BASE_PLACEHOLDERS

MAX_LINE_BYTES = 64 << 20
# What callers may post, where the answer can be whole.
PATHS = tuple(
    operation.path
    for operation in OPERATIONS
    if operation.method == "post"
    and operation.requests
    and operation.answers
    and not operation.admin
    and operation.in_batches
)
# msgspec's, and Python's for JSON that is nested too deeply.
_UNREADABLE = (msgspec.MsgspecError, RecursionError, UnicodeDecodeError)
_MOST_SHOWN = 80


class LineRules(msgspec.Struct, frozen=True):
    """Rules for lines. paths: of routes that lines may ask. max_lines: None = no limit."""

    paths: tuple[str, ...] = PATHS
    max_bytes: int = MAX_LINE_BYTES
    max_lines: int | None = None


ANY_ROUTE = LineRules()


class BatchRequest(msgspec.Struct, frozen=True):
    """The request that a line holds. body: as it stands in the line. adapter: what it names, in its
    words; "" = the base. rows: sequences that it asks for.
    """

    custom_id: str
    path: str
    body: bytes
    adapter: str
    rows: int = 1


class BadLine(msgspec.Struct, frozen=True):
    """A line that no server is asked about. custom_id: if it could be read."""

    code: str
    message: str
    custom_id: str | None = None


class _Line(msgspec.Struct):
    custom_id: Any = None
    method: Any = None
    url: Any = None
    body: msgspec.Raw = msgspec.Raw()


class _Body(msgspec.Struct):
    """The fields by which the APIs name adapters, ask for streams, and for several sequences."""

    model: Any = None
    adapter_id: Any = None
    lora_path: Any = None
    merged_adapters: Any = None
    parameters: Any = None
    stream: Any = None
    n: Any = None
    best_of: Any = None
    prompt: Any = None
    text: Any = None
    input: Any = None


_decode_line = msgspec.json.Decoder(_Line).decode
_decode_body = msgspec.json.Decoder(_Body).decode


def read_line(line: bytes, rules: LineRules = ANY_ROUTE) -> BatchRequest | BadLine:
    """Reads a line's request, or says what is wrong with the line. line: without its end."""
    if len(line) > rules.max_bytes:
        return BadLine("line_too_long", f"the line has more than {rules.max_bytes} bytes")
    try:
        said = _decode_line(line)
    except _UNREADABLE as error:
        return BadLine("invalid_json", f"the line is no JSON object of a request: {error}")
    if not isinstance(said.custom_id, str) or not said.custom_id:
        return BadLine("missing_custom_id", "custom_id must be a text that is not empty")
    if said.method != "POST":
        message = f"method must be POST, got {_shown(said.method)}"
        return BadLine("invalid_method", message, said.custom_id)
    if said.url not in rules.paths:
        message = f"url must be one of {', '.join(rules.paths)}; got {_shown(said.url)}"
        return BadLine("invalid_url", message, said.custom_id)
    return _with_body(said)


def _with_body(said: _Line) -> BatchRequest | BadLine:
    content = bytes(said.body)
    try:
        body = _decode_body(content)
    except _UNREADABLE as error:
        return BadLine("invalid_body", f"body must be a JSON object: {error}", said.custom_id)
    if body.stream is True:
        message = "an answer of a batch is whole: leave stream out"
        return BadLine("stream_not_supported", message, said.custom_id)
    return BatchRequest(said.custom_id, said.url, content, _adapter_of(body), _rows_of(body))


def _adapter_of(body: _Body) -> str:
    parameters = body.parameters if isinstance(body.parameters, dict) else {}
    merged = parameters.get("merged_adapters") or body.merged_adapters
    if isinstance(merged, dict):
        return msgspec.json.encode(merged, order="sorted").decode()
    named = (parameters.get("adapter_id"), body.lora_path, body.adapter_id, body.model)
    names = (name for name in named if isinstance(name, str) and name not in BASE_PLACEHOLDERS)
    return next(names, "")


def _rows_of(body: _Body) -> int:
    """Counts the sequences that a body asks for, as far as is known without the route. A list of
    texts is a sequence for each."""
    parameters = body.parameters if isinstance(body.parameters, dict) else {}
    counts = (body.n, body.best_of, parameters.get("best_of"))
    each = max((count for count in counts if type(count) is int), default=1)
    prompts = max(map(_texts_in, (body.prompt, body.text, body.input)))
    return max(1, each) * prompts


def _texts_in(field: Any) -> int:
    """Lists of token ids and of items are one."""
    if not isinstance(field, list) or not field:
        return 1
    return len(field) if isinstance(field[0], str | list) else 1


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= _MOST_SHOWN else f"{text[:_MOST_SHOWN]}…"
