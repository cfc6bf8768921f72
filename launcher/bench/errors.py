"""Errors that keep a benchmark from running."""

from loraplex.adapters.errors import CommandError


class BenchError(CommandError):
    """str() is one sentence for a person: the command ends with it, and with status 1."""
