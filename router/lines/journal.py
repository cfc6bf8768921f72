"""A batch's output and error files: whole lines are appended, so that a killed batch can go on."""

import fcntl
import os
import stat
from collections.abc import Iterator
from contextlib import ExitStack, closing
from pathlib import Path

from loraplex.router.lines.errors import BatchError
from loraplex.router.lines.index import BatchInput
from loraplex.router.lines.records import RECORD_BEGIN, BatchRecord, answered_line, encode


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
