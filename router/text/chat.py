"""Chat templates: Jinja source and messages to a prompt, in the sandbox that transformers uses.

The sandbox keeps a template from reaching Python's internals; it does not bound time or memory, so
templates that tenants bring are rendered by `router.text.template_sandbox` only.
"""

import json
from collections.abc import Sequence
from datetime import datetime
from typing import Any

from jinja2 import TemplateError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

MAX_TEMPLATE_CHARS = 1 << 17
MAX_OUTPUT_CHARS = 16 << 20
_MAX_REASON_CHARS = 500
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


class TemplateFault(Exception):
    """A template that cannot be compiled, or that refuses or cannot render these messages."""


class _GenerationTag(Extension):
    """`{% generation %}…{% endgeneration %}` marks the answer for training; here it is its body."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class ChatTemplate:
    """One compiled template. Raises TemplateFault."""

    def __init__(self, source: str, special_tokens: dict[str, str]) -> None:
        if len(source) > MAX_TEMPLATE_CHARS:
            raise TemplateFault(
                f"the chat template has {len(source)} characters, at most {MAX_TEMPLATE_CHARS} are "
                "allowed"
            )
        self._special_tokens = special_tokens
        try:
            self._template = _environment().from_string(source)
        except _FAULTS as fault:
            raise TemplateFault(f"the chat template cannot be compiled: {_reason(fault)}") from None

    def render(self, messages: Sequence[dict[str, Any]], variables: dict[str, Any]) -> str:
        """The prompt, up to where the answer begins.

        variables: the caller's own; they cannot replace the special tokens or `messages`.
        """
        context = {
            "tools": None,
            "documents": None,
            "add_generation_prompt": True,
            **variables,
            **self._special_tokens,
            "messages": list(messages),
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
    """Jinja's own filter escapes HTML, which no model was trained on."""
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
