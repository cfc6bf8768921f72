"""Messages as a chat template reads them, the caller's options for rendering, and the token with
which a template closes an assistant's turn. Pure.

For that token conversations with known words are rendered. The end is the added token right behind
the answer, apart from white space, whether the answer is the last turn or not. A token that the
template also writes inside an assistant's turn, as between reasoning and answer, ends nothing.
Turns that call tools are not looked at: a model that ends those otherwise names that token in its
files.
"""

import json
from collections.abc import Collection, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import msgspec

from loraplex.adapters.common.strict_json import StrictJsonError, decode_object

Message = dict[str, Any]
FaultCause = Literal["template_error", "unsupported", "invalid"]
NoContent = Literal["absent", "null", "empty", "part"]
Verbosity = Literal["low", "medium", "high"]
ReasoningEffort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]
# Other roles are a template's own affair.
USUAL_ROLES = ("system", "developer", "user", "assistant", "tool")
# Other servers' names of an assistant's reasoning. What callers send has the first.
REASONING: tuple[str, ...] = ("reasoning_content", "thinking", "reasoning")
DEFAULT_TEMPLATE = "default"
TOOL_TEMPLATE = "tool_use"
# Where transformers keeps the default and the others, `NAME.jinja`.
TEMPLATE_FILE = "chat_template.jinja"
TEMPLATE_FOLDER = "additional_chat_templates"
# Variables by which templates turn reasoning on and off.
_SWITCHES = ("enable_thinking", "thinking")
# What a template gets by other ways than the caller's variables.
_RESERVED = {
    "messages": "`messages`",
    "tools": "`tools`",
    "documents": "`documents`",
    "add_generation_prompt": "`add_generation_prompt`",
    "continue_final_message": "`continue_final_message`",
    "chat_template": "`chat_template`",
}

_QUESTION, _ANSWER, _REASONING = "Xqzasked", "Xqzsaid", "Xqzthought"
_ASKED: Message = {"role": "user", "content": _QUESTION}
_SAID: Message = {"role": "assistant", "content": _ANSWER}


class TemplateFault(Exception):
    """A template that cannot be compiled, or that refuses or cannot render these messages.

    cause, param: of the error that the caller gets, and the field it names.
    """

    def __init__(
        self, message: str, cause: FaultCause = "template_error", param: str = "messages"
    ) -> None:
        super().__init__(message)
        self.cause: FaultCause = cause
        self.param = param


class MessageForm(msgspec.Struct, frozen=True):
    """The form in which a template reads messages. The default is transformers' form.

    lists: roles whose content may be a list of parts; elsewhere the texts are joined by line
    breaks. only_lists: roles whose content may not be text; a text becomes one part.
    no_content: what stands for null content beside tool calls: nothing, null, an empty text, or a
    list of one part that is empty. empty_text: an empty text there is
    read, too; else it is null. arguments: of tool calls, an object or its JSON text.
    developer: the role is known; else it is `system`. reasoning: the name that it is read by.
    """

    lists: tuple[str, ...] = ()
    only_lists: tuple[str, ...] = ()
    no_content: NoContent = "absent"
    empty_text: bool = True
    arguments: Literal["object", "text"] = "object"
    developer: bool = False
    reasoning: str | None = None

    def __str__(self) -> str:
        """Describes the form in words for a person."""
        content = "text"
        if self.lists:
            content += f", or lists of parts ({', '.join(self.lists)})"
        if self.only_lists:
            content += f", lists alone ({', '.join(self.only_lists)})"
        return (
            f"content as {content}; beside tool calls {self.no_content}; arguments as "
            f"{self.arguments}; developer {'kept' if self.developer else 'as system'}; "
            f"reasoning {'as ' + self.reasoning if self.reasoning else 'not read'}"
        )


class TemplateOptions(msgspec.Struct, frozen=True):
    """A caller's wishes for the rendering of its messages.

    continue_final_message: the prompt ends within the last message, right after its text.
    documents, tools: None = none. template: a name of the template list; None = by transformers'
    rule.
    variables: further ones of the template. in_loop: tools were offered, be it that this prompt has
    none: calls and results are among the messages.
    From effort on: hints, variables that need not be read. How much the model shall reason; whether
    it shall at all; for how many tokens; how much it shall say.
    """

    add_generation_prompt: bool = True
    continue_final_message: bool = False
    documents: list[dict[str, Any]] | None = None
    tools: list[dict[str, Any]] | None = None
    template: str | None = None
    variables: dict[str, Any] = {}
    in_loop: bool = False
    effort: ReasoningEffort | None = None
    thinks: bool | None = None
    thinking_budget: int | None = None
    verbosity: Verbosity | None = None


class Rendered(msgspec.Struct, frozen=True, array_like=True):
    """A prompt. has_default_text: of tools. unbound: hints that the template does not read,
    by their fields in a chat."""

    text: str
    has_default_text: bool = False
    unbound: tuple[str, ...] = ()


DEFAULT_OPTIONS = TemplateOptions()


def shaped(messages: Collection[Mapping[str, Any]], form: MessageForm) -> list[Message]:
    """Messages in the form that a template reads. messages: `role`, `content` (text, parts of type
    `text` or `image`, or None) and, where there are any, `name`, `tool_call_id`, `tool_calls`
    (arguments as text or object) and `reasoning_content`. Raises TemplateFault for pictures where
    the template reads texts alone.
    """
    return [_shaped(message, form) for message in messages]


def listed_templates(value: object) -> dict[str, str]:
    """Reads templates by name from a `chat_template` in JSON; other values are left out.

    The value is one source, a list of {name, template}, or an object of sources by name. One source
    gets the name DEFAULT_TEMPLATE.
    """
    if isinstance(value, str):
        return {DEFAULT_TEMPLATE: value}
    if isinstance(value, dict):
        named = list(value.items())
    else:
        entries = value if isinstance(value, list) else []
        named = [(t.get("name"), t.get("template")) for t in entries if isinstance(t, dict)]
    return {name: text for name, text in named if isinstance(name, str) and isinstance(text, str)}


def choose_template(names: Collection[str], asked: str | None, has_tools: bool = False) -> str:
    """The name of the template to use, as transformers chooses. Raises TemplateFault."""
    known = ", ".join(sorted(names))
    if asked is not None:
        if asked in names:
            return asked
        message = f"`chat_template`: expected the name of a template ({known}), and no source"
        raise TemplateFault(message, "unsupported", "chat_template")
    if has_tools and TOOL_TEMPLATE in names:
        return TOOL_TEMPLATE
    if DEFAULT_TEMPLATE in names:
        return DEFAULT_TEMPLATE
    message = f"`chat_template`: there is no default; name one of {known}"
    raise TemplateFault(message, "invalid", "chat_template")


def check_variables(variables: Collection[str], special_tokens: Collection[str]) -> None:
    """Refuses names that a template gets from elsewhere. Raises TemplateFault."""
    for name in variables:
        instead = _RESERVED.get(name)
        if instead is not None or name in special_tokens:
            hint = f"use the field {instead}" if instead else "it is the tokenizer's own"
            param = f"chat_template_kwargs.{name}"
            raise TemplateFault(f"`{param}`: cannot be replaced; {hint}", "invalid", param)


class Hints(msgspec.Struct, frozen=True):
    """A caller's hints about reasoning and length, as variables of a template.

    variables: by which a template gets the hints. unbound: fields of those that it does not read.
    """

    variables: dict[str, Any]
    unbound: tuple[str, ...]


def read_hints(options: TemplateOptions, read: Collection[str]) -> Hints:
    """A caller's hints as a template's variables. read: its names. Raises TemplateFault."""
    said = _hints(options)
    for field, given in said.items():
        for name, value in given.items():
            if options.variables.get(name, value) != value:
                param = f"chat_template_kwargs.{name}"
                message = f"`{param}`: contradicts `{field}`"
                raise TemplateFault(message, "invalid", param)
    unbound = [field for field, given in said.items() if not any(name in read for name in given)]
    # Without reasoning, and at the usual length, a template need not know of it.
    needless = {
        "reasoning_effort": options.effort == "none",
        "thinking": options.thinks is False,
        "verbosity": options.verbosity == "medium",
    }
    variables = {name: value for given in said.values() for name, value in given.items()}
    return Hints(variables, tuple(field for field in unbound if not needless.get(field)))


def _hints(options: TemplateOptions) -> dict[str, dict[str, Any]]:
    """Lists for each field of a chat the variables that pass it to a template."""
    effort, found = options.effort, dict[str, dict[str, Any]]()
    if effort is not None:
        off = dict.fromkeys(_SWITCHES, False) if effort == "none" else {}
        found["reasoning_effort"] = {"reasoning_effort": effort, **off}
    if options.thinks is not None:
        found["thinking"] = dict.fromkeys(_SWITCHES, options.thinks)
    if options.thinking_budget is not None:
        found["thinking.budget_tokens"] = {"thinking_budget": options.thinking_budget}
    if options.verbosity is not None:
        found["verbosity"] = {"verbosity": options.verbosity}
    return found


def _shaped(message: Mapping[str, Any], form: MessageForm) -> Message:
    role = message["role"]
    if role == "developer" and not form.developer:
        role = "system"
    plain: Message = {"role": role}
    content, calls = message["content"], message.get("tool_calls")
    if calls and (content is None or (content == "" and not form.empty_text)):
        plain |= _no_content(role, form)
    else:
        plain["content"] = _content(content, role, form)
    plain |= {name: message[name] for name in ("name", "tool_call_id") if name in message}
    if form.reasoning is not None and "reasoning_content" in message:
        plain[form.reasoning] = message["reasoning_content"]
    if calls:
        plain["tool_calls"] = [_call(call, form) for call in calls]
    return plain


def _no_content(role: str, form: MessageForm) -> Message:
    if form.no_content == "absent":
        return {}
    if form.no_content == "null":
        return {"content": None}
    if form.no_content == "part":
        return {"content": [{"type": "text", "text": ""}]}
    return {"content": _content("", role, form)}


def _content(content: str | list[dict[str, Any]], role: str, form: MessageForm) -> Any:
    role = role if role in USUAL_ROLES else "user"
    if not isinstance(content, str):
        if role in form.lists:
            return content
        if any(part["type"] == "image" for part in content):
            message = f"the chat template reads no images in messages of the role {role!r}"
            raise TemplateFault(message, "unsupported")
        content = "\n".join(part["text"] for part in content)
    return [{"type": "text", "text": content}] if role in form.only_lists else content


def _call(call: Mapping[str, Any], form: MessageForm) -> dict[str, Any]:
    function = call["function"]
    arguments = function["arguments"]
    if form.arguments == "object":
        arguments = _as_object(arguments)
    elif not isinstance(arguments, str):
        arguments = json.dumps(arguments, ensure_ascii=False)
    return {**call, "function": {**function, "arguments": arguments}}


def _as_object(arguments: str | dict[str, Any]) -> str | dict[str, Any]:
    """A call's arguments as an object; text that spells none stays. No text: an empty one."""
    if not isinstance(arguments, str):
        return arguments
    if not arguments.strip():
        return {}
    try:
        found = decode_object(arguments.encode())
        msgspec.json.encode(found)  # JSON can hold lone surrogates; frames cannot
    except (StrictJsonError, UnicodeEncodeError):
        return arguments
    return found


class Probe(NamedTuple):
    """A conversation to render."""

    messages: tuple[Message, ...]
    options: TemplateOptions = TemplateOptions(add_generation_prompt=False)


# What a prompt ends with; then the last turn, one before another, and one with reasoning.
PROBES: tuple[Probe, ...] = (
    Probe((_ASKED,), TemplateOptions()),
    Probe((_ASKED, _SAID)),
    Probe((_ASKED, _SAID, {"role": "user", "content": "Xqznext"})),
    Probe((_ASKED, {**_SAID, "reasoning_content": _REASONING})),
)


def turn_ends(rendered: Sequence[str | None], added: Mapping[str, int]) -> tuple[int, ...]:
    """Ids of the tokens that close an assistant's turn, ascending.

    rendered: what the template made of each of PROBES, None where it refused. added: the added
    tokens of the tokenizer, text -> id.
    """
    tokens = {text: i for text, i in added.items() if text.strip()}
    ends: set[str] = set()
    inside: set[str] = set()
    prompt, *answered = (_after(text or "", _QUESTION) for text in rendered)
    for turn in answered:
        if prompt is None or turn is None or _ANSWER not in turn:
            continue
        before, _, behind = turn.rpartition(_ANSWER)
        ends.update(_leading(behind.lstrip(), tokens))
        given = _common(prompt, before)
        inside.update(t for t in tokens if t in before and before.rfind(t) + len(t) > given)
    return tuple(sorted(tokens[text] for text in ends - inside))


def _after(text: str, word: str) -> str | None:
    head, found, tail = text.partition(word)
    return tail if found else None


def _leading(text: str, tokens: Mapping[str, int]) -> list[str]:
    """The longest token that the text begins with, if it begins with one."""
    found = [token for token in tokens if text.startswith(token)]
    return [max(found, key=len)] if found else []


def _common(one: str, other: str) -> int:
    """Characters that both begin with."""
    return next(
        (i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b),
        min(len(one), len(other)),
    )
