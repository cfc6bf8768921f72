"""One grammar of a whole answer. Pure."""

from router.shape.lark import Lark
from router.shape.rules import rules
from router.shape.shape import Grammar, Shape


def grammar_of(shape: Shape) -> str:
    """The grammar of an answer that has the form from its begin to its end. Raises ShapeRefused."""
    if isinstance(shape, Grammar) and shape.syntax == "lark":
        return shape.source  # so that errors name lines of the caller's
    writer = Lark()
    return writer.source(rules(shape, writer))
