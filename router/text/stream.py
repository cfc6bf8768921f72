"""One choice: token events of the worker to text events of the client. Pure.

Text passes the detokenizer, then the stop strings; a token goes out only with all of its text.
"""

from collections import deque
from collections.abc import Iterable, Sequence
from typing import Protocol

import msgspec

from loraplex.adapters.byte_tokens import REPLACEMENT
from loraplex.router.call import (
    ChoiceResult,
    FinishReason,
    GenerationCall,
    TextEvent,
    TextToken,
    TopToken,
)
from loraplex.router.parts.division import DividedAnswer
from loraplex.router.parts.parts import PartsDelta
from loraplex.router.text.detokenizer import Detokenizer, Tokens
from loraplex.router.text.stops import StopMatcher
from loraplex.server.protocol import Finish, TokenEvent, TokenLogprob

_INVALID = REPLACEMENT.encode()


def attribute(text: str, expected: Sequence[bytes]) -> tuple[list[str], list[bytes]]:
    """Divides `text` among its tokens, in order. A character is its last byte's token's.

    expected: what each token adds by itself. What does not agree with that is the last token's.
    Returns each token's part, and what of it is still to come.
    """
    data = text.encode()
    ends, rests, at = [], [], 0
    for own in expected:
        count, rest = _agreeing(data[at : at + len(own) + 3], own)
        at += count
        ends.append(at)
        rests.append(rest)
    if at == 0:
        rests[-1] = expected[-1]  # nothing of it yet
    ends[-1] = len(data)
    parts = _cut(data, ends)
    newest = max((i for i, part in enumerate(parts) if part), default=0)
    return parts, [b"" if i < newest else rest for i, rest in enumerate(rests)]


def _agreeing(data: bytes, own: bytes) -> tuple[int, bytes]:
    """How many bytes of `data` are a token's, and which of its bytes are still to come."""
    if data.startswith(own):
        return len(own), b""
    if own.startswith(data):
        return len(data), own[len(data) :]
    if _is_text(own):
        return 0, b""
    # Part of a character: it became invalid, or its beginning is the prompt's.
    first = data.decode("utf-8", "ignore")[:1].encode()
    return (len(first) if first == _INVALID or first.endswith(own) else 0), b""


def _cut(data: bytes, ends: Sequence[int]) -> list[str]:
    """The parts of a UTF-8 text up to each end; an end within a character is at its start."""
    parts, begin = [], 0
    for end in ends:
        while end < len(data) and data[end] & 0xC0 == 0x80:
            end -= 1
        end = max(end, begin)
        parts.append(data[begin:end].decode())
        begin = end
    return parts


def _is_text(data: bytes) -> bool:
    try:
        data.decode()
    except UnicodeDecodeError:
        return False
    return True


class TokenTexts(Tokens, Protocol):
    """Facts about the tokenizer that a stream needs."""

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes that the token adds inside a text."""
        ...

    def token_text(self, token_id: int) -> str:
        """The token's text; U+FFFD for parts of a character."""
        ...


class _Pending(msgspec.Struct):
    """A token that has not gone out yet. text: its part of the text so far. expected: bytes of its
    own that the text still lacks. is_end: it ended the answer. is_open: more of its text may come.
    """

    token_id: int
    logprob: TokenLogprob | None
    expected: bytes
    is_end: bool
    text: str = ""
    is_open: bool = True


class ChoiceStream:
    """Turns one choice's tokens into what the client sees. Feed it a choice's TokenEvents, every
    token once and in order; it returns what the client may see.

    detokenizer: has read the prompt; the stream's own from now on, as is `stops`. divided: takes
    the text apart; None = all of it is text. must_abort: a stop string ended the choice before the
    worker did; the rest is to be aborted. finish: set once it is over.
    """

    def __init__(
        self,
        call: GenerationCall,
        vocabulary: TokenTexts,
        detokenizer: Detokenizer,
        stops: StopMatcher,
        prompt_index: int = 0,
        choice: int = 0,
        divided: DividedAnswer | None = None,
    ) -> None:
        self._divided = divided
        self._vocabulary = vocabulary
        self._prompt_index = prompt_index
        self._choice = choice
        self._wants_tokens = call.sampling.logprobs is not None
        self._lists_all = call.lists_all
        self._listed = call.sampling.logprob_token_ids
        self._stop_ids = frozenset(call.sampling.stop_token_ids)
        self._ends = frozenset(call.sampling.end_token_ids)
        self._keeps_stop_token = call.include_stop
        self._skips_special = call.skip_special_tokens
        self._detokenizer = detokenizer
        self._stops = stops
        self._released = 0
        self._placed = 0
        self._pending: deque[_Pending] = deque()
        self._open: deque[_Pending] = deque()
        self._texts: list[str] = []
        self._tokens: list[TextToken] = []
        self._logprob_sum = 0.0
        self._ids: list[int] = []
        # Where the text of the tokens begins that are not known to be the reasoning's.
        self._begins: deque[int] = deque()
        self._written = 0
        self._num_reasoning = 0
        self.must_abort = False
        self.finish: FinishReason | None = None

    def feed(self, event: TokenEvent) -> TextEvent | None:
        """The text that the event adds, or None. Raises RequestError: a pattern takes too long."""
        if self.finish is not None:
            return None
        before = len(self._ids)
        text = ""
        for i, token_id in enumerate(event.token_ids):
            is_end = event.finish == "stop" and i == len(event.token_ids) - 1
            logprob = event.logprobs[i] if event.logprobs is not None else None
            text += self._accept(token_id, logprob, is_end=is_end)
            if self._stops.hit is not None:
                break
        if self._stops.hit is not None:
            self.finish = "stop"
            self.must_abort = event.finish is None
        elif event.finish is not None:
            text += self._end()
            self.finish = self._finish_of(event.finish)
        return self._event(text, tuple(self._ids[before:]))

    def result(self) -> ChoiceResult:
        """The whole choice, once it is over."""
        assert self.finish is not None
        return ChoiceResult(
            prompt_index=self._prompt_index,
            choice=self._choice,
            text="".join(self._texts),
            tokens=tuple(self._tokens),
            finish=self.finish,
            generated_tokens=len(self._ids),
            sum_logprob=self._logprob_sum if self._wants_tokens else None,
            token_ids=tuple(self._ids),
            reasoning="" if self._divided is None else self._divided.reasoning,
            calls=() if self._divided is None else self._divided.calls,
            reasoning_tokens=self._num_reasoning,
            matched=self._matched(),
        )

    def _accept(self, token_id: int, logprob: TokenLogprob | None, *, is_end: bool) -> str:
        self._ids.append(token_id)
        if logprob is not None and logprob.logprob is not None:
            self._logprob_sum += logprob.logprob
        self._begins.append(self._written)
        is_written = self._is_written(token_id, is_end=is_end)
        if self._wants_tokens:
            expected = self._vocabulary.token_bytes(token_id) if is_written else b""
            self._pending.append(_Pending(token_id, logprob, expected, is_end))
            self._open.append(self._pending[-1])
        if not is_written:
            return self._leave_out(token_id)
        text = self._detokenizer.write(token_id)
        self._written += len(text)
        self._attribute(text)
        return self._stops.push(text)

    def _is_written(self, token_id: int, *, is_end: bool) -> bool:
        """Whether it is part of the text; of the token that ended the answer as vLLM has it."""
        if self._detokenizer.is_left_out(token_id):
            return False
        if not is_end:
            return True
        return self._keeps_stop_token and not (token_id in self._ends and self._skips_special)

    def _leave_out(self, token_id: int) -> str:
        """Leaves out a token that the client does not see; stop strings may name it."""
        token = self._vocabulary.token(token_id)
        if token is None or not self._stops.active:
            self._attribute("")
            return ""
        held = self._detokenizer.held()
        text = self._stops.spell(held, token)
        self._attribute("" if self._stops.active else held)
        return text

    def _end(self) -> str:
        tail = self._detokenizer.flush()
        self._attribute(tail)
        return self._stops.push(tail) + self._stops.flush()

    def _attribute(self, text: str) -> None:
        """Attributes new text of the detokenizer to its newest tokens."""
        if not self._open:
            return
        if text:
            parts, rests = attribute(text, [token.expected for token in self._open])
            for token, part, rest in zip(self._open, parts, rests, strict=True):
                token.text += part
                token.expected = rest
        held = self._detokenizer.holding
        while self._open and not (held and (len(self._open) == 1 or self._open[0].expected)):
            self._open.popleft().is_open = False

    def _finish_of(self, finish: Finish) -> FinishReason:
        if self._stops.hit is not None:  # by the text of an unfinished character
            return "stop"
        if finish != "stop":
            return finish
        last = self._ids[-1] if self._ids else None
        return "stop" if last in self._stop_ids else "eos"

    def _event(self, text: str, ids: tuple[int, ...]) -> TextEvent | None:
        self._released += len(text)
        tokens = self._release_tokens() if self._wants_tokens else ()
        if not (text or tokens or self.finish or ids):
            return None
        parts = self._parts_of(text)
        self._texts.append(parts.text)
        self._tokens.extend(tokens)
        return TextEvent(
            prompt_index=self._prompt_index,
            choice=self._choice,
            text=parts.text,
            tokens=tokens,
            finish=self.finish,
            num_tokens=len(ids),
            token_ids=ids,
            reasoning=parts.reasoning,
            calls=parts.calls,
            num_reasoning=self._count_reasoning(),
            matched=self._matched(),
        )

    def _matched(self) -> int | str | None:
        """The stop string or the token that ended the answer."""
        if self._stops.hit is not None:
            return self._stops.hit
        return self._ids[-1] if self._ids and self.finish in ("stop", "eos") else None

    def _count_reasoning(self) -> int:
        """Counts tokens that are newly known to be the reasoning's."""
        if self._divided is None:
            self._begins.clear()
            return 0
        count, end = 0, self._divided.reasoned
        while self._begins and self._begins[0] < end:
            self._begins.popleft()
            count += 1
        self._num_reasoning += count
        return count

    def _parts_of(self, text: str) -> PartsDelta:
        if self._divided is None:
            return PartsDelta(text)
        return self._divided.feed(text, is_last=self.finish is not None)

    def _release_tokens(self) -> tuple[TextToken, ...]:
        """Releases tokens whose text is out; at the end also what the stop string left of one."""
        tokens = []
        while self._pending:
            token = self._pending[0]
            end = self._placed + len(token.text)
            if self.finish is None and (token.is_open or end > self._released):
                break
            if end > self._released:
                if self._placed >= self._released and not self._lists_all:
                    break
                token.text = token.text[: max(0, self._released - self._placed)]
            self._placed += len(token.text)
            tokens.append(self._text_token(token))
            self._pending.popleft()
        return tuple(tokens)

    def _text_token(self, pending: _Pending) -> TextToken:
        return text_token(
            self._vocabulary,
            pending.token_id,
            pending.text,
            pending.logprob,
            self._listed,
            is_own_end=pending.is_end and pending.token_id in self._ends,
        )


def text_token(
    vocabulary: TokenTexts,
    token_id: int,
    text: str,
    logprob: TokenLogprob | None,
    listed_ids: Sequence[int] = (),
    *,
    is_own_end: bool = False,
) -> TextToken:
    """A token as the client sees it. text: its part of the text. listed_ids: of
    `TokenLogprob.listed`. is_own_end: the model ended the answer with it."""
    own = vocabulary.token_text(token_id)
    top: tuple[TopToken, ...] = ()
    listed: tuple[TopToken, ...] = ()
    if logprob is not None:
        top = _named(vocabulary, logprob.top)
        listed = _named(vocabulary, zip(listed_ids, logprob.listed, strict=False))
    raw = vocabulary.token_bytes(token_id) if REPLACEMENT in own else None
    value, rank = (None, None) if logprob is None else (logprob.logprob, logprob.rank)
    special = vocabulary.is_special(token_id) or is_own_end
    return TextToken(token_id, text, own, value, special, top, raw, rank, listed)


def _named(vocabulary: TokenTexts, logprobs: Iterable[tuple[int, float]]) -> tuple[TopToken, ...]:
    return tuple(
        TopToken(i, vocabulary.token_text(i), value, vocabulary.is_special(i))
        for i, value in logprobs
    )


def prompt_tokens(
    vocabulary: TokenTexts,
    parts: Sequence[str],
    ids: Sequence[int],
    logprobs: Sequence[TokenLogprob] | None,
    listed_ids: Sequence[int] = (),
) -> tuple[TextToken, ...]:
    """A prompt's tokens for PromptInfo. parts: of the prompt's text, one for each token."""
    known = logprobs or ()
    return tuple(
        text_token(vocabulary, token_id, part, known[i] if i < len(known) else None, listed_ids)
        for i, (token_id, part) in enumerate(zip(ids, parts, strict=True))
    )
