"""One batch in this router: from its input to its files, or until another goes on with it."""

import asyncio
import contextlib
import functools
import sys
import time
from collections.abc import Awaitable, Callable
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import msgspec

from loraplex.adapters.common.awaited_turns import AwaitedTurns
from loraplex.adapters.common.turns import Room
from loraplex.router.api.files_and_batches import FileObject
from loraplex.router.batches.folder import BatchFolder
from loraplex.router.batches.inside import InsideAnswer
from loraplex.router.batches.row_shares import RowShares
from loraplex.router.batches.state import BatchEnd, BatchState
from loraplex.router.call import RequestError
from loraplex.router.files.store import FileStore, off_loop
from loraplex.router.files.stored_file import StorageLimits
from loraplex.router.lines.errors import BatchError
from loraplex.router.lines.gate import Gate
from loraplex.router.lines.line_files import BatchInput, Journal
from loraplex.router.lines.lines import BadLine, BatchRequest, LineRules
from loraplex.router.lines.order import AdapterWindow, send_order
from loraplex.router.lines.pace import BUSY, TOO_LONG, SendPace, pause_s
from loraplex.router.lines.records import (
    NOT_RUN,
    BatchFault,
    BatchRecord,
    Outcome,
    record_id,
    record_of,
    response_of,
)
from loraplex.router.telemetry.metrics import RouterMetrics

_RETRIES = 10
# Of one batch: those of a few lines each must not wait for each other.
_ADAPTERS_AT_ONCE = 32
_CHECK_EVERY_BYTES = 1 << 20
# How often other routers learn how far it is.
_NOTE_S = 1.0
# A quota of the caller's, or a full queue: never the line's own fault.
_TOO_MANY = 429

# Of a path, a body and the header `Authorization`.
Ask = Callable[[str, bytes, str], Awaitable[InsideAnswer]]
Stop = Literal["cancelled", "expired", "failed", "left"]


@dataclass(frozen=True, slots=True)
class BatchParts:
    """Parts that all runs of a router share.

    voucher: the header with which a line speaks for its batch's key. room_of: what a tenant may
    store. gates: of batches that have lines to run. reading: turns to read an input through, since
    threads that did so side by side would keep the interpreter from the event loop.
    """

    folder: BatchFolder
    store: FileStore
    rows: RowShares
    rules: LineRules
    metrics: RouterMetrics
    ask: Ask
    voucher: Callable[[str, str], str]
    room_of: Callable[[str], StorageLimits]
    gates: set[Gate] = field(default_factory=set)
    reading: AwaitedTurns = field(
        default_factory=lambda: AwaitedTurns({"input": Room(1, 1, sys.maxsize)})
    )

    def wake_all(self) -> None:
        """Lets every batch look for room again."""
        for gate in self.gates:
            gate.wake()


def _is_lines_own(attempt: int, status: int, further: bool) -> bool:
    """Whether the line is to blame, not what all lines need. further: others were answered."""
    if status == _TOO_MANY:
        return False
    # A wait behind live requests looks like an answer that takes too long.
    return attempt > _RETRIES and (further or (status == TOO_LONG and attempt > 3 * _RETRIES))


class _UnusableInputError(Exception):
    """str() is a sentence for the caller."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code


class BatchRun:
    """Runs one batch to its end. state: as it was last noted or counted."""

    def __init__(self, state: BatchState, parts: BatchParts) -> None:
        self.state = state
        self._parts = parts
        self._gate = Gate(SendPace(parts.rows.alone))
        self._window = AdapterWindow(_ADAPTERS_AT_ONCE)
        self._stop: Stop | None = None
        self._lines: set[asyncio.Task[None]] = set()
        self._writing = asyncio.Lock()
        self._answers = 0
        self._unchecked_bytes = 0
        self._noted_at = 0.0
        self._fault: Exception | None = None

    async def run(self) -> None:
        """Runs the batch until it is over or `leave`. Raises OSError, BatchError, RequestError."""
        if self.state.end is not None:
            await self._finalize(self.state.end)
            return
        try:
            turn = await self._parts.reading.enter("input", 1, self.state.tenant, is_batch=True)
            try:
                if self._stop == "left":
                    return
                source = await off_loop(self._read_input)
            finally:
                self._parts.reading.leave(turn)
            with closing(source):
                await self._run_lines(source)
        except _UnusableInputError as error:
            self.state = self.state.failing(error.code, str(error), "input_file_id")
            await self._finalize("failed")

    def end(self, how: Literal["cancelled", "expired"]) -> None:
        """Gives up what is in flight. Each line without an answer gets the reason."""
        if self.state.end is not None:
            return  # every line has its answer
        if how == "cancelled" and not self.state.cancelling_at:
            self.state = self._replaced(cancelling_at=int(time.time()))
        self._halt(how)

    def drain(self) -> None:
        """Sends no more lines; those in flight may end."""
        self._stop = self._stop or "left"
        self._gate.stop()

    def leave(self) -> None:
        """Leaves what is in flight to another router, or to a later run, which goes on."""
        self._halt("left")

    def _halt(self, how: Stop) -> None:
        if self._stop in (None, "left"):
            self._stop = how
        self._gate.stop()
        for line in self._lines:
            line.cancel()

    def _read_input(self) -> BatchInput:
        """Opens the batch's input file. Raises _UnusableInputError."""
        path = self._parts.store.content(self.state.tenant, self.state.input_file_id)
        rules = LineRules(
            (self.state.endpoint,), self._parts.rules.max_bytes, self._parts.rules.max_lines
        )
        if not path.exists():
            raise _UnusableInputError("file_not_found", "the input file is not there any more")
        try:
            source = BatchInput(path, rules)
        except BatchError as error:
            name = self.state.input_file_id
            text = str(error).replace(str(path), name)
            raise _UnusableInputError("invalid_input_file", f"{name}: {text}") from None
        if not source.requests:
            source.close()
            raise _UnusableInputError("empty_file", "the input file has no lines")
        return source

    async def _run_lines(self, source: BatchInput) -> None:
        out, errors = self._parts.folder.answers(self.state)
        total = source.requests
        journal = await off_loop(Journal, out, errors, source, False)
        try:
            self._count(journal, total)
            await off_loop(self._parts.folder.save, self.state)
            await self._send_all(source, journal)
            if self._fault is not None:
                raise self._fault
            if self._stop == "left":
                return
            end: BatchEnd = self._stop or "completed"
            if self._stop is not None:
                await off_loop(self._answer_rest, source, journal, NOT_RUN[end])
            self._count(journal, total)
        finally:
            await off_loop(journal.close)
        await self._finalize(end)

    def _count(self, journal: Journal, total: int) -> None:
        done = journal.skipped
        begun = self.state.begun(total, int(time.time()))
        self.state = begun.counted(done - journal.failed, journal.failed)

    # Lines

    async def _send_all(self, source: BatchInput, journal: Journal) -> None:
        """Sends each line as soon as there is room for it, in the order of adapters."""
        self._parts.rows.join(self.state.tenant)
        self._parts.gates.add(self._gate)
        try:
            for place in map(int, send_order(source.groups, journal.answered)):
                if not await self._send(source, journal, place):
                    break
            if self._lines:
                await asyncio.wait(set(self._lines))
        except (BatchError, RequestError) as error:
            self._fault = error
            self._halt("left")
        finally:
            for line in self._lines:
                line.cancel()
            await asyncio.gather(*self._lines, return_exceptions=True)
            self._parts.rows.leave(self.state.tenant)
            self._parts.gates.discard(self._gate)
            self._parts.wake_all()

    async def _send(self, source: BatchInput, journal: Journal, place: int) -> bool:
        """Sends one line once it has room. False = the batch stops."""
        said = await off_loop(source.read, place)
        group = source.groups[place]
        name = record_id(place + 1, source.mark(place))
        write = functools.partial(self._write, journal, place, name, said.custom_id)
        if isinstance(said, BadLine):
            await write(BatchFault(said.code, said.message))
            return not self._gate.is_stopped
        has_room = functools.partial(self._has_room, said.rows)
        if not await self._gate.until(lambda: self._window.has_room(group) and has_room()):
            return False
        self._window.begin(group)
        self._take_room(said.rows)
        line = asyncio.create_task(self._line(said, group, write))
        self._lines.add(line)
        line.add_done_callback(self._lines.discard)
        return True

    async def _line(
        self, line: BatchRequest, group: int, write: Callable[[Outcome], Awaitable[None]]
    ) -> None:
        """Carries out one line, from its first room to its answer."""
        try:
            outcome = await self._answer(line)
            if outcome is not None:
                self._answers += 1
                await write(outcome)
        except Exception as error:  # a line without an answer must not pass for answered
            self._fault = self._fault or error
            self._halt("left")
        finally:
            self._window.end(group)
            self._parts.wake_all()

    async def _answer(self, line: BatchRequest) -> Outcome | None:
        """Sends a line until it has a final answer; None = the batch stops before that. The first
        attempt's room is taken already."""
        attempt, before = 0, self._answers
        while True:
            attempt += 1
            answer = await self._attempt(line)
            outcome = response_of(answer.status, answer.request_id, answer.content)
            if answer.status not in BUSY:
                self._gate.pace.answered()
                return outcome
            pause = pause_s(attempt, answer.retry_after_s)
            self._gate.pace.busy(time.monotonic(), pause)
            self._parts.metrics.batch_retries.inc()
            further = self._answers > before
            if _is_lines_own(attempt, answer.status, further):
                return outcome
            await self._gate.pause(pause)
            if not await self._gate.until(functools.partial(self._has_room, line.rows)):
                return None
            self._take_room(line.rows)

    async def _attempt(self, line: BatchRequest) -> InsideAnswer:
        """Sends the line once, and gives its room back."""
        parts, state = self._parts, self.state
        authorization = parts.voucher(state.tenant, state.key_id)
        try:
            return await parts.ask(line.path, line.body, authorization)
        except BaseException:
            self._gate.pace.lost()
            raise
        finally:
            parts.rows.end(state.tenant, line.rows)
            parts.wake_all()

    def _has_room(self, rows: int) -> bool:
        is_paced = self._gate.pace.has_room(time.monotonic())
        return is_paced and self._parts.rows.has_room(self.state.tenant, rows)

    def _take_room(self, rows: int) -> None:
        self._gate.pace.sent()
        self._parts.rows.begin(self.state.tenant, rows)

    # Answers

    async def _write(
        self, journal: Journal, place: int, name: str, custom_id: str | None, outcome: Outcome
    ) -> None:
        """Writes a line's outcome to the end, even if the line is given up meanwhile."""
        record = record_of(name, custom_id, outcome)
        writing = asyncio.ensure_future(self._append(journal, place, record))
        try:
            await asyncio.shield(writing)
        except asyncio.CancelledError:
            await writing
            raise

    async def _append(self, journal: Journal, place: int, record: BatchRecord) -> None:
        async with self._writing:
            await off_loop(journal.append, place, record)
            counts = self.state.counts
            good = record.is_success
            self.state = self.state.counted(counts.completed + good, counts.failed + (not good))
            self._parts.metrics.batch_lines.labels("completed" if good else "failed").inc()
            if time.monotonic() - self._noted_at >= _NOTE_S:
                self._noted_at = time.monotonic()
                await off_loop(self._parts.folder.save, self.state, durable=False)
            self._unchecked_bytes += 0 if record.response is None else len(record.response.body)
            if self._unchecked_bytes < _CHECK_EVERY_BYTES:
                return
            self._unchecked_bytes = 0
            await self._check_storage()

    async def _check_storage(self) -> None:
        """Checks the tenant's storage: one whose files are full gets no more of them. Raises
        RequestError of the disk."""
        tenant = self.state.tenant
        try:
            await off_loop(self._parts.store.check_room, tenant, self._parts.room_of(tenant), 0, 0)
        except RequestError as error:
            if error.cause != "conflict":
                raise
            self.state = self.state.failing("storage_full", error.message)
            asyncio.get_running_loop().call_soon(self._halt, "failed")

    def _answer_rest(self, source: BatchInput, journal: Journal, fault: BatchFault) -> None:
        """Writes the same fault for all lines without an answer. Raises BatchError."""
        for place in map(int, send_order(source.groups, journal.answered)):
            said = source.read(place)
            name = record_id(place + 1, source.mark(place))
            journal.append(place, record_of(name, said.custom_id, fault))

    # The end: each step may have been done before a crash

    async def _finalize(self, end: BatchEnd) -> None:
        self.state = self.state.finalizing(end, int(time.time()))
        await off_loop(self._parts.folder.save, self.state)
        await off_loop(self._keep_answers)
        over = self.state.over(end, int(time.time()))
        await off_loop(self._parts.folder.end, over)
        self.state = over  # not shown before it is noted
        self._parts.metrics.batches.labels(end).inc()

    def _replaced(self, **changes: object) -> BatchState:
        return msgspec.structs.replace(self.state, **changes)

    def _keep_answers(self) -> None:
        """Stores the answers as files of the tenant. Raises OSError."""
        out, errors = self._parts.folder.answers(self.state)
        has_output = self._keep(out, self.state.output_id, "output")
        has_errors = self._keep(errors, self.state.error_id, "error")
        self.state = self._replaced(has_output=has_output, has_errors=has_errors)

    def _keep(self, written: Path, file_id: str, what: str) -> bool:
        """Whether there is such a file."""
        store, state = self._parts.store, self.state
        content = store.content(state.tenant, file_id)
        nbytes = 0
        for path in (written, content):
            with contextlib.suppress(FileNotFoundError):
                nbytes = nbytes or path.stat().st_size
        if not nbytes:
            return False
        now = int(time.time())
        file = FileObject(
            id=file_id,
            bytes=nbytes,
            created_at=now,
            expires_at=now + state.output_expiry_s,
            filename=f"{state.id}_{what}.jsonl",
            purpose="batch_output",
        )
        store.keep(state.tenant, written, file)
        return True
