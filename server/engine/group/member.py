"""The work of an executor among others that share its model."""

from typing import Protocol

from loraplex.server.engine.executor import CopyOver, CopySums, Executor, PagesCopied, T


class GroupMember(Executor[T], Protocol[T]):
    """An executor whose copies can be used when another process says so."""

    def use_copy(self) -> None:
        """Let the next step use the oldest copy that none may use yet."""
        ...

    def copies_over(self) -> list[CopyOver | PagesCopied]:
        """Return the copies that have ended, as `poll_copies` does, and let no step use a copy."""
        ...

    def sums_offered(self) -> list[CopySums]:
        """This device's numbers of copies, for the others; each once. Such a copy goes on with
        `add_sums`."""
        ...

    def add_sums(self, sums: CopySums) -> None:
        """The sums over all devices. After the last ones of a copy it can be used as others can.
        Raises ValueError for what no copy waits for."""
        ...
