"""Whether sets of JSON values are known to be empty, or to have nothing in common. Pure."""

from collections.abc import Callable

from loraplex.router.shape.schema.algebra import Algebra
from loraplex.router.shape.schema.keywords import SchemaRefused
from loraplex.router.shape.schema.values import (
    NO_VALUE,
    NONE,
    Arrays,
    CannotHold,
    Form,
    JsonValues,
    Objects,
    item_of,
)
from loraplex.router.shape.texts.regex import NOTHING

_MOST_APART = 5_000
# How deep it is looked for what tells two sets apart.
_DEEPEST = 6


class Emptiness:
    """values: those of a form."""

    def __init__(self, values: Callable[[Form], JsonValues], algebra: Algebra) -> None:
        self._values = values
        self._algebra = algebra
        self._compared = 0

    def is_sure(self, form: Form) -> bool:
        """Whether the form is known to have no value."""
        return self._no_form(form, _DEEPEST)

    def apart(self, one: JsonValues, other: JsonValues) -> bool:
        """Known to have nothing in common. Raises CannotHold after too many questions."""
        self._compared += 1
        if self._compared > _MOST_APART:
            raise CannotHold("there are too many options to compare")
        return self._is_empty(self._algebra.met(one, other), _DEEPEST)

    def _is_empty(self, values: JsonValues, depth: int) -> bool:
        """Whether it is known to have no value."""
        if values.null or values.booleans or values.numbers or values.text.possible != NOTHING:
            return False
        if depth == 0:
            return values == NONE
        return all(self._no_array(one, depth - 1) for one in values.arrays) and all(
            self._no_object(one, depth - 1) for one in values.objects
        )

    def _no_array(self, one: Arrays, depth: int) -> bool:
        if one.most is not None and one.most < one.least:
            return True
        length = min(one.least, len(one.first) + 1)
        return any(self._no_form(item_of(one, n), depth) for n in range(length))

    def _no_object(self, one: Objects, depth: int) -> bool:
        needed = [field.form for field in one.fields.values() if field.required]
        if one.most is not None and one.most < max(one.least, len(needed)):
            return True
        return any(self._no_form(form, depth) for form in needed)

    def _no_form(self, form: Form, depth: int) -> bool:
        if form == NO_VALUE:
            return True
        try:
            return self._is_empty(self._values(form), depth)
        except SchemaRefused:  # or a schema that is being read
            return False
