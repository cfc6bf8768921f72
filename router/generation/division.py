"""How the answers to a call are divided, by the chat template that writes its prompt. Pure."""

from collections.abc import Callable, Collection
from functools import lru_cache, partial

import msgspec

from loraplex.adapters.chat.conversation import choose_template
from loraplex.adapters.manifest import AdapterTemplate
from loraplex.router.call import GenerationCall, RequestError
from loraplex.router.parts.division import Division
from loraplex.router.parts.reasoning import REASONING, Reasoning, detect_reasoning
from loraplex.router.tools.compose import Frame
from loraplex.router.tools.formats.format import ToolFormat
from loraplex.router.tools.registry import DEFAULT, FORMATS, detect
from loraplex.server.protocol import ModelCard

# Of texts, those that are special tokens, with their ids.
SpecialIds = Callable[[Collection[str]], dict[str, int]]

_detected_format = lru_cache(64)(detect)
_detected_reasoning = lru_cache(64)(detect_reasoning)


class PartsOfAnswers(msgspec.Struct, frozen=True):
    """How one call's answers are written. None: no calls, or no reasoning, is looked for."""

    tool_format: ToolFormat | None = None
    reasoning: Reasoning | None = None

    def division(self, call: GenerationCall, prompt: str) -> Division | None:
        """Plans an answer's parts; None = all is text. prompt: what answers go on from."""
        readers, markers, short_ids = [], list[str](), False
        if self.reasoning is not None:
            begun = self.reasoning.begun(prompt)
            readers.append(partial(self.reasoning.reader, begun))
            markers += self.reasoning.markers
        if self.tool_format is not None and call.tools is not None:
            readers.append(partial(self.tool_format.reader, call.tools))
            markers += self.tool_format.markers
            short_ids = self.tool_format.short_ids
        reasons = self.reasoning is not None
        return Division(tuple(readers), frozenset(markers), short_ids, reasons) if readers else None

    def frame(self, call: GenerationCall, prompt: str, special_ids: SpecialIds) -> Frame:
        """The parts of an answer for which a grammar has to leave room."""
        reasoning, tools = self.reasoning, call.tools
        if reasoning is not None and prompt.rstrip().endswith(reasoning.closes):
            reasoning = None
        markers = () if reasoning is None else reasoning.markers
        if self.tool_format is not None and tools is not None:
            markers += self.tool_format.markers
        return Frame(
            reasoning,
            reasoning is not None and reasoning.begun(prompt),
            tools,
            self.tool_format,
            special_ids(markers),
        )


_TEXT_ALONE = PartsOfAnswers()


class AnswerParts(msgspec.Struct, frozen=True):
    """Settings of the operator for the base's answers.

    tool_format, reasoning_format: names; auto = by the template. With the reasoning_format `none`
    reasoning is text.
    """

    tool_format: str = "auto"
    reasoning_format: str = "auto"

    def of(
        self,
        call: GenerationCall,
        card: ModelCard,
        template: AdapterTemplate | None = None,
        adapters_format: str = "",
    ) -> PartsOfAnswers:
        """Finds how the answers to a call are written. template: the adapter's own.
        adapters_format: what its registration says, or the prompt; "" = nothing.

        Raises RequestError (unsupported) where it is not known how the model writes calls.
        """
        if call.messages is None:
            return _TEXT_ALONE
        source, is_base = _source(call, card, template)
        reasoning = self._reasoning(source, is_base) if call.divides_reasoning else None
        if call.tools is None:
            return PartsOfAnswers(None, reasoning)
        found = self._format(source, is_base, adapters_format)
        if found is None and not call.tools.is_demanded:
            message = (
                f"`{call.tools.field}`: the chat template does not tell how the model writes "
                "calls: the router's `--tool-format`, or `tool_format` of an adapter's "
                "registration, does"
            )
            raise RequestError("unsupported", message, param=call.tools.field)
        return PartsOfAnswers(found or DEFAULT, reasoning)

    def _reasoning(self, source: str, is_base: bool) -> Reasoning | None:
        named = self.reasoning_format
        if named == "none":
            return None
        found = _detected_reasoning(source) if named == "auto" or not is_base else None
        return found or REASONING.get(named)

    def _format(self, source: str, is_base: bool, adapters_format: str) -> ToolFormat | None:
        """The format of calls. An adapter's own template goes before an option for the base."""
        if adapters_format in FORMATS:  # another router may know more of them
            return FORMATS[adapters_format]
        named = self.tool_format
        found = _detected_format(source) if named == "auto" or not is_base else None
        return found or FORMATS.get(named)


def _source(
    call: GenerationCall, card: ModelCard, template: AdapterTemplate | None
) -> tuple[str, bool]:
    """The template that writes the prompt; whether it is the base's, which trainers save too."""
    bases = card.all_templates
    sources = bases if template is None else template.sources
    options = call.template
    source = sources[choose_template(sources, options.template, options.tools is not None)]
    return source, template is None or source in bases.values()
