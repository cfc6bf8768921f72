"""One answer under way: its sequences' tokens in, text events out, in one reader's hands.

Which adapter, which prompts and whether there is room was settled on the way in, by `Dispatcher`.
"""

import asyncio
import logging
import secrets
import string
import time
from collections.abc import Callable
from functools import partial
from itertools import product

import msgspec

from loraplex.router.api.routed_experts import RoutedTokens
from loraplex.router.api.wire import completed
from loraplex.router.call import (
    DIGEST_HEADER,
    AnswerHead,
    ChoiceResult,
    PromptInfo,
    RequestError,
    TextEvent,
    TextToken,
)
from loraplex.router.failures import (
    FAILURES,
    Aborted,
    DeadlinePassed,
    is_excused,
    request_error,
)
from loraplex.router.generation.sequence import Arrival, RunContext, SequenceRun
from loraplex.router.generation.tokenise import PromptTask, TokenisedRequest
from loraplex.router.generation.vectors import VectorStream, numbers_of
from loraplex.router.parts.division import DividedAnswer, Division
from loraplex.router.telemetry.observer import RequestObserver, SequenceObserver
from loraplex.router.text.detokenizer import Detokenizer
from loraplex.router.text.model import TextModel
from loraplex.router.text.stops import StopMatcher
from loraplex.router.text.stream import ChoiceStream, prompt_tokens
from loraplex.server.protocol import GenerateRequest, RoutedExperts, TokenEvent

logger = logging.getLogger(__name__)

# A prompt's token with its logprobs is as much work as so many characters are to a tokenizer.
_SIZE_OF_SCORED = 64
# Each takes a tenth of a millisecond.
_STARTED_AT_ONCE = 16

# Of the ids that Mistral's templates take; other ids have more letters, and a prefix.
_SHORT_ID = 9
_LETTERS = string.ascii_letters + string.digits

# What a reader of a Generation gets: a prompt's PromptInfo comes before its first TextEvent.
Part = PromptInfo | TextEvent


class _Choice:
    """One sequence and its text. slot: in the inbox. reading: the run that reads the last state
    behind the text, once it has begun; its slot is behind those of all texts. vector: that state,
    once it is there.
    """

    __slots__ = ("elapsed_s", "observer", "reading", "run", "slot", "stream", "task", "vector") + (
        *("routed", "tokens_routed"),
    )

    def __init__(
        self,
        slot: int,
        task: PromptTask,
        stream: ChoiceStream | VectorStream,
        run: SequenceRun,
        observer: SequenceObserver,
    ) -> None:
        self.slot = slot
        self.task = task
        self.stream = stream
        self.run = run
        self.observer = observer
        self.elapsed_s = 0.0
        self.reading: SequenceRun | None = None
        self.vector: tuple[float, ...] = ()
        self.tokens_routed = RoutedTokens()
        self.routed: RoutedExperts | None = None

    def result(self) -> ChoiceResult:
        own = {"elapsed_s": self.elapsed_s, "vector": self.vector, "routed": self.routed}
        return msgspec.structs.replace(self.stream.result(), **own)

    def ended(self, text_event: TextEvent, elapsed_s: float, *, routed: bool) -> TextEvent:
        """Return the text's last event with what is known at the end. routed: experts are reported.
        Raises RequestError where none came."""
        self.elapsed_s = elapsed_s
        if routed:
            self._end_routed()
        own = {"elapsed_s": elapsed_s, "routed": self.routed}
        return msgspec.structs.replace(text_event, **own)

    def _end_routed(self) -> None:
        generated = self.stream.result().generated_tokens
        self.routed = self.tokens_routed.first(len(self.task.prompt.ids) + generated - 1)
        if self.routed is None and self.stream.finish != "abort":
            raise RequestError("internal", "the worker reports no experts of tokens")

    def stop(self) -> None:
        self.run.stop()
        if self.reading is not None:
            self.reading.stop()


class Generation:
    """Generates a request's answer: `start` it; `next` until it returns nothing, or `finish`;
    `close` in any case, also before the end. on_close: gives back what was taken for it.
    """

    def __init__(
        self,
        head: AnswerHead,
        model: TextModel,
        tokenised: TokenisedRequest,
        priority: int,
        context: RunContext,
        observer: RequestObserver,
        on_close: Callable[[], None],
    ) -> None:
        self.head = head
        self.prompts: list[PromptInfo] = []
        self.model = model
        self._call = call = tokenised.call
        self._tokenised = tokenised
        self._priority = priority
        self._context = context
        self._observer = observer
        self._on_close = on_close
        self._announced: set[int] = set()
        self._closed = False
        self._stops = StopMatcher(call.stop, call.include_stop, call.stop_regex)
        self._timer: asyncio.TimerHandle | None = None
        self._choices: list[_Choice] = []
        self._live = tokenised.num_sequences

    async def start(self) -> None:
        """Brings its sequences into the queue, until the deadline. Between a few of many, other
        requests have their turn.
        """
        context, tokenised = self._context, self._tokenised
        self._timer = asyncio.get_running_loop().call_at(
            context.deadline, context.inbox.fail, DeadlinePassed()
        )
        self._observer.queued(context.adapter, tokenised.num_prompt_tokens)
        # Ids on the wire are unique even if two callers choose the same request id.
        wire_id = f"{self.head.request_id}.{secrets.token_hex(8)}"
        for task, choice in product(tokenised.tasks, range(self._call.best_of)):
            if len(self._choices) % _STARTED_AT_ONCE == 0 and self._choices:
                await asyncio.sleep(0)
            made = self._make_choice(task, choice, f"{wire_id}.{task.index}")
            self._choices.append(made)
            made.run.start()

    def _make_choice(self, task: PromptTask, choice: int, wire_id: str) -> _Choice:
        call, adapter = self._call, self._context.adapter
        request = GenerateRequest(
            request_id=wire_id,
            attempt=0,
            choice=choice,
            adapter=self.head.adapter_digest,
            prompt_ids=task.prompt.ids,
            accepted_ids=[],
            sampling=task.sampling,
            seed=task.seed,
            priority=self._priority,
            salt=self._context.salt,
            adapter_from=task.adapter_from,
            vector=task.vector,
            drafts=self._context.drafts,
            vocab_size=self.model.new_vocab_size,
            tenant=self._context.tenant,
            adapter_scale=1.0 if adapter is None else adapter.scale,
            pictures=task.prompt.pictures,
            routed_experts=call.routed_experts,
        )
        slot = task.index * call.best_of + choice
        stream = self._stream_of(task, choice)
        observer = self._observer.sequence(request.adapter)
        run = SequenceRun(self._context, slot, request, observer)
        return _Choice(slot, task, stream, run, observer)

    def _stream_of(self, task: PromptTask, choice: int) -> ChoiceStream | VectorStream:
        read = task.prompt.detokenizer
        if read is None:
            return VectorStream(task.index)
        detokenizer, divided = read.copy(), None
        if task.division is not None:
            divided = self._divided(task.division, detokenizer)
        return ChoiceStream(
            self._call,
            self.model,
            detokenizer,
            self._stops.twin(),
            task.index,
            choice,
            divided,
        )

    def _divided(self, division: Division, detokenizer: Detokenizer) -> DividedAnswer:
        """Readers see markers that are special tokens; clients do not, unless they want these."""
        markers = self.model.special_ids(division.markers)
        detokenizer.keep(frozenset(markers.values()))
        hidden = frozenset(markers if self._call.skip_special_tokens else ())
        return DividedAnswer(division, partial(_call_id, division.short_ids), hidden)

    async def next(self) -> list[Part]:
        """Parts that came since the last call, at least one; none = all choices have ended. Raises
        RequestError when the request fails; then there is no more."""
        while self._live:
            try:
                events = await self._context.inbox.take()
            except Aborted:
                events = self._aborted()
            except FAILURES as error:
                self._observer.failed(excused=is_excused(error))
                fault = self._caller_error(error)
                if fault.cause == "internal":
                    logger.error("request %s failed: %s", self.head.request_id, error)
                raise fault from error
            parts: list[Part] = []
            for slot, event, at in events:
                is_state, index = divmod(slot, len(self._choices))
                choice = self._choices[index]
                if choice.task.index not in self._announced:
                    parts.append(await self._announce(choice.task, event))
                try:
                    if is_state:
                        self._end_state(choice, event, parts)
                    else:
                        self._advance(choice, event, at, parts)
                except RequestError:
                    self._observer.failed(excused=True)
                    raise
            if parts:
                return parts
        return []

    def _aborted(self) -> list[Arrival]:
        """The ends of what still runs. Raises RequestError where no part is an answer."""
        if self._call.vector is not None:
            completed("abort")
        over, now = TokenEvent("", 0, 0, 0, (), finish="abort"), time.monotonic()
        ends = []
        for choice in self._choices:
            choice.stop()
            if choice.stream.finish is None:
                ends.append((choice.slot, over, now))
            elif choice.reading is not None and not choice.vector:
                ends.append((len(self._choices) + choice.slot, over, now))
        return ends

    def _caller_error(self, error: Exception) -> RequestError:
        fault, digest = request_error(error, self._call.api), self.head.adapter_digest
        if digest is not None:
            fault.headers[DIGEST_HEADER] = digest
        return fault

    async def finish(self) -> list[ChoiceResult]:
        """Reads to the end: all choices, prompt by prompt, in order. Raises RequestError."""
        while await self.next():
            pass
        reading = self._tokenised.reading
        results = [choice.result() for choice in self._choices]
        if reading is None:
            return results
        streams = [choice.stream for choice in self._choices]
        raw = [stream.numbers for stream in streams if isinstance(stream, VectorStream)]
        size = sum(map(len, raw))
        found = await self.model.turns.run(size, lambda: reading.numbers(raw))
        return [
            msgspec.structs.replace(results[i], prompt_index=i, vector=numbers)
            for i, numbers in enumerate(found)
        ]

    def close(self) -> None:
        """Aborts what still runs. May be called more than once."""
        if self._closed:
            return
        self._closed = True
        if self._timer is not None:
            self._timer.cancel()
        if self._live:
            self._count_unread()
            self._observer.stopped(by_failure=self._context.inbox.failed)
        for choice in self._choices:
            choice.stop()
        self._on_close()

    def _count_unread(self) -> None:
        """Counts tokens that came, and for which the reader was not woken before it left."""
        for slot, event, at in self._context.inbox.rest():
            choice = self._choices[slot % len(self._choices)]
            if event.token_ids and choice.stream.finish is None:
                choice.observer.token(event, at)

    def _advance(self, choice: _Choice, event: TokenEvent, at: float, parts: list[Part]) -> None:
        stream = choice.stream
        if stream.finish is not None:
            return
        if event.token_ids:
            choice.observer.token(event, at)
        elif event.vector is not None:
            choice.observer.vector(event)
        if event.routed is not None:
            choice.tokens_routed.add(event.routed)
        text_event = stream.feed(event)
        if text_event is not None and stream.finish is not None:
            routed = self._call.routed_experts
            text_event = choice.ended(text_event, self._observer.elapsed_s, routed=routed)
        if text_event is not None:
            parts.append(text_event)
        if stream.finish is None:
            return
        if stream.must_abort:
            choice.run.stop()
        choice.observer.ended(stream.finish)
        if self._call.last_states and stream.finish != "abort":
            self._read_state(choice)
        else:
            self._end_choice()

    def _read_state(self, choice: _Choice) -> None:
        """Has the state read from which a choice's last token was drawn: of all before it."""
        slot = len(self._choices) + choice.slot
        observer = self._observer.sequence(self.head.adapter_digest)
        choice.reading = choice.run.reading(slot, choice.result().token_ids[:-1], observer)
        choice.reading.start()

    def _end_state(self, choice: _Choice, event: TokenEvent, parts: list[Part]) -> None:
        if event.finish != "abort":
            state = VectorStream(choice.task.index)
            state.feed(event)
            choice.vector = tuple(numbers_of(state.numbers).tolist())
            place = divmod(choice.slot, self._call.best_of)
            parts.append(TextEvent(*place, text="", tokens=(), vector=choice.vector))
        self._end_choice()

    def _end_choice(self) -> None:
        self._live -= 1
        if not self._live:
            self._observer.finished()

    async def _announce(self, task: PromptTask, event: TokenEvent) -> PromptInfo:
        """Facts about a prompt that come with the first event of one of its choices."""
        self._announced.add(task.index)
        prompt = task.prompt
        self._observer.prompt_read(event.cached_tokens or 0)
        tokens: tuple[TextToken, ...] = ()
        if task.sampling.prompt_logprobs is not None:
            tokens = await self.model.turns.run(
                _SIZE_OF_SCORED * len(prompt.ids),
                lambda: prompt_tokens(
                    self.model,
                    prompt.parts,
                    prompt.ids,
                    event.prompt_logprobs,
                    task.sampling.logprob_token_ids,
                ),
            )
        info = PromptInfo(
            prompt_index=task.index,
            text=prompt.text,
            num_tokens=len(prompt.ids),
            cached_tokens=event.cached_tokens or 0,
            tokens=tokens,
            token_ids=prompt.ids,
            spans=prompt.spans,
        )
        self.prompts.append(info)
        return info


def _call_id(is_short: bool) -> str:
    """Makes an id for a tool's call, unlike any other."""
    if is_short:
        return "".join(secrets.choice(_LETTERS) for _ in range(_SHORT_ID))
    return f"call_{secrets.token_hex(12)}"
