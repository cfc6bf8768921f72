"""Fields of a chat that say whether and how long the model reasons, as several servers name them.
Pure.

`enable_thinking` and `thinking_budget` are Qwen's and LMDeploy's, `thinking` that of DeepSeek, GLM
and Anthropic, `reasoning` OpenRouter's.
"""

from typing import Literal, NamedTuple

import msgspec

from loraplex.adapters.chat.conversation import ReasoningEffort
from loraplex.router.api.openai.common import OpenAIBody
from loraplex.router.api.request.body import agreed, require
from loraplex.router.api.request.fields import Positive, ThinkingTokens


class ChatThinking(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Whether the model reasons. adaptive, auto: as it likes. budget_tokens: at most so many."""

    type: Literal["disabled", "enabled", "adaptive", "auto"]
    budget_tokens: Positive | None = None

    @property
    def switch(self) -> bool | None:
        return {"enabled": True, "disabled": False}.get(self.type)


class ChatReasoning(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How the model reasons. max_tokens: at most so many. exclude: answers leave it out."""

    effort: ReasoningEffort | None = None
    max_tokens: Positive | None = None
    enabled: bool | None = None
    exclude: bool | None = None


class ReasoningWish(NamedTuple):
    """The meaning of all such fields. None = they say nothing. budget: -1 = any number."""

    thinks: bool | None
    effort: ReasoningEffort | None
    budget: int | None
    is_included: bool | None


class ReasoningBody(OpenAIBody, frozen=True, kw_only=True):
    """Fields of a chat about reasoning."""

    reasoning_effort: ReasoningEffort | None = None
    include_reasoning: bool | None = None
    thinking_token_budget: ThinkingTokens | None = None
    enable_thinking: bool | None = None
    thinking_budget: ThinkingTokens | None = None
    thinking: ChatThinking | None = None
    reasoning: ChatReasoning | None = None


def reasoning_asked(fields: ReasoningBody) -> ReasoningWish:
    """Joins what a body's fields say. Raises RequestError where two contradict each other."""
    thinking = fields.thinking or ChatThinking("auto")
    reasoning = fields.reasoning or ChatReasoning()
    budget = agreed(
        {
            "thinking_token_budget": fields.thinking_token_budget,
            "thinking_budget": fields.thinking_budget,
            "thinking.budget_tokens": thinking.budget_tokens,
            "reasoning.max_tokens": reasoning.max_tokens,
        }
    )
    thinks = agreed(
        {
            "enable_thinking": fields.enable_thinking,
            "thinking": thinking.switch,
            "reasoning.enabled": reasoning.enabled,
        }
    )
    effort: ReasoningEffort | None = agreed(
        {"reasoning_effort": fields.reasoning_effort, "reasoning.effort": reasoning.effort}
    )
    if thinks is not None and effort is not None:
        param = "reasoning_effort" if fields.reasoning_effort else "reasoning.effort"
        require((effort != "none") is thinks, "contradicts a field that switches reasoning", param)
    excludes = reasoning.exclude
    included = agreed(
        {
            "include_reasoning": fields.include_reasoning,
            "reasoning.exclude": None if excludes is None else not excludes,
        }
    )
    return ReasoningWish(thinks, effort, budget, included)
