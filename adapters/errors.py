"""Errors on the way from an adapter's name to its validated weights. Pure."""

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
