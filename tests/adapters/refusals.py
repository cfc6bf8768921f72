"""What a call refuses, as a value."""

from collections.abc import Callable

from loraplex.adapters.errors import AdapterError


def refusal(call: Callable[[], object]) -> AdapterError | None:
    """The AdapterError that `call` raises, or None. Any other exception is a test's failure."""
    try:
        call()
    except AdapterError as error:
        return error
    return None


def violation_codes(call: Callable[[], object]) -> set[str]:
    """The codes of an `invalid` adapter; it must be refused, in printable words."""
    error = refusal(call)
    assert error is not None, "accepted"
    assert error.code == "invalid", error.message
    assert error.violations
    for violation in error.violations:
        assert violation.message.isprintable()
        assert len(violation.message) < 2000
    return {violation.code for violation in error.violations}


def refused_as(call: Callable[[], object]) -> set[str]:
    """As `violation_codes`; of another refusal than `invalid`, its own code."""
    error = refusal(call)
    if error is not None and not error.violations:
        return {error.code}
    return violation_codes(call)
