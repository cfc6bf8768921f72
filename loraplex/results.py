"""Results of `loraplex.Engine`, read from the answers of OpenAI's routes."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Self


@dataclass(frozen=True, slots=True)
class OutputChoice:
    """One continuation.

    logprobs: of each token, in nats; None unless asked for. finish_reason: `stop`, `length` or
    `tool_calls`. tool_calls, reasoning: of chats; the calls have OpenAI's shape.
    """

    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...] | None
    finish_reason: str
    tool_calls: tuple[Mapping[str, Any], ...] = ()
    reasoning: str | None = None

    @classmethod
    def of(cls, choice: Mapping[str, Any]) -> Self:
        message = choice.get("message") or {}
        return cls(
            text=message.get("content") or choice.get("text") or "",
            token_ids=tuple(choice["token_ids"]),
            logprobs=logprobs_of(choice.get("logprobs")),
            finish_reason=choice["finish_reason"],
            tool_calls=tuple(message.get("tool_calls") or ()),
            reasoning=message.get("reasoning_content"),
        )


@dataclass(frozen=True, slots=True)
class Output:
    """The answer to one prompt or conversation. Properties are those of the first choice.

    prompt_tokens: their number. adapter_digest: the content that answered; None = the base model.
    body: the whole answer of the route.
    """

    choices: tuple[OutputChoice, ...]
    prompt_tokens: int
    adapter_digest: str | None
    body: Mapping[str, Any] = field(repr=False)

    @classmethod
    def of(cls, body: Mapping[str, Any], digest: str | None) -> Self:
        choices = tuple(map(OutputChoice.of, body["choices"]))
        return cls(choices, body["usage"]["prompt_tokens"], digest, body)

    @property
    def text(self) -> str:
        return self.choices[0].text

    @property
    def token_ids(self) -> tuple[int, ...]:
        return self.choices[0].token_ids

    @property
    def logprobs(self) -> tuple[float, ...] | None:
        return self.choices[0].logprobs

    @property
    def finish_reason(self) -> str:
        return self.choices[0].finish_reason


@dataclass(frozen=True, slots=True)
class Chunk:
    """A part of a stream. choice: its number. finish_reason: None until the choice's end.

    logprobs: of tokens; None unless asked for. They may come in another part than their tokens.
    reasoning, tool_calls: parts of chats, as OpenAI's streams have them.
    """

    text: str
    token_ids: tuple[int, ...]
    finish_reason: str | None
    choice: int
    logprobs: tuple[float, ...] | None = None
    reasoning: str = ""
    tool_calls: tuple[Mapping[str, Any], ...] = ()

    @classmethod
    def of(cls, choice: Mapping[str, Any]) -> Self:
        delta = choice.get("delta") or {}
        return cls(
            text=delta.get("content") or choice.get("text") or "",
            token_ids=tuple(choice.get("token_ids") or ()),
            finish_reason=choice.get("finish_reason"),
            choice=choice["index"],
            logprobs=logprobs_of(choice.get("logprobs")),
            reasoning=delta.get("reasoning_content") or "",
            tool_calls=tuple(delta.get("tool_calls") or ()),
        )

    @property
    def holds_something(self) -> bool:
        parts = (self.text, self.token_ids, self.finish_reason)
        return any((*parts, self.logprobs, self.reasoning, self.tool_calls))


@dataclass(frozen=True, slots=True)
class Vector:
    """An embedding. prompt_tokens, adapter_digest: as of `Output`."""

    values: tuple[float, ...]
    prompt_tokens: int
    adapter_digest: str | None

    @classmethod
    def of(cls, body: Mapping[str, Any], digest: str | None) -> Self:
        return cls(tuple(body["data"][0]["embedding"]), body["usage"]["prompt_tokens"], digest)


def logprobs_of(logprobs: Mapping[str, Any] | None) -> tuple[float, ...] | None:
    """Reads the `logprobs` of a choice, of completions or of chats; None = not asked for."""
    if logprobs is None:
        return None
    if "token_logprobs" in logprobs:
        return tuple(logprobs["token_logprobs"])
    return tuple(token["logprob"] for token in logprobs["content"] or ())
