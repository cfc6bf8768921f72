"""Errors that end a batch before every line has an answer."""

from loraplex.adapters.errors import CommandError


class BatchError(CommandError):
    """str() is a sentence for a person."""
