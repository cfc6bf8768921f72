"""LoRAX's answers: objects, lists of one, server-sent events, response headers. Pure."""

from collections.abc import Sequence
from typing import Literal

import msgspec
from msgspec import UNSET, UnsetType

from loraplex.router.api.wire import best_first, completed, encode, finite, sse, sse_error
from loraplex.router.call import (
    AnswerHead,
    ChoiceResult,
    FinishReason,
    PromptInfo,
    RequestError,
    TextEvent,
    TextToken,
)

LoraxFinish = Literal["length", "eos_token", "stop_sequence"]


class LoraxOptions(msgspec.Struct, frozen=True):
    """How a request wants its answer. show_seed: null is shown when nothing is drawn.

    alternatives, top_tokens: how many of the likeliest are beside each token, by LoRAX's name and
    by TGI's; None = the name is not there.
    """

    as_list: bool
    details: bool
    full_text: bool
    show_seed: bool
    alternatives: int | None = None
    top_tokens: int | None = None


class InputToken(msgspec.Struct, frozen=True):
    """A prompt's token. logprob is null for the first."""

    id: int
    text: str
    logprob: float | None


class AlternativeToken(msgspec.Struct, frozen=True):
    id: int
    text: str
    logprob: float


class Token(msgspec.Struct, frozen=True):
    """A generated token. skipped: always false; LoRAX marks speculated tokens so."""

    id: int
    text: str
    logprob: float
    special: bool
    skipped: bool = False
    alternative_tokens: list[AlternativeToken] | UnsetType = UNSET


class LikelyToken(msgspec.Struct, frozen=True):
    """One of TGI's `top_tokens`."""

    id: int
    text: str
    logprob: float
    special: bool


class BestOfSequence(msgspec.Struct, frozen=True):
    generated_text: str
    finish_reason: LoraxFinish
    generated_tokens: int
    seed: int | None
    prefill: list[InputToken]
    tokens: list[Token]
    top_tokens: list[list[LikelyToken]] | UnsetType = UNSET


class Details(msgspec.Struct, frozen=True):
    finish_reason: LoraxFinish
    prompt_tokens: int
    generated_tokens: int
    skipped_tokens: int
    seed: int | None
    prefill: list[InputToken]
    tokens: list[Token]
    best_of_sequences: list[BestOfSequence] | UnsetType = UNSET
    top_tokens: list[list[LikelyToken]] | UnsetType = UNSET


class GenerateAnswer(msgspec.Struct, frozen=True):
    """Whole answer of LoRAX's `/generate`. details: present if `details` or `decoder_input_details`
    was asked for.
    """

    generated_text: str
    details: Details | UnsetType = UNSET


class StreamDetails(msgspec.Struct, frozen=True):
    """Details that the last event of a stream carries. input_length: prompt_tokens under the name
    that huggingface_hub reads.
    """

    finish_reason: LoraxFinish
    prompt_tokens: int
    generated_tokens: int
    seed: int | None
    input_length: int


class StreamAnswer(msgspec.Struct, frozen=True):
    """One token; the last carries the whole text. index: counts tokens from 1."""

    index: int
    token: Token
    generated_text: str | None = None
    details: StreamDetails | None = None
    top_tokens: list[LikelyToken] | UnsetType = UNSET


class Timings(msgspec.Struct, frozen=True):
    """Seconds from the request's arrival on; None = unknown."""

    total_s: float
    first_token_s: float | None = None


class LoraxFormatter:
    """Writes answers of LoRAX's routes. Streams have one choice and no marker at their end."""

    def __init__(self, head: AnswerHead, options: LoraxOptions) -> None:
        self._head = head
        self._options = options
        self._prompt = PromptInfo(0, "", 0)
        self._texts: list[str] = []
        self._num_events = 0
        self._num_tokens = 0

    def prompt(self, info: PromptInfo) -> bytes:
        self._prompt = info
        return b""

    def chunk(self, event: TextEvent) -> bytes:
        """Writes one event a token. Raises RequestError (incomplete)."""
        self._texts.append(event.text)
        self._num_tokens += event.num_tokens
        tokens = list(event.tokens)
        if event.finish is None:
            return b"".join([sse(self._numbered(token)) for token in tokens])
        if not tokens:  # the end alone still needs a token to be an event of this API
            tokens = [TextToken(0, event.text, event.text, 0.0, special=not event.text)]
        parts = [sse(self._numbered(token)) for token in tokens[:-1]]
        return b"".join([*parts, sse(self._last(tokens[-1], event.finish))])

    def end(self) -> bytes:
        return b""

    def error(self, error: RequestError) -> bytes:
        return sse_error(error, "lorax")

    def whole(self, results: Sequence[ChoiceResult], prompts: Sequence[PromptInfo]) -> bytes:
        """Writes the whole answer at once. Raises RequestError (incomplete)."""
        self._prompt = prompts[0]
        ranked = best_first(results)
        completed(ranked[0].finish)
        answer = GenerateAnswer(self._full(ranked[0].text))
        if self._options.details:
            answer = GenerateAnswer(answer.generated_text, self._details(ranked))
        return encode([answer] if self._options.as_list else answer)

    def _numbered(self, token: TextToken) -> StreamAnswer:
        self._num_events += 1
        # Clients join these texts (huggingface_hub's): one that is none of the answer's is empty.
        shown = self._token(token, token.text)
        most = self._options.top_tokens
        top = UNSET if most is None else _likely(token, most)
        return StreamAnswer(self._num_events, shown, top_tokens=top)

    def _last(self, token: TextToken, finish: FinishReason) -> StreamAnswer:
        details = None
        if self._options.details:
            details = StreamDetails(
                finish_reason=finish_reason(finish),
                prompt_tokens=self._prompt.num_tokens,
                generated_tokens=self._num_tokens,
                seed=self._seed,
                input_length=self._prompt.num_tokens,
            )
        completed(finish)
        text = self._full("".join(self._texts))
        numbered = self._numbered(token)
        return msgspec.structs.replace(numbered, generated_text=text, details=details)

    def _details(self, ranked: list[ChoiceResult]) -> Details:
        best, *others = [self._sequence(result) for result in ranked]
        return Details(
            finish_reason=best.finish_reason,
            prompt_tokens=self._prompt.num_tokens,
            generated_tokens=best.generated_tokens,
            skipped_tokens=0,
            seed=best.seed,
            prefill=best.prefill,
            tokens=best.tokens,
            best_of_sequences=others or UNSET,
            top_tokens=best.top_tokens,
        )

    def _sequence(self, result: ChoiceResult) -> BestOfSequence:
        return BestOfSequence(
            generated_text=self._full(result.text),
            finish_reason=finish_reason(result.finish),
            generated_tokens=result.generated_tokens,
            seed=self._seed,
            prefill=[
                InputToken(t.token_id, t.token, None if t.logprob is None else finite(t.logprob))
                for t in self._prompt.tokens
            ],
            tokens=[self._token(t, t.token if t.special else t.text) for t in result.tokens],
            top_tokens=self._top(result.tokens),
        )

    def _token(self, token: TextToken, text: str) -> Token:
        most = self._options.alternatives
        alternatives: list[AlternativeToken] | UnsetType = UNSET
        if most is not None:
            alternatives = [
                AlternativeToken(top.token_id, top.text, finite(top.logprob))
                for top in token.top[:most]
            ]
        return Token(
            token.token_id,
            text,
            finite(token.logprob),
            token.special,
            alternative_tokens=alternatives,
        )

    def _top(self, tokens: Sequence[TextToken]) -> list[list[LikelyToken]] | UnsetType:
        most = self._options.top_tokens
        return UNSET if most is None else [_likely(token, most) for token in tokens]

    def _full(self, text: str) -> str:
        return self._prompt.text + text if self._options.full_text else text

    @property
    def _seed(self) -> int | None:
        return self._head.seed if self._options.show_seed else None


def _likely(token: TextToken, most: int) -> list[LikelyToken]:
    return [
        LikelyToken(top.token_id, top.text, finite(top.logprob), top.special)
        for top in token.top[:most]
    ]


def finish_reason(finish: FinishReason) -> LoraxFinish:
    """Returns LoRAX's name of the reason why an answer ended. Raises RequestError (incomplete)."""
    if completed(finish) == "eos":
        return "eos_token"
    return "stop_sequence" if finish == "stop" else "length"


def head_headers(
    head: AnswerHead, base_name: str, compute_type: str, adapter_source: str | None
) -> dict[str, str]:
    """LoRAX's headers of every answer, streams included, before the first token."""
    headers = {"x-compute-type": compute_type, "x-model-id": base_name}
    if head.adapter_id is not None:
        headers["x-adapter-id"] = head.adapter_id
        headers["x-adapter-source"] = adapter_source or "hub"
    return {name: _header_value(value) for name, value in headers.items()}


def count_headers(
    prompts: Sequence[PromptInfo], results: Sequence[ChoiceResult], timings: Timings
) -> dict[str, str]:
    """LoRAX's headers once the whole answer is known. Times are milliseconds."""
    prompt_tokens = sum(prompt.num_tokens for prompt in prompts)
    generated = sum(result.generated_tokens for result in results)
    headers = {
        "x-compute-characters": str(sum(len(prompt.text) for prompt in prompts)),
        "x-prompt-tokens": str(prompt_tokens),
        "x-generated-tokens": str(generated),
        "x-skipped-tokens": "0",
        "x-total-tokens": str(prompt_tokens + generated),
    }
    first = timings.first_token_s
    later = None
    if first is not None and generated > len(results):
        later = (timings.total_s - first) * len(results) / (generated - len(results))
    times = {
        "x-compute-time": timings.total_s,
        "x-total-time": timings.total_s,
        "x-time-to-first-token": first,
        "x-time-per-output-token": later,
    }
    known = {name: f"{1000 * value:.0f}" for name, value in times.items() if value is not None}
    return headers | known


def _header_value(text: str) -> str:
    return "".join(c if " " <= c <= "~" else "?" for c in text)
