"""Tools that a caller offers the model. Pure."""

from typing import Any, Literal

import msgspec

# auto: text and calls may mix. required: at least one call, and nothing else.
ToolMode = Literal["none", "auto", "required"]


class Tool(msgspec.Struct, frozen=True):
    """A function that a model may call. parameters: a JSON schema of an object; None = no
    arguments. strict: the arguments of a call keep to the schema; else they are JSON of any form
    where the format allows it. place: of the schema in the body. unheld: what the caller says of
    its form there binds nothing.
    """

    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool = False
    place: str = "tools"
    unheld: bool = False


class Tools(msgspec.Struct, frozen=True):
    """The tools of a request, and how they may be called. offered: what the template shows the
    model. callable: names that may be called, () = all.

    named: the caller named one function, which must be called once. parallel: several calls.
    """

    offered: tuple[Tool, ...]
    mode: ToolMode = "auto"
    callable: tuple[str, ...] = ()
    named: bool = False
    parallel: bool = True

    @property
    def is_demanded(self) -> bool:
        """Whether a grammar fixes the form of a call, whatever the prompt says."""
        return self.mode == "required" or any(tool.strict for tool in self.allowed)

    @property
    def is_held(self) -> bool:
        """Whether answers must keep to a grammar: to call at all, once, or by a schema."""
        return self.is_demanded or not self.parallel

    @property
    def field(self) -> str:
        """The field of the body that has the tools."""
        return self.offered[0].place.partition("[")[0]

    @property
    def unheld(self) -> tuple[str, ...]:
        """The places of forms that bind nothing."""
        return tuple(tool.place for tool in self.offered if tool.unheld)

    @property
    def allowed(self) -> tuple[Tool, ...]:
        """The tools that may be called."""
        if not self.callable:
            return self.offered
        return tuple(tool for tool in self.offered if tool.name in self.callable)
