"""Gathers violations while an adapter is judged, bounded, and raises them together. Pure."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from loraplex.adapters.errors import AdapterError, Violation

MAX_VIOLATIONS = 64
_MAX_SHOWN_CHARS = 160


def shown(value: object) -> str:
    """A tenant's value as it may stand in a message: ASCII, on one line, bounded."""
    text = ascii(value)
    return text if len(text) <= _MAX_SHOWN_CHARS else text[: _MAX_SHOWN_CHARS - 1] + "~"


class Findings:
    """Violations in the order found; those past `MAX_VIOLATIONS` are counted, not kept.

    trained_for: see AdapterError.
    """

    def __init__(self) -> None:
        self.trained_for = ""
        self._kept: list[Violation] = []
        self._total = 0

    def __len__(self) -> int:
        return self._total

    def add(self, code: str, where: str, message: str) -> None:
        self._total += 1
        if len(self._kept) < MAX_VIOLATIONS:
            where = where if where.isascii() and where.isprintable() else shown(where)
            self._kept.append(Violation(code, where[:_MAX_SHOWN_CHARS], message))

    def extend(self, violations: Sequence[Violation]) -> None:
        for violation in violations:
            self.add(violation.code, violation.where, violation.message)

    @contextmanager
    def gathered(self) -> Iterator[None]:
        """Violations raised inside are added instead, and what raised them is left."""
        try:
            yield
        except AdapterError as error:
            if error.code != "invalid":
                raise
            self.extend(error.violations)
            self.trained_for = self.trained_for or error.trained_for

    def raise_if_any(self) -> None:
        """Ends the check: raises AdapterError `invalid` with everything found so far."""
        if not self._total:
            return
        kept = list(self._kept)
        if self._total > len(kept):
            more = f"{self._total - len(kept)} more violations are not listed"
            kept.append(Violation("more_violations", "", more))
        first = kept[0]
        others = f" (and {self._total - 1} more)" if self._total > 1 else ""
        message = f"the adapter cannot be served: {first.message}{others}"
        raise AdapterError("invalid", message, tuple(kept), trained_for=self.trained_for)


def invalid(code: str, where: str, message: str) -> AdapterError:
    """AdapterError `invalid` with one violation."""
    violation = Violation(code, where, message)
    return AdapterError("invalid", f"the adapter cannot be served: {message}", (violation,))
