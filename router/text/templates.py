"""The chat templates of a base model, compiled from its card."""

from collections.abc import Collection, Mapping
from typing import Any

from loraplex.adapters.chat.conversation import (
    DEFAULT_OPTIONS,
    MessageForm,
    Rendered,
    TemplateFault,
    TemplateOptions,
    choose_template,
)
from loraplex.adapters.chat.template import ChatTemplate
from loraplex.router.call import RequestError
from loraplex.server.protocol import ModelCard


def template_error(fault: TemplateFault) -> RequestError:
    """The error that a caller gets."""
    return RequestError(fault.cause, str(fault), param=fault.param)


class BaseTemplates:
    """The base's chat templates by name. faults: why some fail, which fails their chats alone."""

    def __init__(self, card: ModelCard) -> None:
        self._model = card.names[0]
        self._templates: dict[str, ChatTemplate] = {}
        self.faults: dict[str, str] = {}
        for name, source in card.all_templates.items():
            form = card.message_forms.get(name)
            try:
                self._templates[name] = ChatTemplate(source, card.special_tokens, form)
            except TemplateFault as fault:
                self.faults[name] = str(fault)

    def __len__(self) -> int:
        """Counts the templates that can be used."""
        return len(self._templates)

    @property
    def forms(self) -> dict[str, MessageForm]:
        """How each template reads messages."""
        return {name: template.form for name, template in self._templates.items()}

    def render(
        self, messages: Collection[Mapping[str, Any]], options: TemplateOptions = DEFAULT_OPTIONS
    ) -> Rendered:
        """The prompt. messages: as `shaped` takes them. Raises RequestError (template_error,
        unsupported, invalid)."""
        if not self._templates and not self.faults:
            raise RequestError(
                "unsupported", f"{self._model} has no chat template: use /v1/completions"
            )
        try:
            names = self._templates.keys() | self.faults
            name = choose_template(names, options.template, options.tools is not None)
            if name in self.faults:
                raise TemplateFault(self.faults[name])
            return self._templates[name].written(messages, options)
        except TemplateFault as fault:
            raise template_error(fault) from fault
