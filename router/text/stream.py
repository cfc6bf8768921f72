"""One choice: token events of the worker to text events of the client. Pure.

Text passes the detokenizer, then the stop strings; a token is told only with all of its text.
"""

from collections import deque
from collections.abc import Sequence
from typing import Protocol

import msgspec

from router.generation import ChoiceResult, FinishReason, GenerationCall, TextEvent, TextToken
from router.text.detokenizer import Detokenizer
from router.text.stops import StopMatcher
from server.protocol import Finish, TokenEvent, TokenLogprob


class Vocabulary(Protocol):
    """What a stream has to know of the tokenizer."""

    @property
    def eos_token_ids(self) -> frozenset[int]: ...

    def token_bytes(self, token_id: int) -> bytes:
        """What the token adds to the text; b"" for special tokens."""
        ...

    def token_text(self, token_id: int) -> str:
        """The token by itself, special tokens spelled out."""
        ...

    def is_special(self, token_id: int) -> bool: ...


class _Pending(msgspec.Struct):
    """A token whose text, the characters from start to end of the output, is not yet released."""

    token_id: int
    logprob: TokenLogprob | None
    start: int
    end: int
    text: str


class ChoiceStream:
    """Feed it a choice's TokenEvents, every token once and in order; it returns what the client may
    see.

    must_abort: a stop string ended the choice before the worker did; the rest is to be aborted.
    finish: set once it is over.
    """

    def __init__(
        self, call: GenerationCall, vocabulary: Vocabulary, prompt_index: int = 0, choice: int = 0
    ) -> None:
        self._vocabulary = vocabulary
        self._prompt_index = prompt_index
        self._choice = choice
        self._wants_tokens = call.sampling.logprobs is not None
        self._stop_ids = frozenset(call.sampling.stop_token_ids)
        self._detokenizer = Detokenizer()
        self._stops = StopMatcher(call.stop, call.include_stop)
        self._decoded = 0
        self._released = 0
        self._pending: deque[_Pending] = deque()
        self._texts: list[str] = []
        self._tokens: list[TextToken] = []
        self._logprob_sum = 0.0
        self._num_tokens = 0
        self._last_id: int | None = None
        self.must_abort = False
        self.finish: FinishReason | None = None

    def feed(self, event: TokenEvent) -> TextEvent | None:
        """What the event adds, or None."""
        if self.finish is not None:
            return None
        before = self._num_tokens
        text = ""
        for i, token_id in enumerate(event.token_ids):
            is_last = event.finish == "stop" and i == len(event.token_ids) - 1
            logprob = event.logprobs[i] if event.logprobs is not None else None
            text += self._accept(token_id, logprob, is_stop_token=is_last)
            if self._stops.hit is not None:
                break
        if self._stops.hit is not None:
            self.finish = "stop"
            self.must_abort = event.finish is None
        elif event.finish is not None:
            text += self._end()
            self.finish = self._finish_of(event.finish)
        return self._event(text, self._num_tokens - before)

    def result(self) -> ChoiceResult:
        """The whole choice, once it is over."""
        assert self.finish is not None
        return ChoiceResult(
            prompt_index=self._prompt_index,
            choice=self._choice,
            text="".join(self._texts),
            tokens=tuple(self._tokens),
            finish=self.finish,
            generated_tokens=self._num_tokens,
            sum_logprob=self._logprob_sum if self._wants_tokens else None,
        )

    def _accept(self, token_id: int, logprob: TokenLogprob | None, *, is_stop_token: bool) -> str:
        self._num_tokens += 1
        self._last_id = token_id
        if logprob is not None and logprob.logprob is not None:
            self._logprob_sum += logprob.logprob
        data = b"" if is_stop_token else self._vocabulary.token_bytes(token_id)
        text = self._detokenizer.push(data)
        if self._wants_tokens:
            start, self._decoded = self._decoded, self._decoded + len(text)
            self._pending.append(_Pending(token_id, logprob, start, self._decoded, text))
        return self._stops.push(text)

    def _end(self) -> str:
        tail = self._detokenizer.flush()
        if tail and self._pending:
            last = self._pending[-1]
            last.text += tail
            last.end += len(tail)
        return self._stops.push(tail) + self._stops.flush()

    def _finish_of(self, finish: Finish) -> FinishReason:
        if self._stops.hit is not None:  # by the text of an unfinished character
            return "stop"
        if finish != "stop":
            return finish
        last = self._last_id
        own = last in self._stop_ids or last not in self._vocabulary.eos_token_ids
        return "stop" if own else "eos"

    def _event(self, text: str, num_tokens: int) -> TextEvent | None:
        self._released += len(text)
        self._texts.append(text)
        tokens = self._release_tokens() if self._wants_tokens else ()
        if not (text or tokens or self.finish or num_tokens):
            return None
        self._tokens.extend(tokens)
        return TextEvent(self._prompt_index, self._choice, text, tokens, self.finish, num_tokens)

    def _release_tokens(self) -> tuple[TextToken, ...]:
        """Tokens whose text is out; at the end also what the stop string left of one."""
        tokens = []
        while self._pending:
            token = self._pending[0]
            if token.end > self._released:
                if self.finish is None or token.start >= self._released:
                    break
                token.text = token.text[: self._released - token.start]
            tokens.append(self._text_token(token))
            self._pending.popleft()
        return tuple(tokens)

    def _text_token(self, pending: _Pending) -> TextToken:
        return text_token(self._vocabulary, pending.token_id, pending.text, pending.logprob)


def text_token(
    vocabulary: Vocabulary, token_id: int, text: str, logprob: TokenLogprob | None
) -> TextToken:
    """A token as the client sees it. text: what it adds to the text."""
    own = vocabulary.token_text(token_id)
    top: tuple[tuple[int, str, float], ...] = ()
    if logprob is not None and logprob.top:
        top = tuple((i, vocabulary.token_text(i), value) for i, value in logprob.top)
    raw = vocabulary.token_bytes(token_id) if "�" in own else None
    value, rank = (None, None) if logprob is None else (logprob.logprob, logprob.rank)
    return TextToken(token_id, text, own, value, vocabulary.is_special(token_id), top, raw, rank)


def prompt_tokens(
    vocabulary: Vocabulary,
    text: str,
    ids: Sequence[int],
    logprobs: Sequence[TokenLogprob] | None,
) -> tuple[TextToken, ...]:
    """A prompt's tokens for PromptInfo, with their part of its text."""
    detokenizer = Detokenizer()
    tokens, begin = [], 0
    for i, token_id in enumerate(ids):
        part = detokenizer.push(vocabulary.token_bytes(token_id))
        if i == len(ids) - 1:
            part += detokenizer.flush()
        spelled = vocabulary.token_text(token_id) if vocabulary.is_special(token_id) else part
        # A text may spell special tokens out, and lacks the space that some tokenizers put before.
        found = (one for one in (spelled, part.removeprefix(" ")) if text.startswith(one, begin))
        part = next(found, part)
        begin += len(part)
        logprob = logprobs[i] if logprobs is not None and i < len(logprobs) else None
        tokens.append(text_token(vocabulary, token_id, part, logprob))
    return tuple(tokens)
