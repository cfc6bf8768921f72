"""A batch's input file: read once for where its lines are, then line by line as they are sent.

About 20 bytes a line are kept, and 80 more while the file is read through. No body is.
"""

import codecs
import os
import stat
from array import array
from collections.abc import Iterator
from contextlib import ExitStack
from hashlib import blake2b
from pathlib import Path

from loraplex.router.lines.errors import BatchError
from loraplex.router.lines.lines import ANY_ROUTE, BadLine, BatchRequest, LineRules, read_line
from loraplex.router.lines.order import BAD, BLANK, TWICE
from loraplex.router.lines.records import mark_of


class BatchInput:
    """An input file, line by line, by place from 0. groups: as in `send_order`."""

    def __init__(self, path: Path, rules: LineRules = ANY_ROUTE) -> None:
        """Reads the input through, and indexes its lines. Raises BatchError."""
        self._path = path
        self._rules = rules
        self._offsets = array("Q")
        self._marks = array("Q")
        self.groups = array("i")
        self.adapters = 0
        try:
            with ExitStack() as stack:
                self._file = stack.enter_context(path.open("rb"))
                if not stat.S_ISREG(os.fstat(self._file.fileno()).st_mode):
                    raise BatchError(f"{path} must be a file: its lines are read twice")
                self._read_through()
                stack.pop_all()
        except OSError as error:
            raise BatchError(f"{path} cannot be read: {error.strerror}") from None

    def _read_through(self) -> None:
        adapters: dict[str, int] = {}
        seen: set[bytes] = set()
        mark = codecs.BOM_UTF8
        offset = len(mark) if self._file.read(len(mark)) == mark else 0
        self._file.seek(offset)
        for line in self._lines():
            content = line.strip()
            if self.lines == self._rules.max_lines:
                raise BatchError(f"there are more than {self._rules.max_lines} lines")
            self._offsets.append(offset)
            self._marks.append(mark_of(content))
            self.groups.append(self._group(content, adapters, seen))
            offset = self._file.tell()
        self.adapters = len(adapters)

    @property
    def requests(self) -> int:
        """Lines that are not blank."""
        return self.lines - self.groups.count(BLANK)

    @property
    def lines(self) -> int:
        """Counts the lines, blank ones among them."""
        return len(self._offsets)

    def mark(self, place: int) -> int:
        return self._marks[place]

    def content(self, place: int) -> bytes:
        """Reads the text of one line, without its end. Raises BatchError if the file has changed
        since it was read through.
        """
        self._file.seek(self._offsets[place])
        content = next(self._lines(), b"").strip()
        if mark_of(content) != self._marks[place]:
            raise BatchError(f"{self._path} has changed in line {place + 1} since the start")
        return content

    def read(self, place: int) -> BatchRequest | BadLine:
        """Reads one line. Raises BatchError as `content` does."""
        said = read_line(self.content(place), self._rules)
        if self.groups[place] == TWICE:
            message = f"an earlier line has the custom_id {said.custom_id!r}, too"
            return BadLine("duplicate_custom_id", message, said.custom_id)
        return said

    def close(self) -> None:
        self._file.close()

    def _lines(self) -> Iterator[bytes]:
        """Lines of the file. A line that is too long gives no more than its beginning."""
        most = self._rules.max_bytes
        while line := self._file.readline(most + 2):
            rest = line
            while len(line) > most and rest and not rest.endswith(b"\n"):
                rest = self._file.readline(most)
            yield line

    def _group(self, content: bytes, adapters: dict[str, int], seen: set[bytes]) -> int:
        """Puts a line into a group, by the adapter that it names. adapters: numbers by name. seen:
        digests of custom_ids; both get this line's.
        """
        if not content:
            return BLANK
        said = read_line(content, self._rules)
        if said.custom_id is not None:
            digest = blake2b(said.custom_id.encode(), digest_size=16).digest()
            if digest in seen:
                return TWICE
            seen.add(digest)
        if isinstance(said, BadLine):
            return BAD
        return adapters.setdefault(said.adapter, len(adapters))
