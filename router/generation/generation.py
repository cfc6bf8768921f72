"""One answer under way: its sequences' tokens in, text events out, in one reader's hands.

Which adapter, which prompts and whether there is room was settled before, by `dispatch`.
"""

import asyncio
import logging
import secrets
import string
from collections.abc import Callable, Sequence
from functools import partial

import msgspec

from router.api.lorax.answer import Timings
from router.call import (
    DIGEST_HEADER,
    AnswerHead,
    ChoiceResult,
    GenerationCall,
    PromptInfo,
    RequestError,
    TextEvent,
    TextToken,
)
from router.failures import EXCUSED, FAILURES, DeadlinePassed, request_error
from router.generation.meter import ChoiceTimes, RequestMeter
from router.generation.prompts import Prompt
from router.generation.sequence import RunContext, SequenceRun
from router.parts.division import DividedAnswer, Division
from router.telemetry.metrics import Start
from router.text.detokenizer import Detokenizer
from router.text.model import TextModel
from router.text.stream import ChoiceStream, prompt_tokens
from server.protocol import GenerateRequest, SamplingParams, TokenEvent

logger = logging.getLogger(__name__)

# A prompt's token with its logprobs is as much work as so many characters are to a tokenizer.
_SIZE_OF_SCORED = 64

# Of the ids that Mistral's templates take; other ids have more letters, and a prefix.
_SHORT_ID = 9
_LETTERS = string.ascii_letters + string.digits

# What a reader of a Generation gets: a prompt's PromptInfo comes before its first TextEvent.
Part = PromptInfo | TextEvent


class PromptTask(msgspec.Struct, frozen=True):
    """One prompt of a call, and how its output is drawn; choices differ by their number.

    division: how its answers are divided; None = all of them is text.
    """

    index: int
    prompt: Prompt
    sampling: SamplingParams
    seed: int
    division: Division | None = None


class _Choice:
    """One sequence and its text."""

    __slots__ = ("run", "stream", "task", "times")

    def __init__(self, task: PromptTask, stream: ChoiceStream, run: SequenceRun) -> None:
        self.task = task
        self.stream = stream
        self.run = run
        self.times = ChoiceTimes()


class Generation:
    """`next` until it returns nothing, or `finish`; `close` in any case, also before the end."""

    def __init__(
        self,
        call: GenerationCall,
        head: AnswerHead,
        model: TextModel,
        tasks: Sequence[PromptTask],
        context: RunContext,
        meter: RequestMeter,
        on_close: Callable[[], None],
    ) -> None:
        self.head = head
        self.prompts: list[PromptInfo] = []
        self._call = call
        self.model = model
        self.charge = context.charge
        self._context = context
        self._meter = meter
        self._on_close = on_close
        self._announced: set[int] = set()
        self._closed = False
        self._timer = asyncio.get_running_loop().call_at(
            context.deadline, context.inbox.fail, DeadlinePassed()
        )
        # Ids on the wire are unique even if two callers choose the same request id.
        wire_id = f"{head.request_id}.{secrets.token_hex(8)}"
        self._choices = [
            self._start_choice(task, choice, f"{wire_id}.{task.index}")
            for task in tasks
            for choice in range(call.best_of)
        ]
        self._live = len(self._choices)
        meter.begins(sum(len(task.prompt.ids) for task in tasks))

    def _start_choice(self, task: PromptTask, choice: int, wire_id: str) -> _Choice:
        call = self._call
        request = GenerateRequest(
            request_id=wire_id,
            attempt=0,
            choice=choice,
            adapter=self.head.adapter_digest,
            prompt_ids=task.prompt.ids,
            accepted_ids=[],
            sampling=task.sampling,
            seed=task.seed,
            priority=call.priority,
            salt=self._context.salt,
        )
        slot = task.index * call.best_of + choice
        detokenizer = task.prompt.detokenizer.copy()
        divided = None
        if task.division is not None:
            divided = self._divided(task.division, detokenizer)
        stream = ChoiceStream(call, self.model, detokenizer, task.index, choice, divided)
        return _Choice(task, stream, SequenceRun(self._context, slot, request))

    def _divided(self, division: Division, detokenizer: Detokenizer) -> DividedAnswer:
        """Readers see markers that are special tokens; clients do not, unless they want these."""
        markers = self.model.special_ids(division.markers)
        detokenizer.keep(frozenset(markers.values()))
        hidden = frozenset(markers if self._call.skip_special_tokens else ())
        return DividedAnswer(division, partial(_call_id, division.short_ids), hidden)

    async def next(self) -> list[Part]:
        """What came since the last call, at least one part; nothing = all choices have ended.

        Raises RequestError when the request fails; then there is no more.
        """
        while self._live:
            try:
                events = await self._context.inbox.take()
            except FAILURES as error:
                self._meter.fails(excused=isinstance(error, EXCUSED))
                told = self._told(error)
                if told.cause == "internal":
                    logger.error("request %s failed: %s", self.head.request_id, error)
                raise told from error
            parts: list[Part] = []
            for slot, event in events:
                choice = self._choices[slot]
                if choice.task.index not in self._announced:
                    parts.append(await self._announce(choice.task, event))
                self._advance(choice, event, parts)
            if parts:
                return parts
        return []

    def _told(self, error: Exception) -> RequestError:
        told, digest = request_error(error, self._call.api), self.head.adapter_digest
        if digest is not None:
            told.headers[DIGEST_HEADER] = digest
        return told

    async def finish(self) -> list[ChoiceResult]:
        """Reads to the end: all choices, prompt by prompt, in order. Raises RequestError."""
        while await self.next():
            pass
        return [choice.stream.result() for choice in self._choices]

    @property
    def timings(self) -> Timings:
        """Up to now."""
        return Timings(self._meter.elapsed_s, first_token_s=self._meter.first_token_s)

    @property
    def start(self) -> Start | None:
        """Whether it waited for its adapter; None before the first token."""
        return self._meter.start

    def close(self) -> None:
        """Aborts what still runs. May be called more than once."""
        if self._closed:
            return
        self._closed = True
        self._timer.cancel()
        failed = self._context.inbox.failed
        if self._live and not failed:
            self._meter.is_given_up()
        self.charge.outcome = "ok" if not self._live else "failed" if failed else "cancelled"
        for choice in self._choices:
            choice.run.stop()
        self._meter.closes()
        self._on_close()

    def _advance(self, choice: _Choice, event: TokenEvent, parts: list[Part]) -> None:
        stream = choice.stream
        if stream.finish is not None:
            return
        if event.token_ids:
            self._meter.tokens(choice.times, event)
            self.charge.generated_tokens += len(event.token_ids)
        text_event = stream.feed(event)
        if text_event is not None:
            parts.append(text_event)
        if stream.finish is not None:
            self._live -= 1
            if stream.must_abort:
                choice.run.stop()
            self._meter.choice_ends(choice.times)
            if not self._live:
                self._meter.ends()

    async def _announce(self, task: PromptTask, event: TokenEvent) -> PromptInfo:
        """What is known of a prompt with the first event of one of its choices."""
        self._announced.add(task.index)
        prompt = task.prompt
        self.charge.cached_tokens += event.cached_tokens or 0
        self._context.metrics.cached_tokens.inc(event.cached_tokens or 0)
        tokens: tuple[TextToken, ...] = ()
        if task.sampling.prompt_logprobs is not None:
            tokens = await self.model.long_texts.run(
                _SIZE_OF_SCORED * len(prompt.ids),
                lambda: prompt_tokens(self.model, prompt.parts, prompt.ids, event.prompt_logprobs),
            )
        info = PromptInfo(
            prompt_index=task.index,
            text=prompt.text,
            num_tokens=len(prompt.ids),
            cached_tokens=event.cached_tokens or 0,
            tokens=tokens,
            token_ids=prompt.ids,
        )
        self.prompts.append(info)
        return info


def _call_id(is_short: bool) -> str:
    """Of a call of a tool, unlike any other's."""
    if is_short:
        return "".join(secrets.choice(_LETTERS) for _ in range(_SHORT_ID))
    return f"call_{secrets.token_hex(12)}"
