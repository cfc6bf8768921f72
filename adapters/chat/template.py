"""Chat templates: Jinja source and messages to a prompt, in the sandbox that transformers uses.

The sandbox keeps a template from reaching Python's internals. It does not bound time or memory, so
only `loraplex.router.text.template_sandbox` renders templates of tenants.
"""

import json
from collections.abc import Collection, Iterable, Mapping, Sequence
from datetime import datetime
from functools import cached_property
from itertools import groupby
from typing import Any

import msgspec
from jinja2 import TemplateError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from loraplex.adapters.chat.conversation import (
    DEFAULT_OPTIONS,
    USUAL_ROLES,
    Message,
    MessageForm,
    Rendered,
    TemplateFault,
    TemplateOptions,
    check_variables,
    read_hints,
    shaped,
)
from loraplex.adapters.chat.probes import find_form, reads_system

_TEXT = """\
# Tools

You may call the functions below. Each line is one of them as JSON: its name, what it does, and \
the schema of its arguments.

{tools}

A call is a JSON object with the function's name and its arguments, between two marks:

<tool_call>
{{"name": "the function's name", "arguments": {{"an argument": "its value"}}}}
</tool_call>

Several calls stand one after another. Their results come between <tool_response> and \
</tool_response>. Where no function helps, answer in words."""
_SYSTEM = ("system", "developer")
_Content = str | list[dict[str, Any]] | None
MAX_TEMPLATE_CHARS = 1 << 17
MAX_OUTPUT_CHARS = 16 << 20
_MAX_REASON_CHARS = 500
# Ends the text of a final message that is continued. A template that trims takes the space.
_END = "END-OF-THE-FINAL-MESSAGE "
# What a template can raise besides Jinja's own: it computes with the caller's values.
_FAULTS = (
    TemplateError,
    ArithmeticError,
    AttributeError,
    LookupError,
    MemoryError,
    RecursionError,
    SyntaxError,  # blocks nested deeper than Python's own may be
    TypeError,
    ValueError,
)


class _GenerationTag(Extension):
    """`{% generation %}…{% endgeneration %}` marks the answer for training; here it is its body."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body).set_lineno(line)


class ChatTemplate:
    """One compiled template. form: how it reads messages; None = found out when first needed.

    Raises TemplateFault.
    """

    def __init__(
        self, source: str, special_tokens: dict[str, str], form: MessageForm | None = None
    ) -> None:
        if len(source) > MAX_TEMPLATE_CHARS:
            raise TemplateFault(
                f"the chat template has {len(source)} characters, at most {MAX_TEMPLATE_CHARS} are "
                "allowed"
            )
        self._source = source
        self._special_tokens = special_tokens
        try:
            self._template = _environment().from_string(source)
        except _FAULTS as fault:
            raise TemplateFault(f"the chat template cannot be compiled: {_reason(fault)}") from None
        if form is not None:
            self.form = form

    @cached_property
    def form(self) -> MessageForm:
        """The form in which the template reads messages."""
        return find_form(self._probe, self._literals)

    @cached_property
    def variables(self) -> frozenset[str]:
        """Names that the template reads."""
        found = self._syntax.find_all(nodes.Name)
        return frozenset(node.name for node in found if node.ctx == "load")

    def render(
        self, messages: Collection[Mapping[str, Any]], options: TemplateOptions = DEFAULT_OPTIONS
    ) -> str:
        """The prompt's text. messages: as `shaped` takes them."""
        return self.written(messages, options).text

    def written(
        self, messages: Collection[Mapping[str, Any]], options: TemplateOptions = DEFAULT_OPTIONS
    ) -> Rendered:
        """The prompt. messages: as `shaped` takes them."""
        check_variables(options.variables, self._special_tokens)
        if options.documents is not None and "documents" not in self.variables:
            message = "`documents`: the chat template does not read any"
            raise TemplateFault(message, "unsupported", "documents")
        hints = read_hints(options, self.variables)
        tools = None if "tools" in self.variables else options.tools
        variables = hints.variables | options.variables
        if tools is not None or (options.in_loop and "tools" not in self.variables):
            messages = described(messages, tools, self._reads_system)
            options = msgspec.structs.replace(options, tools=None)
        options = msgspec.structs.replace(options, variables=variables)
        return Rendered(self._ended(messages, options), tools is not None, hints.unbound)

    def _ended(self, messages: Collection[Mapping[str, Any]], options: TemplateOptions) -> str:
        """The text, up to where the answer begins."""
        ready = shaped(messages, self.form)
        if not options.continue_final_message:
            text = self._write_tools(ready, options)
            _check_roles(messages, text)
            return text
        if options.add_generation_prompt:
            raise _not_continued("`add_generation_prompt` must be false")
        final = _open_end(ready)
        text = _cut_at_end(self._write_tools(ready, options), final)
        _check_roles(messages, text)
        return text

    def _write_tools(self, messages: list[Message], options: TemplateOptions) -> str:
        """Writes the text with tools as they came. Where the template needs what a tool leaves
        out, an empty one stands there."""
        try:
            return self._write(messages, options)
        except TemplateFault:
            tools = [_filled(tool) for tool in options.tools or ()]
            if tools == (options.tools or []):
                raise
            return self._write(messages, msgspec.structs.replace(options, tools=tools))

    @cached_property
    def _reads_system(self) -> bool:
        return reads_system(self._probe, self.form)

    @cached_property
    def _syntax(self) -> nodes.Template:
        return _environment().parse(self._source)

    @cached_property
    def _literals(self) -> frozenset[str]:
        """Texts that the template's code compares with, or looks up."""
        constants = {node.value for node in self._syntax.find_all(nodes.Const)}
        attributes = {node.attr for node in self._syntax.find_all(nodes.Getattr)}
        return frozenset(text for text in constants | attributes if isinstance(text, str))

    def _probe(self, messages: list[Message], variables: dict[str, Any]) -> str | None:
        """Renders the template; None = it fails. variables: `tools`, too."""
        try:
            return self._write(messages, TemplateOptions(variables=variables))
        except TemplateFault:
            return None

    def _write(self, messages: list[Message], options: TemplateOptions) -> str:
        context = {
            "tools": options.tools,
            "documents": options.documents,
            "add_generation_prompt": options.add_generation_prompt,
            **options.variables,
            **self._special_tokens,
            "messages": messages,
        }
        pieces = []
        size = 0
        try:
            for piece in self._template.generate(context):
                size += len(piece)
                if size > MAX_OUTPUT_CHARS:
                    raise TemplateFault(
                        f"the chat template wrote more than {MAX_OUTPUT_CHARS} characters"
                    )
                pieces.append(piece)
            return _well_formed("".join(pieces))
        except _FAULTS as fault:
            raise TemplateFault(f"the chat template failed: {_reason(fault)}") from None


def _check_roles(messages: Collection[Mapping[str, Any]], text: str) -> None:
    """Checks that a text has the messages of roles that templates need not know. Raises
    TemplateFault.
    """
    at = 0
    for message in messages:
        if message["role"] in USUAL_ROLES:
            continue
        for part in _parts(message["content"]):
            sought = part.get("text", "").strip()
            found = text.find(sought, at)
            if found < 0:
                role = message["role"]
                why = f"the chat template writes no messages of the role {role!r} as they are"
                raise TemplateFault(why, "unsupported")
            at = found + len(sought)


def _filled(tool: dict[str, Any]) -> dict[str, Any]:
    """Adds an empty description, and the schema of no parameters, to a tool that has none."""
    function = tool["function"]
    text = function.get("description") or ""
    schema = function.get("parameters") or {"type": "object", "properties": {}}
    return {**tool, "function": {**function, "description": text, "parameters": schema}}


def _open_end(messages: list[Message]) -> str:
    """Marks where the text of the final message ends; returns the text."""
    content = messages[-1].get("content")
    if isinstance(content, str):
        messages[-1]["content"] = content + _END
        return content
    if not content:
        raise _not_continued("the final message has no text")
    if content[-1]["type"] != "text":
        raise _not_continued("the final message does not end in a text")
    text: str = content[-1]["text"]
    messages[-1]["content"] = [*content[:-1], {**content[-1], "text": text + _END}]
    return text


def _cut_at_end(prompt: str, final: str) -> str:
    """Cuts the prompt as transformers does, trimmed where the template trims the final text."""
    end = prompt.rfind(_END.strip())
    if end < 0 or final.strip() not in prompt:
        raise _not_continued("the chat template does not write the final message's text as it is")
    is_trimmed = not prompt.startswith(_END, end)
    return prompt[:end].rstrip() if is_trimmed else prompt[:end]


def _not_continued(why: str) -> TemplateFault:
    message = f"`continue_final_message`: {why}"
    return TemplateFault(message, "invalid", "continue_final_message")


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Replaces Jinja's filter `tojson`, which escapes HTML: no model was trained on that."""
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


def _raise_exception(message: object) -> None:
    raise TemplateError(str(message))


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)


def _well_formed(text: str) -> str:
    text.encode()  # a template can write lone surrogates; a tokenizer cannot read them
    return text


def _reason(fault: BaseException) -> str:
    text = str(fault) or "no reason given"
    if not isinstance(fault, TemplateError):
        text = f"{type(fault).__name__}: {text}"
    return text[:_MAX_REASON_CHARS]


def described(
    messages: Collection[Mapping[str, Any]],
    tools: Sequence[dict[str, Any]] | None,
    reads_system: bool,
) -> list[Message]:
    """Writes tools, calls and results as text, for a template that takes none. messages: as
    `shaped` takes them, without calls and results then. tools: as templates read them; None =
    the text is left out.

    The text ends the system's message, or begins the user's first where the template reads no
    system's, which is put before it.
    """
    plain = _without_calls(messages)
    if not tools:
        return plain
    functions = (json.dumps(tool["function"], ensure_ascii=False) for tool in tools)
    texts: list[_Content] = [_TEXT.format(tools="\n".join(functions))]
    if plain and plain[0]["role"] in _SYSTEM:
        first = plain.pop(0)
        texts.insert(0, first["content"])
        if reads_system:
            return [{**first, "content": _joined(texts)}, *plain]
    if reads_system:
        return [{"role": "system", "content": _joined(texts)}, *plain]
    if plain and plain[0]["role"] == "user":
        first = plain.pop(0)
        return [{**first, "content": _joined([*texts, first["content"]])}, *plain]
    return [{"role": "user", "content": _joined(texts)}, *plain]


def _without_calls(messages: Collection[Mapping[str, Any]]) -> list[Message]:
    """Writes calls and their results as plain messages. Results that stand together, and what the
    user says right behind, are one message."""
    plain: list[Message] = []
    in_results = False
    for message in messages:
        role, content = message["role"], message["content"]
        if role == "tool":
            content = _joined(["<tool_response>\n", content, "\n</tool_response>"], "")
        if in_results and role in ("tool", "user"):
            plain[-1]["content"] = _joined([plain[-1]["content"], "\n", content], "")
        elif role == "tool":
            plain.append({"role": "user", "content": content})
        elif calls := message.get("tool_calls"):
            kept = {name: value for name, value in message.items() if name != "tool_calls"}
            said = _joined([content, *map(_call, calls)], "\n")
            plain.append({**kept, "content": said})
        else:
            plain.append(dict(message))
        in_results = role == "tool" or (in_results and role == "user")
    return plain


def _call(call: Mapping[str, Any]) -> str:
    function = call["function"]
    name, arguments = json.dumps(function["name"], ensure_ascii=False), function["arguments"]
    if not isinstance(arguments, str):
        arguments = json.dumps(arguments, ensure_ascii=False)
    written = f'{{"name": {name}, "arguments": {arguments.strip() or "{}"}}}'
    return f"<tool_call>\n{written}\n</tool_call>"


def _joined(contents: Iterable[_Content], between: str = "\n\n") -> str | list[dict[str, Any]]:
    """Several contents as one, empty ones left out: a text, or parts where there are images."""
    parts: list[dict[str, Any]] = []
    for content in contents:
        own = _parts(content)
        parts += [_text(between), *own] if parts and own else own
    joined: list[dict[str, Any]] = []
    for is_text, group in groupby(parts, lambda part: part["type"] == "text"):
        alike = list(group)
        joined += [_text("".join(part["text"] for part in alike))] if is_text else alike
    has_image = any(part["type"] != "text" for part in joined)
    return joined if has_image else "".join(part["text"] for part in joined)


def _parts(content: _Content) -> list[dict[str, Any]]:
    if isinstance(content, list):
        has_image = any(part["type"] != "text" for part in content)
        return content if has_image else _parts("\n".join(part["text"] for part in content))
    return [_text(content)] if content else []


def _text(text: str) -> dict[str, Any]:
    return {"type": "text", "text": text}
