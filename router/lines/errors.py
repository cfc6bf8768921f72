"""What ends a batch before every line has an answer."""


class BatchError(Exception):
    """str() is a sentence for a person."""
