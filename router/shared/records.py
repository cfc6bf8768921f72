"""Entries of a store's logs, read as records."""

import logging
from collections.abc import Iterable
from typing import TypeVar

import msgspec

logger = logging.getLogger(__name__)

Record = TypeVar("Record", bound=msgspec.Struct)


def readable(entries: Iterable[bytes], kind: type[Record]) -> list[Record]:
    """Entries of this kind. Others are left out, with a line in the log. A router of another
    version may have written them, or no router."""
    records: list[Record] = []
    for entry in entries:
        try:
            records.append(msgspec.json.decode(entry, type=kind))
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            logger.warning("the store has a %s that cannot be read: %s", kind.__name__, error)
    return records
