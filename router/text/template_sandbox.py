"""Renders tenants' chat templates in separate processes with small limits.

A template that uses up its time or memory costs its process, never the router.
"""

import asyncio
import hashlib
import sys
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from adapters.chat.conversation import MessageForm, TemplateFault, TemplateOptions
from adapters.chat.template import MAX_OUTPUT_CHARS
from router.call import RequestError
from router.text.template_worker import CPU_SECONDS, MEMORY_BYTES, RenderJob, RenderOutcome

START_TIMEOUT_S = 30.0
RENDER_TIMEOUT_S = 20.0
# A template that cost a process is refused unseen for so long, with messages of that size or more.
REFUSED_S = 30.0
_MAX_REFUSED = 256
_MAX_FRAME_BYTES = 4 * MAX_OUTPUT_CHARS + 64
_ROOT = str(Path(__file__).parents[2])
_PROGRAM = (
    "import sys; sys.path.insert(0, sys.argv[1]); "
    "from router.text.template_worker import main; main()"
)


class TemplateSandbox:
    """At most `processes` templates render at once; processes start when first needed."""

    def __init__(self, processes: int = 2) -> None:
        self._idle: list[_Renderer] = [_Renderer() for _ in range(processes)]
        self._all = tuple(self._idle)
        self._slots = asyncio.Semaphore(processes)
        self._refused: OrderedDict[bytes, _Refusal] = OrderedDict()

    async def render(
        self,
        source: str,
        special_tokens: dict[str, str],
        messages: Sequence[dict[str, Any]],
        options: TemplateOptions,
    ) -> str:
        """As `ChatTemplate(source, special_tokens).render(messages, options)`.

        Raises TemplateFault; RequestError (unavailable) when no process can be started.
        """
        outcome = await self._do(RenderJob(source, special_tokens, list(messages), options))
        return outcome.text or ""

    async def form(self, source: str, special_tokens: dict[str, str]) -> MessageForm:
        """As `ChatTemplate(source, special_tokens).form`. Raises as `render`."""
        outcome = await self._do(RenderJob(source, special_tokens, None, TemplateOptions()))
        return outcome.form or MessageForm()

    async def _do(self, job: RenderJob) -> RenderOutcome:
        """Raises as `render`."""
        frame = _frame(job)
        encoded = job.source.encode("utf-8", "replace")
        key, size = hashlib.sha256(encoded).digest(), len(frame) - len(encoded)
        async with self._slots:
            self._check_refused(key, size)
            renderer = self._idle.pop()
            try:
                outcome = await renderer.render(frame)
            except _Lost:
                self._refuse(key, size)
                raise TemplateFault(
                    f"the adapter's chat template used more than {CPU_SECONDS:g} s of processor "
                    f"time or {MEMORY_BYTES >> 20} MiB of memory"
                ) from None
            finally:
                self._idle.append(renderer)
        if outcome.fault is not None:
            raise TemplateFault(outcome.fault, outcome.cause, outcome.param)
        return outcome

    async def close(self) -> None:
        """Ends the processes."""
        for renderer in self._all:
            await renderer.stop()

    def _check_refused(self, key: bytes, size: int) -> None:
        """What is half as large is tried: one caller's long messages must not be another's loss."""
        refusal = self._refused.get(key)
        if refusal is None or refusal.until <= asyncio.get_running_loop().time():
            return
        if size > refusal.size / 2:
            raise TemplateFault(
                "the adapter's chat template was stopped a moment ago at messages of this size"
            )

    def _refuse(self, key: bytes, size: int) -> None:
        now = asyncio.get_running_loop().time()
        known = self._refused.get(key)
        if known is not None and known.until > now:
            size = min(size, known.size)
        self._refused[key] = _Refusal(now + REFUSED_S, size)
        self._refused.move_to_end(key)
        if len(self._refused) > _MAX_REFUSED:
            self._refused.popitem(last=False)


class _Refusal(NamedTuple):
    """size: bytes of the smallest messages at which the template cost a process."""

    until: float
    size: int


class _Lost(Exception):
    """The process ended, hung or answered nonsense in the middle of a template."""


class _Renderer:
    """One process, started on demand and again after it was lost."""

    def __init__(self) -> None:
        self._process: asyncio.subprocess.Process | None = None

    async def render(self, frame: bytes) -> RenderOutcome:
        """Raises _Lost. However it ends otherwise, no reply is left behind for the next caller."""
        if self._process is None:
            self._process = await _start()
        finished = False
        try:
            async with asyncio.timeout(RENDER_TIMEOUT_S):
                outcome = await _exchange(self._process, frame)
            finished = True
            return outcome
        except (TimeoutError, OSError, EOFError, ValueError) as error:
            raise _Lost from error
        finally:
            if not finished:  # also when cancelled: its answer would be read as another's
                await self.stop()

    async def stop(self) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        if process.returncode is None:
            process.kill()
        await asyncio.shield(process.wait())


async def _start() -> asyncio.subprocess.Process:
    """Raises RequestError (unavailable), also when the machine has no process or memory left."""
    try:
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-I",
            "-c",
            _PROGRAM,
            _ROOT,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.DEVNULL,
            env={},
        )
    except OSError as error:
        raise _unavailable() from error
    ready = False
    try:
        async with asyncio.timeout(START_TIMEOUT_S):
            await _read(process)
        ready = True
        return process
    except (TimeoutError, EOFError, ValueError) as error:
        raise _unavailable() from error
    finally:
        if process.returncode is None and not ready:
            process.kill()


def _unavailable() -> RequestError:
    return RequestError("unavailable", "chat templates cannot be rendered now")


def _frame(job: RenderJob) -> bytes:
    """Raises TemplateFault for values that cannot be sent to a template process."""
    try:
        frame = msgspec.msgpack.encode(job)
    except (ValueError, OverflowError) as error:
        raise TemplateFault(
            "the messages or template variables hold a number or text that cannot be rendered"
        ) from error
    return len(frame).to_bytes(4, "big") + frame


async def _exchange(process: asyncio.subprocess.Process, frame: bytes) -> RenderOutcome:
    assert process.stdin is not None
    process.stdin.write(frame)
    await process.stdin.drain()
    return await _read(process)


async def _read(process: asyncio.subprocess.Process) -> RenderOutcome:
    """Raises EOFError, and ValueError for what is no RenderOutcome."""
    assert process.stdout is not None
    size = int.from_bytes(await process.stdout.readexactly(4), "big")
    if size > _MAX_FRAME_BYTES:
        raise ValueError(f"a frame of {size} bytes")
    return msgspec.msgpack.decode(await process.stdout.readexactly(size), type=RenderOutcome)
