"""The protocol of a format of tool calls. Pure."""

from typing import Protocol

from loraplex.router.parts.parts import PartsReader
from loraplex.router.shape.lark import Lark
from loraplex.router.tools.tools import Tools


class ToolFormat(Protocol):
    """How a family of models writes calls of tools."""

    @property
    def name(self) -> str: ...

    @property
    def markers(self) -> tuple[str, ...]:
        """Texts that may be special tokens; the reader needs to see them."""
        ...

    @property
    def short_ids(self) -> bool:
        """Whether the ids of calls have nine letters or digits: templates refuse longer ones."""
        ...

    def reader(self, tools: Tools) -> PartsReader:
        """Divides an answer into text and calls. What names no tool that may be called is text.

        Arguments come as JSON text. Those of a call that breaks off stay as the model wrote them.
        """
        ...

    def rules(self, tools: Tools, lark: Lark) -> str:
        """Answers in the native form, as an expression.

        auto: text and calls mix; the arguments of a call are an object, and keep to the schema of
        a strict tool. required: calls alone, all of which keep to their schemas. The schemas must
        be ones that the engine honours exactly.
        """
        ...
