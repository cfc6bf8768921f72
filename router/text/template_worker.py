"""The process that renders tenants' chat templates: limits on itself first, then one at a time.

It gives up memory, files, processes and all but a little processor time before it reads a question:
a RenderJob in msgpack, answered by a RenderOutcome.
"""

from typing import Any

import msgspec

from loraplex.adapters.chat.conversation import (
    FaultCause,
    MessageForm,
    Rendered,
    TemplateFault,
    TemplateOptions,
)
from loraplex.adapters.chat.template import ChatTemplate
from loraplex.adapters.common.newest import NewestKept
from loraplex.adapters.helpers.answering import answer_questions, limit_self, read_frame

CPU_SECONDS = 1.0
MEMORY_BYTES = 512 << 20
_KEPT_TEMPLATES = 16

_Templates = NewestKept[tuple[str, tuple[tuple[str, str], ...]], ChatTemplate]


class RenderJob(msgspec.Struct, frozen=True, array_like=True):
    """Work of a process: render `source` over messages; None = say which form it reads."""

    source: str
    special_tokens: dict[str, str]
    messages: list[dict[str, Any]] | None
    options: TemplateOptions


class RenderOutcome(msgspec.Struct, frozen=True, array_like=True):
    """A prompt or form, or why there is none: fault, with its cause and field."""

    prompt: Rendered | None = None
    form: MessageForm | None = None
    fault: str | None = None
    cause: FaultCause = "template_error"
    param: str = "messages"


def main() -> None:
    read_frame()
    _warm_up()
    limit_self(MEMORY_BYTES)
    decode = msgspec.msgpack.Decoder(RenderJob).decode
    templates = _Templates(_KEPT_TEMPLATES)

    def answer(question: bytes) -> bytes:
        return msgspec.msgpack.encode(_render(templates, decode(question)))

    answer_questions(answer, CPU_SECONDS)


def _warm_up() -> None:
    """Uses what a template may need once. Python, Jinja and the C library load parts when first
    used; later no file can be opened.
    """
    usual = "{{ 'a\\n' | tojson }}{{ strftime_now('%d %b %Y') }}{{ messages | length }}"
    for source in (usual, "{{ 1 / 0 }}", "{% if %}", "{{ '\\ud800' }}"):
        messages = [{"role": "user", "content": "ü"}]
        _render(_Templates(1), RenderJob(source, {}, messages, TemplateOptions()))


def _render(templates: _Templates, job: RenderJob) -> RenderOutcome:
    try:
        key = (job.source, tuple(sorted(job.special_tokens.items())))
        template = templates.get(key)
        if template is None:
            template = templates[key] = ChatTemplate(job.source, job.special_tokens)
        if job.messages is None:
            return RenderOutcome(form=template.form)
        return RenderOutcome(template.written(job.messages, job.options))
    except TemplateFault as fault:
        return RenderOutcome(fault=str(fault), cause=fault.cause, param=fault.param)
    except OSError as error:
        why = f"the chat template asked for what is out of reach: {error.strerror}"
        return RenderOutcome(fault=why)
