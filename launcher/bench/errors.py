"""Errors that keep a benchmark from running."""


class BenchError(Exception):
    """str() is one sentence for a person: the command ends with it, and with status 1."""
