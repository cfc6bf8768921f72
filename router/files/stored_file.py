"""Ids of what tenants store, and how much a tenant may store. Pure."""

import re
from collections.abc import Sequence
from pathlib import PurePosixPath

import msgspec

from loraplex.router.call import RequestError

FILE_ID = "file-"
BATCH_ID = "batch_"
RESPONSE_ID = "resp_"
_ID = re.compile(rf"(?:{FILE_ID}|{BATCH_ID}|{RESPONSE_ID})[0-9a-f]{{24}}")
_MAX_NAME = 255


class StoredAmount(msgspec.Struct, frozen=True):
    """The amount that lies on disk."""

    files: int = 0
    nbytes: int = 0


class StorageLimits(msgspec.Struct, frozen=True):
    """Limits of one tenant."""

    files: int
    nbytes: int

    def check(self, stored: StoredAmount, more_files: int, more_bytes: int) -> None:
        """Checks that a tenant may store so much more. Raises RequestError (conflict)."""
        if stored.files + more_files > self.files:
            raise RequestError(
                "conflict",
                f"{stored.files} files are stored, and a tenant may have {self.files}: delete some",
            )
        if stored.nbytes + more_bytes > self.nbytes:
            raise RequestError(
                "conflict",
                f"the files would have more than {self.nbytes} bytes together: delete some",
            )


def new_id(kind: str, now: float, drawn: str) -> str:
    """Makes an id. Ids sort by the time of their making. drawn: 12 random hex digits."""
    return f"{kind}{int(now * 1000):012x}{drawn}"


def is_id(kind: str, text: str) -> bool:
    return text.startswith(kind) and _ID.fullmatch(text) is not None


def name_of(given: str | None) -> str:
    """A file's name without its folders, and what no name may hold."""
    shown = "".join(char for char in given or "" if char.isprintable())
    return PurePosixPath(shown.replace("\\", "/")).name[:_MAX_NAME] or "upload.jsonl"


def ids_of(names: Sequence[str], kind: str, ending: str) -> list[str]:
    """Ids of the entries of a folder."""
    found = (name.removesuffix(ending) for name in names if name.endswith(ending))
    return [name for name in found if is_id(kind, name)]
