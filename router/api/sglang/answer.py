"""SGLang's answers: objects or lists of them, and events that hold the whole text so far. Pure."""

from collections.abc import Sequence
from typing import NamedTuple

import msgspec
from msgspec import UNSET, UnsetType

from loraplex.router.api.answers import completed, encode, finite, sse, sse_error
from loraplex.router.call import (
    AnswerHead,
    ChoiceResult,
    FinishReason,
    PromptInfo,
    RequestError,
    TextEvent,
    TextToken,
    TopToken,
)


class SglangOptions(msgspec.Struct, frozen=True):
    """How a request wants its answer.

    rid: the caller's own id. rids: one for each prompt. top: likeliest tokens beside each; None =
    no logprobs. prompt_from: the first of the prompt's tokens that has a logprob; None = none has.
    lists: the call lists tokens by id.
    """

    n: int
    is_list: bool
    rid: str | None = None
    rids: tuple[str, ...] = ()
    top: int | None = None
    prompt_from: int | None = None
    with_texts: bool = False
    lists: bool = False


class TokenScore(NamedTuple):
    """text: null unless it is asked for. logprob: null for a prompt's first token."""

    logprob: float | None
    token_id: int
    text: str | None


class StopFinish(msgspec.Struct, frozen=True, tag_field="type", tag="stop"):
    """matched: the stop string, or the id of the token that ended the answer."""

    matched: int | str | None


class LengthFinish(msgspec.Struct, frozen=True, tag_field="type", tag="length"):
    """length: tokens that were generated."""

    length: int


class AbortFinish(msgspec.Struct, frozen=True, tag_field="type", tag="abort"):
    """The text and its ids are what there was of the answer."""

    message: str = "aborted by the caller"


class MetaInfo(msgspec.Struct, frozen=True, kw_only=True):
    """finish_reason: null while it goes on. e2e_latency: seconds, at the end. From
    input_token_logprobs on: where they were asked for."""

    id: str
    finish_reason: StopFinish | LengthFinish | AbortFinish | None
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    e2e_latency: float | UnsetType = UNSET
    input_token_logprobs: list[TokenScore] | UnsetType = UNSET
    output_token_logprobs: list[TokenScore] | UnsetType = UNSET
    input_top_logprobs: list[list[TokenScore] | None] | UnsetType = UNSET
    output_top_logprobs: list[list[TokenScore] | None] | UnsetType = UNSET
    input_token_ids_logprobs: list[list[TokenScore] | None] | UnsetType = UNSET
    output_token_ids_logprobs: list[list[TokenScore] | None] | UnsetType = UNSET


class SglangAnswer(msgspec.Struct, frozen=True):
    """A whole answer, or all of it so far. index: of a stream of several, whose event it is."""

    text: str
    output_ids: list[int]
    meta_info: MetaInfo
    index: int | UnsetType = UNSET


class _SoFar(msgspec.Struct):
    """What a choice has generated."""

    text: str = ""
    ids: list[int] = []
    tokens: list[TextToken] = []
    finish: FinishReason | None = None
    matched: int | str | None = None
    elapsed_s: float = 0.0


class SglangFormatter:
    """A Formatter. Streams end with `[DONE]`."""

    def __init__(self, head: AnswerHead, options: SglangOptions) -> None:
        self._id = options.rid or head.request_id
        self._options = options
        self._prompts: dict[int, PromptInfo] = {}
        self._so_far: dict[int, _SoFar] = {}

    def prompt(self, info: PromptInfo) -> bytes:
        self._prompts[info.prompt_index] = info
        return b""

    def chunk(self, event: TextEvent) -> bytes:
        """Raises RequestError (incomplete)."""
        index = event.prompt_index * self._options.n + event.choice
        known = self._so_far.setdefault(index, _SoFar())
        known.text += event.text
        known.ids += event.token_ids
        known.tokens += event.tokens
        known.finish, known.matched = event.finish, event.matched
        known.elapsed_s = event.elapsed_s
        answer = self._answer(event.prompt_index, event.choice, known)
        if self._options.is_list:
            answer = msgspec.structs.replace(answer, index=index)
        return sse(answer)

    def end(self) -> bytes:
        return b"data: [DONE]\n\n"

    def error(self, error: RequestError) -> bytes:
        return sse_error(error, "openai")

    def whole(self, results: Sequence[ChoiceResult], prompts: Sequence[PromptInfo]) -> bytes:
        """Raises RequestError (incomplete)."""
        self._prompts = {info.prompt_index: info for info in prompts}
        answers = [self._answer(one.prompt_index, one.choice, so_far(one)) for one in results]
        return encode(answers if self._options.is_list else answers[0])

    def _answer(self, prompt: int, choice: int, known: _SoFar) -> SglangAnswer:
        info, has_ended = self._prompts[prompt], known.finish is not None
        meta = MetaInfo(
            id=self._id_of(prompt, choice),
            finish_reason=_finish(known),
            prompt_tokens=info.num_tokens,
            completion_tokens=len(known.ids),
            cached_tokens=info.cached_tokens,
            e2e_latency=known.elapsed_s if has_ended else UNSET,
        )
        if self._options.top is not None:
            meta = self._scored(meta, info, known.tokens, self._options.top)
        return SglangAnswer(known.text, known.ids, meta)

    def _id_of(self, prompt: int, choice: int) -> str:
        """Each answer has its own."""
        options = self._options
        if options.rids:
            own = options.rids[prompt]
            return own if options.n == 1 else f"{own}_{choice}"
        return f"{self._id}_{prompt * options.n + choice}" if options.is_list else self._id

    def _scored(
        self, meta: MetaInfo, info: PromptInfo, tokens: Sequence[TextToken], top: int
    ) -> MetaInfo:
        start = self._options.prompt_from
        read = () if start is None else info.tokens[start:]
        meta = msgspec.structs.replace(
            meta,
            input_token_logprobs=[self._score(token) for token in read],
            output_token_logprobs=[self._score(token) for token in tokens],
        )
        if self._options.lists:
            meta = msgspec.structs.replace(
                meta,
                input_token_ids_logprobs=[self._scores(token, token.listed) for token in read],
                output_token_ids_logprobs=[self._scores(token, token.listed) for token in tokens],
            )
        if not top:
            return meta
        return msgspec.structs.replace(
            meta,
            input_top_logprobs=[self._scores(token, token.top[:top]) for token in read],
            output_top_logprobs=[self._scores(token, token.top[:top]) for token in tokens],
        )

    def _score(self, token: TextToken) -> TokenScore:
        value = None if token.logprob is None else finite(token.logprob)
        return TokenScore(value, token.token_id, self._text(token.token))

    def _scores(self, token: TextToken, others: Sequence[TopToken]) -> list[TokenScore] | None:
        """others: that are shown beside the token."""
        if token.logprob is None:
            return None
        return [
            TokenScore(finite(one.logprob), one.token_id, self._text(one.text)) for one in others
        ]

    def _text(self, text: str) -> str | None:
        return text if self._options.with_texts else None


def so_far(result: ChoiceResult | TextEvent) -> _SoFar:
    return _SoFar(
        text=result.text,
        ids=list(result.token_ids),
        tokens=list(result.tokens),
        finish=result.finish,
        matched=result.matched,
        elapsed_s=result.elapsed_s,
    )


def _finish(known: _SoFar) -> StopFinish | LengthFinish | AbortFinish | None:
    """Raises RequestError (incomplete)."""
    if known.finish is None:
        return None
    if known.finish == "abort":
        return AbortFinish()
    if completed(known.finish) == "length":
        return LengthFinish(len(known.ids))
    return StopFinish(known.matched)
