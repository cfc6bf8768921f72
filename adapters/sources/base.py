"""The protocol of a source of adapters. Blocking: callers run it in threads."""

from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from loraplex.adapters.ref import AdapterRef, RefSource

# What enables a source that is not enabled by itself.
ENABLING_OPTIONS: dict[RefSource, str] = {
    "s3": "--s3-bucket",
    "https": "--https-host",
    "modelscope": "--modelscope-owner",
}


class Source(Protocol):
    """Every method raises AdapterError, and nothing else, when the source refuses or fails.

    token: the caller's credential, or None; used for this call only.
    """

    def resolve(self, ref: AdapterRef, token: str | None) -> AdapterRef:
        """The same adapter with its revision pinned: proof that this caller may read it now."""
        ...

    def list_files(self, ref: AdapterRef, token: str | None) -> dict[str, int]:
        """Name -> bytes of the files at the top of a pinned adapter."""
        ...

    def adapters_in(self, ref: AdapterRef, token: str | None) -> Sequence[str]:
        """Names of folders in a pinned reference that are adapters, for one that is none; bounded.

        A name may begin with `../`. Best effort: none where that is unknown.
        """
        ...

    def fetch_file(self, ref: AdapterRef, token: str | None, name: str, folder: Path) -> None:
        """Puts one listed file of a pinned adapter into `folder`, whole or not at all.

        After a failure, what had come may lie in `folder` under another name, for the next call.
        """
        ...
