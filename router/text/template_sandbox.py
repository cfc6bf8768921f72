"""Renders tenants' chat templates in separate processes with small limits.

A template that uses up its time or memory costs its process, never the router.
"""

import asyncio
import hashlib
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any, NamedTuple

import msgspec

from loraplex.adapters.chat.conversation import (
    MessageForm,
    Rendered,
    TemplateFault,
    TemplateOptions,
)
from loraplex.adapters.chat.template import MAX_OUTPUT_CHARS
from loraplex.adapters.common.newest import NewestKept
from loraplex.adapters.helpers.helper import Helper, HelperBroken, HelperStopped, HelperUnavailable
from loraplex.adapters.helpers.pool import HelperPool
from loraplex.router.call import RequestError
from loraplex.router.text.template_worker import CPU_SECONDS, MEMORY_BYTES, RenderJob, RenderOutcome
from loraplex.router.text.turn_taking import PROCESSES, CallersTurns

RENDER_TIMEOUT_S = 20.0
# A template that cost a process is refused unseen for so long, with messages of that size or more.
REFUSED_S = 30.0
_MAX_REFUSED = 256
_MAX_FRAME_BYTES = 4 * MAX_OUTPUT_CHARS + 64
_MODULE = "loraplex.router.text.template_worker"


class TemplateSandbox:
    """Renders chat templates in processes of their own.

    At most `processes` templates render at once; processes start when first needed.
    """

    def __init__(self, processes: int = PROCESSES) -> None:
        helpers = [
            Helper(_MODULE, b"", RENDER_TIMEOUT_S, _MAX_FRAME_BYTES) for _ in range(processes)
        ]
        self._pool = HelperPool(helpers, "template")
        self._refused = NewestKept[bytes, _Refusal](_MAX_REFUSED)

    async def render(
        self,
        source: str,
        special_tokens: dict[str, str],
        messages: Sequence[dict[str, Any]],
        options: TemplateOptions,
        turns: CallersTurns | None = None,
    ) -> str:
        """Renders the prompt as `written` does, and returns its text alone. Raises as `written`."""
        return (await self.written(source, special_tokens, messages, options, turns)).text

    async def written(
        self,
        source: str,
        special_tokens: dict[str, str],
        messages: Sequence[dict[str, Any]],
        options: TemplateOptions,
        turns: CallersTurns | None = None,
    ) -> Rendered:
        """Renders a chat as `ChatTemplate(source, special_tokens).written(messages, options)` does.
        turns: its caller's.

        Raises TemplateFault; RequestError (unavailable, not_served) when no process can answer.
        """
        job = RenderJob(source, special_tokens, list(messages), options)
        outcome = await self._do(job, turns)
        return outcome.prompt or Rendered("")

    async def form(self, source: str, special_tokens: dict[str, str]) -> MessageForm:
        """The form of messages that a template reads, as `ChatTemplate(source,
        special_tokens).form`. Raises as `written`."""
        outcome = await self._do(RenderJob(source, special_tokens, None, TemplateOptions()))
        return outcome.form or MessageForm()

    async def _do(self, job: RenderJob, turns: CallersTurns | None = None) -> RenderOutcome:
        """Does a job in a process that is free. Raises as `written`."""
        frame = _frame(job)
        encoded = job.source.encode("utf-8", "replace")
        key, size = hashlib.sha256(encoded).digest(), len(frame) - len(encoded)
        self._check_refused(key, size)  # before any line
        turn = nullcontext() if turns is None else turns.take("template")
        async with turn, self._pool.taken() as ask:
            self._check_refused(key, size)
            try:
                outcome = msgspec.msgpack.decode(await ask(frame), type=RenderOutcome)
            except HelperStopped:
                self._refuse(key, size)
                raise TemplateFault(
                    f"the adapter's chat template used more than {CPU_SECONDS:g} s of processor "
                    f"time or {MEMORY_BYTES >> 20} MiB of memory"
                ) from None
            except HelperBroken as error:
                message = f"adapters' chat templates cannot be rendered here: {error}"
                raise RequestError("not_served", message) from error
            except (HelperUnavailable, ValueError) as error:
                message = "chat templates cannot be rendered now"
                raise RequestError("unavailable", message) from error
        if outcome.fault is not None:
            raise TemplateFault(outcome.fault, outcome.cause, outcome.param)
        return outcome

    async def close(self) -> None:
        """Ends the processes."""
        await self._pool.close()

    def _check_refused(self, key: bytes, size: int) -> None:
        """Refuse a template that was too costly for a conversation of this size. Half the size is
        tried: one caller's long messages must not be another's loss."""
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


class _Refusal(NamedTuple):
    """A refused template. size: bytes of the smallest messages at which it cost a process."""

    until: float
    size: int


def _frame(job: RenderJob) -> bytes:
    """Encodes a job. Raises TemplateFault for values that no process can be sent."""
    try:
        return msgspec.msgpack.encode(job)
    except (ValueError, OverflowError) as error:
        raise TemplateFault(
            "the messages or template variables hold a number or text that cannot be rendered"
        ) from error
