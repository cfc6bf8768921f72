"""A child process of the launcher: started, its output shown line by line, watched, stopped."""

import asyncio
import contextlib
import json
import logging
import os
import select
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence

from loraplex.adapters.common.logs import Format, JsonFormatter, log_to_stderr
from loraplex.adapters.errors import CommandError
from loraplex.server.worker import tether
from loraplex.server.worker.process.recovery import Backoff

MAX_LINE_BYTES = 1 << 16
KEPT_LINES = 20
_READ_BYTES = 1 << 16
_PATIENCE_S = 1.0
_ERASE = "\r\x1b[K"  # the line that the cursor stands in

Say = Callable[[str], None]


class _Screen:
    """Lines on stdout. Who reads them may leave, or stop reading, while children serve: what is
    not taken in time is lost, and nobody waits for it twice."""

    def __init__(self) -> None:
        self._is_stuck = False
        self._bar = ""
        self.is_json = False

    def show(self, line: str) -> None:
        self._write(f"{_ERASE if self._bar else ''}{line}\n{self._bar}")

    def show_bar(self, text: str) -> None:
        """Shows a text as the last line of a terminal, which is rewritten; "" = none."""
        if text != self._bar and sys.stdout is not None and sys.stdout.isatty():
            self._bar = text
            self._write(f"{_ERASE}{text}")

    def _write(self, text: str) -> None:
        if sys.stdout is None:
            return
        fd = sys.stdout.fileno()
        # Past the buffer, where a line that failed would wait to fail again at this process's end.
        rest = text.encode()
        with contextlib.suppress(OSError):
            while rest:
                patience_s = 0.0 if self._is_stuck else _PATIENCE_S
                self._is_stuck = not select.select([], [fd], [], patience_s)[1]
                if self._is_stuck:
                    return
                rest = rest[os.write(fd, rest[: select.PIPE_BUF]) :]


_screen = _Screen()
show_bar = _screen.show_bar


def write_lines_as(written: Format) -> None:
    """Sets how this process writes what it says from now on, and what children say otherwise."""
    _screen.is_json = written == "json"
    if _screen.is_json:
        log_to_stderr(written=written)


def say(text: str) -> None:
    """Writes the launcher's own lines among those of children."""
    _screen.show(named_line("loraplex", text, True) if _screen.is_json else f"loraplex: {text}")


def said_in(line: str) -> str:
    """The message of a child's line, in whichever form."""
    try:
        return str(json.loads(line)["message"]) if line.startswith('{"') else line
    except (ValueError, KeyError):
        return line


def named_line(process: str, line: str, is_json: bool = False) -> str:
    """A child's line with the child's name. Lines for programs stay JSON, the others are shown as
    columns. is_json: what is none becomes a message."""
    if is_json and said_in(line) == line:
        record = logging.makeLogRecord({"name": process, "levelname": "INFO", "msg": line})
        line = JsonFormatter(lambda: None).format(record)
    if line.startswith('{"'):
        return f'{{"process": "{process}", {line[1:]}'
    return f"{process:<6} | {line}"


class ChildFailed(CommandError):
    """A child ended before it was ever ready; str() is a sentence for a person."""


class Lines:
    """Cuts a stream of bytes into lines; a carriage return ends one, too (progress bars)."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, data: bytes) -> list[str]:
        *whole, self._rest = (self._rest + data).replace(b"\r", b"\n").split(b"\n")
        if len(self._rest) > MAX_LINE_BYTES:
            whole.append(self._rest)
            self._rest = b""
        texts = [line[:MAX_LINE_BYTES].decode("utf-8", "replace").rstrip() for line in whole]
        return [text for text in texts if text]


class Child:
    """One life of a child. `exited` is set as soon as the process is gone."""

    def __init__(self, process: subprocess.Popen[bytes], output_fd: int, on_line: Say) -> None:
        self._process = process
        self._output_fd = output_fd
        self._lines = Lines()
        self._on_line = on_line
        self.exited = asyncio.Event()
        self._pidfd = os.pidfd_open(process.pid)
        loop = asyncio.get_running_loop()
        loop.add_reader(self._pidfd, self._on_exit)
        loop.add_reader(output_fd, self._on_output)

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def ending(self) -> str:
        code = self._process.returncode
        if code is not None and code < 0:
            return f"killed by {signal.Signals(-code).name}"
        return f"exit code {code}"

    def _on_output(self) -> None:
        try:
            data = os.read(self._output_fd, _READ_BYTES)
        except BlockingIOError:
            return
        if not data:
            self._close_output()
        for line in self._lines.feed(data or b"\n"):
            self._on_line(line)

    def _close_output(self) -> None:
        if self._output_fd >= 0:
            asyncio.get_running_loop().remove_reader(self._output_fd)
            os.close(self._output_fd)
            self._output_fd = -1

    def _on_exit(self) -> None:
        asyncio.get_running_loop().remove_reader(self._pidfd)
        os.close(self._pidfd)
        self._process.wait()
        # Its last words first; a grandchild may hold the pipe open, so only what is there.
        while self._output_fd >= 0 and self._has_output():
            self._on_output()
        self._close_output()
        self.exited.set()

    def _has_output(self) -> bool:
        return bool(select.select([self._output_fd], [], [], 0)[0])

    def signal(self, number: signal.Signals) -> None:
        if not self.exited.is_set():
            self._process.send_signal(number)


def start_child(
    arguments: Sequence[str],
    environment: Mapping[str, str],
    on_line: Say,
    pass_fds: Sequence[int] = (),
    document: bytes = b"",
) -> Child:
    """Start `loraplex ARGUMENTS` as a child that dies with this process. document: its stdin."""
    reading, writing = os.pipe()
    try:
        process = tether.spawn("loraplex", arguments, environment, pass_fds, writing, document)
    finally:
        os.close(writing)
    os.set_blocking(reading, False)
    return Child(process, reading, on_line)


class ChildSupervisor:
    """Keeps one kind of child alive: restarts it with back-off once it has been ready."""

    def __init__(self, name: str, start: Callable[[Say], Child], say: Say) -> None:
        self.name = name
        self.was_ready = asyncio.Event()
        self._start = start
        self._say = say
        self._backoff = Backoff()
        self._child: Child | None = None
        self._stopping = asyncio.Event()
        self._last_lines: deque[str] = deque(maxlen=KEPT_LINES)

    async def run(self) -> None:
        """Run the child until `stop` or `kill`. Raises ChildFailed."""
        while not self._stopping.is_set():
            started = time.monotonic()
            self._child = self._start(self._on_line)
            await self._child.exited.wait()
            if self._stopping.is_set():
                return
            if not self.was_ready.is_set():
                raise ChildFailed(self._failure(self._child.ending))
            delay_s = self._backoff.delay_s(time.monotonic() - started)
            self._say(f"{self.name} died ({self._child.ending}); starting it again in {delay_s} s")
            await self._pause(delay_s)

    async def _pause(self, delay_s: float) -> None:
        try:
            await asyncio.wait_for(self._stopping.wait(), delay_s)
        except TimeoutError:
            return

    def _on_line(self, line: str) -> None:
        self._last_lines.append(line)
        _screen.show(named_line(self.name, line, _screen.is_json))

    def _failure(self, ending: str) -> str:
        """Words for a child's failure. A child's own sentence (`loraplex: …`) says it best."""
        for line in map(said_in, reversed(self._last_lines)):
            if line.startswith("loraplex: "):
                return line.removeprefix("loraplex: ")
        return f"the {self.name} could not start ({ending}); its last lines are above"

    async def stop(self, limit_s: float) -> None:
        """Stops the child: SIGTERM, and SIGKILL after limit_s; it is gone on return."""
        self._stopping.set()
        if self._child is None:
            return
        self._child.signal(signal.SIGTERM)
        try:
            await asyncio.wait_for(self._child.exited.wait(), limit_s)
        except TimeoutError:
            self._say(f"{self.name} did not stop within {limit_s:g} s: killed")
            self.kill()
            await self._child.exited.wait()

    def kill(self) -> None:
        self._stopping.set()
        if self._child is not None:
            self._child.signal(signal.SIGKILL)
