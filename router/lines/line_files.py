"""The files of a batch: its input, read line by line, and those of its answers.

The input is read once for where its lines are. About 20 bytes a line are kept, and 80 more while
the file is read through. No body is. Whole lines of answers are appended, so that a killed batch
can go on.
"""

import codecs
import fcntl
import os
import stat
from array import array
from collections.abc import Iterator
from contextlib import ExitStack, closing
from hashlib import blake2b
from pathlib import Path

from loraplex.router.lines.errors import BatchError
from loraplex.router.lines.lines import ANY_ROUTE, BadLine, BatchRequest, LineRules, read_line
from loraplex.router.lines.order import BAD, BLANK, TWICE
from loraplex.router.lines.records import RECORD_BEGIN, BatchRecord, answered_line, encode, mark_of


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


class _RecordFile:
    """A file of records that only this process has, for as long as it is open."""

    def __init__(self, path: Path) -> None:
        """Opens a file of records for this process alone. Raises OSError, BatchError."""
        self.path = path
        with ExitStack() as stack:
            self._file = stack.enter_context(path.open("ab+"))
            if not stat.S_ISREG(os.fstat(self._file.fileno()).st_mode):
                raise BatchError(f"{path} must be a file")
            try:
                fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise BatchError(f"another `loraplex batch` writes to {path}") from None
            stack.pop_all()

    def clear(self) -> None:
        self._file.truncate(0)

    def records(self) -> Iterator[bytes]:
        """Whole lines. What a killed batch left of a last one is cut off at the end."""
        self._file.seek(0)
        end = 0
        for line in self._file:
            if not line.endswith(b"\n") and RECORD_BEGIN.startswith(line[: len(RECORD_BEGIN)]):
                break
            yield line
            end += len(line)
        self._file.truncate(end)

    def append(self, line: bytes) -> None:
        self._file.write(line)
        self._file.flush()

    def close(self) -> None:
        """Writes all to the disk, and closes the file. Raises OSError."""
        try:
            os.fsync(self._file.fileno())
        finally:
            self._file.close()


class Journal:
    """The answers of a batch, in an output file and an error file. answered: a byte for each line
    of the input, 1 = it has an answer. failed: how many of them are in the error file.
    """

    def __init__(self, out: Path, errors: Path, source: BatchInput, restart: bool) -> None:
        """Reads what earlier runs have answered. Raises BatchError."""
        self.answered = bytearray(source.lines)
        self.failed = 0
        try:
            with ExitStack() as stack:
                self._out = stack.enter_context(closing(_RecordFile(out)))
                self._errors = stack.enter_context(closing(_RecordFile(errors)))
                if restart:
                    self._out.clear()
                    self._errors.clear()
                self._take_up(self._out, source)
                self.failed = self._take_up(self._errors, source)
                self._files = stack.pop_all()
        except OSError as error:
            raise _unusable(error) from None

    def _take_up(self, file: _RecordFile, source: BatchInput) -> int:
        count = 0
        for number, record in enumerate(file.records(), 1):
            line, mark = answered_line(record) or (0, 0)
            if not 0 < line <= source.lines or source.mark(line - 1) != mark:
                raise BatchError(
                    f"{file.path} is not of this input: its line {number} answers none of the "
                    "input's lines. Name another file, or write it anew with --restart"
                )
            self.answered[line - 1] = 1
            count += 1
        return count

    @property
    def skipped(self) -> int:
        """Counts the lines with an answer."""
        return sum(self.answered)

    def append(self, place: int, record: BatchRecord) -> None:
        """Writes the record of a line. Raises BatchError, for instance when the disk is full."""
        file = self._out if record.is_success else self._errors
        try:
            file.append(encode(record))
        except OSError as error:
            raise BatchError(f"{file.path} cannot be written: {error.strerror}") from None
        self.answered[place] = 1
        self.failed += not record.is_success

    def close(self) -> None:
        """Closes both files. Raises BatchError."""
        try:
            self._files.close()
        except OSError as error:
            raise _unusable(error) from None


def _unusable(error: OSError) -> BatchError:
    place = error.filename or "an output file"
    return BatchError(f"{place} cannot be used: {error.strerror or error}")
