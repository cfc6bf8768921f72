"""Errors on the way from an adapter's name to its validated weights, and violations as a judgement
gathers them. Pure."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Literal

import msgspec

AdapterErrorCode = Literal[
    "bad_ref",  # the text does not follow the grammar of a reference
    "not_found",  # no such adapter, revision or file
    "forbidden",  # the source or the operator refuses this caller
    "unauthorized",  # the source asks for a credential, or the one given is wrong
    "invalid",  # fetched or inspected, and refused: see the violations
    "too_large",  # larger than the operator allows
    "conflict",  # the name is taken, or taken out of service
    "gone",  # the name was deleted
    "missing",  # an upload whose files the worker has not been sent, see `UploadSource`
    "unavailable",  # the source, the disk or the worker cannot serve it now; a retry may help
]

MAX_VIOLATIONS = 64
_MAX_SHOWN_CHARS = 160


class Violation(msgspec.Struct, frozen=True):
    """One reason why an adapter is refused.

    code: stable, snake_case (`rank_mismatch`, `unknown_target`, …).
    where: the config key, tensor name or file it was found at.
    message: one sentence for a person, with expected and got.
    """

    code: str
    where: str
    message: str

    def __str__(self) -> str:
        return f"{self.where}: {self.message}" if self.where else self.message


class CommandError(Exception):
    """str() is one sentence for a person: a command ends with it, and with status 1."""


class AdapterError(Exception):
    """An adapter cannot be served. Carries everything that an HTTP answer needs.

    trained_for: what the adapter's config names as its base, where that is another; else "".
    """

    def __init__(
        self,
        code: AdapterErrorCode,
        message: str,
        violations: tuple[Violation, ...] = (),
        retry_after_s: float | None = None,
        trained_for: str = "",
    ) -> None:
        super().__init__(message)
        self.code: AdapterErrorCode = code
        self.message = message
        self.violations = violations
        self.retry_after_s = retry_after_s
        self.trained_for = trained_for


class AdapterChanged(AdapterError):
    """The content at a source has changed. `unavailable` because the source no longer holds what
    was pinned: resolve it again.
    """


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
