"""Shared by the answers of OpenAI's completions and chat routes. Pure."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Literal

import msgspec
from msgspec import UNSET, UnsetType

from loraplex.router.api.routed_experts import as_npy
from loraplex.router.api.wire import completed, finite, sse, sse_error
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

OpenAIFinish = Literal["stop", "length", "tool_calls", "function_call"]
# vLLM's of an answer that was aborted, beside OpenAI's of texts.
TextFinish = Literal["stop", "length", "abort"]
# The way of an answer's reasoning: sent as it comes, or at once when it is over, or left out.
ReasoningSent = Literal["streamed", "whole", "never"]
# Which chunks of a stream carry the counts.
UsageIn = Literal["none", "last", "each"]


class AnswerOptions(msgspec.Struct, frozen=True, kw_only=True):
    """How a request wants its answer.

    logprobs, prompt_logprobs: alternatives a token; None = neither token nor alternatives.
    token_ids: send the ids with the text. tokens_as_ids: name tokens `token_id:ID`, and list
    those that are no part of a message, too. id: the caller's own, in place of the request's.
    named_call: the caller named the tool to call, so that a call is what ends an answer.
    older_calls: the caller's tools are OpenAI's older `functions`. custom: names of custom tools.
    echoes_prompt: each prompt's text stands before its answers' (completions). echoed: what stands
    before each answer's text (chat).
    """

    n: int
    logprobs: int | None
    prompt_logprobs: int | None
    usage: UsageIn
    token_ids: bool
    tokens_as_ids: bool
    id: str | None
    reasoning: ReasoningSent = "streamed"
    named_call: bool = False
    older_calls: bool = False
    custom: frozenset[str] = frozenset()
    echoes_prompt: bool = False
    echoed: str = ""

    def name(self, token_id: int, text: str) -> str:
        """The name of a token, in logprobs."""
        return f"token_id:{token_id}" if self.tokens_as_ids else text

    def ids(self, token_ids: Sequence[int]) -> list[int] | None:
        return list(token_ids) if self.token_ids else None


class PromptTokensDetails(msgspec.Struct, frozen=True):
    cached_tokens: int


class CompletionTokensDetails(msgspec.Struct, frozen=True):
    """Details of the tokens that were generated. reasoning_tokens: the markers' own included."""

    reasoning_tokens: int


class Usage(msgspec.Struct, frozen=True):
    """Counts of the tokens of a request and its answer. completion_tokens: of all choices, those
    that best_of dropped included. reasoning_tokens: those of the details, where SGLang has them.
    cost, device_seconds: as far as they are known with the answer; only where there are prices.
    """

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    reasoning_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: CompletionTokensDetails
    cost: float | UnsetType = UNSET
    device_seconds: float | UnsetType = UNSET


class PromptLogprob(msgspec.Struct, frozen=True):
    """Log-probability of one token at one place of the prompt. rank: 1 = no token is likelier."""

    logprob: float
    rank: int | None
    decoded_token: str


# For each token of a prompt, by id: itself and the likeliest; null for the first.
PromptLogprobs = list[dict[int, PromptLogprob] | None]


class OpenAIFormatter(ABC):
    """The part of a Formatter that is alike for both routes. prefix: of the answer's id."""

    def __init__(self, head: AnswerHead, options: AnswerOptions, prefix: str) -> None:
        self._head = head
        self._options = options
        self._id = f"{prefix}-{options.id or head.request_id}"
        self._fingerprint = _fingerprint(head)
        self._prompts: list[PromptInfo] = []
        self._num_tokens = 0
        self._num_reasoning = 0

    def end(self) -> bytes:
        done = b"data: [DONE]\n\n"
        if self._options.usage == "none":
            return done
        return sse(self._counts_alone(self._usage())) + done

    def error(self, error: RequestError) -> bytes:
        return sse_error(error, "openai")

    @abstractmethod
    def _counts_alone(self, usage: Usage) -> msgspec.Struct:
        """A chunk without choices."""

    def _usage_so_far(self) -> Usage | None | UnsetType:
        """`usage` of the chunks before the last: null when only the last will have it."""
        if self._options.usage == "each":
            return self._usage()
        return None if self._options.usage == "last" else UNSET

    def _usage(self) -> Usage:
        return self._with_cost(_usage(self._prompts, self._num_tokens, self._num_reasoning))

    def _with_cost(self, usage: Usage) -> Usage:
        if self._head.receipt is None:
            return usage
        receipt = self._head.receipt()
        cost, device_s = round(receipt.cost, 9), round(receipt.device_s, 6)
        return msgspec.structs.replace(usage, cost=cost, device_seconds=device_s)

    def _usage_of(self, results: Sequence[ChoiceResult], prompts: Sequence[PromptInfo]) -> Usage:
        """The counts of a whole answer."""
        num_tokens = sum(result.generated_tokens for result in results)
        reasoning = sum(result.reasoning_tokens for result in results)
        return self._with_cost(_usage(prompts, num_tokens, reasoning))

    def _finish_reason(self, finish: FinishReason, has_calls: bool = False) -> OpenAIFinish:
        """OpenAI's name of why an answer ended. Raises RequestError (incomplete)."""
        if completed(finish) == "length":
            return "length"
        if not has_calls or self._options.named_call:
            return "stop"
        return "function_call" if self._options.older_calls else "tool_calls"

    def _ended(self, finish: FinishReason) -> TextFinish:
        """Returns vLLM's name of the reason why a text ended. An answer that was aborted has what
        there was. Raises RequestError (incomplete).
        """
        if finish == "abort":
            return "abort"
        return "length" if completed(finish) == "length" else "stop"

    def _prompt_logprobs(self, info: PromptInfo) -> PromptLogprobs | None:
        most = self._options.prompt_logprobs
        if most is None:
            return None
        return [_prompt_logprob(token, most) for token in info.tokens]


def stopped(ended: ChoiceResult | TextEvent) -> tuple[int | str | None, int | str | None]:
    """Say what ended a choice, as vLLM and as SGLang. To vLLM the model's own end is none."""
    return None if ended.finish == "eos" else ended.matched, ended.matched


def state_of(ended: ChoiceResult | TextEvent) -> list[float] | UnsetType:
    """Return the last hidden state of a choice, as SGLang does: absent unless asked for."""
    return list(ended.vector) or UNSET


def experts_of(ended: ChoiceResult | TextEvent) -> str | UnsetType:
    """Write the experts of a choice, as vLLM does: absent unless asked for."""
    return UNSET if ended.routed is None else as_npy(ended.routed)


def _usage(prompts: Sequence[PromptInfo], completion_tokens: int, reasoning_tokens: int) -> Usage:
    prompt_tokens = sum(prompt.num_tokens for prompt in prompts)
    return Usage(
        prompt_tokens=prompt_tokens,
        completion_tokens=completion_tokens,
        total_tokens=prompt_tokens + completion_tokens,
        reasoning_tokens=reasoning_tokens,
        prompt_tokens_details=PromptTokensDetails(sum(prompt.cached_tokens for prompt in prompts)),
        completion_tokens_details=CompletionTokensDetails(reasoning_tokens),
    )


def _prompt_logprob(token: TextToken, most: int) -> dict[int, PromptLogprob] | None:
    """Log-probabilities of one place: the prompt's token, then the likeliest, as in vLLM."""
    if token.logprob is None:
        return None
    found = {token.token_id: PromptLogprob(finite(token.logprob), token.rank, token.token)}
    for rank, top in enumerate(token.top[:most], 1):
        found.setdefault(top.token_id, PromptLogprob(finite(top.logprob), rank, top.text))
    return found


def listed(token: TextToken) -> Sequence[TopToken]:
    """Lists the token itself and those that the call lists by id; none where it lists none."""
    own = TopToken(token.token_id, token.token, token.logprob or 0.0)
    return [*{one.token_id: one for one in (own, *token.listed)}.values()] if token.listed else ()


def _fingerprint(head: AnswerHead) -> str:
    """Changes when the weights do, the base's or the adapter's."""
    return f"fp_{head.base_digest[:10]}{(head.adapter_digest or '')[:10]}"
