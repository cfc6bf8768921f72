"""Fields of a chat that say whether and how long the model reasons, as several servers name them.
Pure.

`enable_thinking` and `thinking_budget` are Qwen's and LMDeploy's, `thinking` that of DeepSeek, GLM
and Anthropic, `reasoning` OpenRouter's.
"""

from typing import Literal, NamedTuple, Protocol, TypeVar

import msgspec

from loraplex.adapters.chat.conversation import ReasoningEffort
from loraplex.router.api.request.body import require
from loraplex.router.api.request.fields import Positive

T = TypeVar("T")


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


class AsksForReasoning(Protocol):
    """A body's fields about reasoning."""

    @property
    def reasoning_effort(self) -> ReasoningEffort | None: ...
    @property
    def include_reasoning(self) -> bool | None: ...
    @property
    def thinking_token_budget(self) -> int | None: ...
    @property
    def enable_thinking(self) -> bool | None: ...
    @property
    def thinking_budget(self) -> int | None: ...
    @property
    def thinking(self) -> ChatThinking | None: ...
    @property
    def reasoning(self) -> ChatReasoning | None: ...


def reasoning_asked(fields: AsksForReasoning) -> ReasoningWish:
    """Joins what a body's fields say. Raises RequestError where two contradict each other."""
    thinking, reasoning = fields.thinking, fields.reasoning or ChatReasoning()
    budget = _agreed(
        thinking_token_budget=fields.thinking_token_budget,
        thinking_budget=fields.thinking_budget,
        **{"thinking.budget_tokens": None if thinking is None else thinking.budget_tokens},
        **{"reasoning.max_tokens": reasoning.max_tokens},
    )
    thinks = _agreed(
        enable_thinking=fields.enable_thinking,
        thinking=None if thinking is None else thinking.switch,
        **{"reasoning.enabled": reasoning.enabled},
    )
    effort: ReasoningEffort | None = _agreed(
        reasoning_effort=fields.reasoning_effort, **{"reasoning.effort": reasoning.effort}
    )
    if thinks is not None and effort is not None:
        param = "reasoning_effort" if fields.reasoning_effort else "reasoning.effort"
        require((effort != "none") is thinks, "contradicts a field that switches reasoning", param)
    excludes = reasoning.exclude
    included = _agreed(
        include_reasoning=fields.include_reasoning,
        **{"reasoning.exclude": None if excludes is None else not excludes},
    )
    return ReasoningWish(thinks, effort, budget, included)


def _agreed(**said: T | None) -> T | None:
    """Returns what fields say of one thing. Raises RequestError."""
    given = {name: value for name, value in said.items() if value is not None}
    first = next(iter(given), "")
    for name, value in given.items():
        require(value == given[first], f"contradicts `{first}`", name)
    return given.get(first)
