"""What answers of OpenAI's completions and chat routes share: counts, fingerprint, ends. Pure."""

from collections.abc import Sequence
from typing import Literal

import msgspec
from msgspec import UNSET, UnsetType

from router.api.answers import completed
from router.generation import AnswerHead, FinishReason, PromptInfo

OpenAIFinish = Literal["stop", "length"]
# Which chunks of a stream tell the counts.
UsageIn = Literal["none", "last", "each"]


class PromptTokensDetails(msgspec.Struct, frozen=True):
    cached_tokens: int


class Usage(msgspec.Struct, frozen=True):
    """completion_tokens: of all choices, those that best_of dropped included."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


def usage_of(prompts: Sequence[PromptInfo], completion_tokens: int) -> Usage:
    prompt_tokens = sum(prompt.num_tokens for prompt in prompts)
    return Usage(
        prompt_tokens=prompt_tokens,
        completion_tokens=completion_tokens,
        total_tokens=prompt_tokens + completion_tokens,
        prompt_tokens_details=PromptTokensDetails(sum(prompt.cached_tokens for prompt in prompts)),
    )


def usage_so_far(
    wanted: UsageIn, prompts: Sequence[PromptInfo], completion_tokens: int
) -> Usage | None | UnsetType:
    """`usage` of the chunks before the last: null when only the last will have it."""
    if wanted == "each":
        return usage_of(prompts, completion_tokens)
    return None if wanted == "last" else UNSET


def fingerprint(head: AnswerHead) -> str:
    """Changes when the weights do, the base's or the adapter's."""
    return f"fp_{head.base_digest[:10]}{(head.adapter_digest or '')[:10]}"


def finish_reason(finish: FinishReason) -> OpenAIFinish:
    """Raises RequestError (incomplete)."""
    return "length" if completed(finish) == "length" else "stop"
