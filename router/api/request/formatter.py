"""The products of every API's module: a parsed request, and the formatter of its answer. Pure."""

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import msgspec

from loraplex.router.call import (
    AnswerHead,
    ChoiceResult,
    GenerationCall,
    PromptInfo,
    RequestError,
    TextEvent,
)
from loraplex.router.config import RouterConfig
from loraplex.server.protocol import Gift


class ApiLimits(msgspec.Struct, frozen=True):
    """Limits of a body, and the names that mean the base.

    default_adapter: of a body that names neither an adapter nor the base; "" = the base.
    sampling_defaults: the model's own. LoRAX routes, which have LoRAX's defaults of a draw, take
    only what has nothing to do with one.
    max_prompts: prompts in one completions request. max_stop_chars: of one stop string.
    processed_logprobs: whether logprobs are those of the draw, where a body does not say.
    vocab_size: of the base. gives: what the base does.
    stores_responses: answers of `/v1/responses` are stored where requests want it.
    """

    base_names: tuple[str, ...] = ()
    default_adapter: str = ""
    default_source: str = "hub"
    max_n: int = 8
    max_prompts: int = 256
    max_stop_sequences: int = 16
    max_stop_chars: int = 1024
    max_stop_token_ids: int = 64
    max_logit_bias: int = 1024
    max_logprobs: int = 20
    processed_logprobs: bool = False
    vocab_size: int = 2**31
    max_messages: int = 4096
    max_bad_words: int = 256
    sampling_defaults: dict[str, float] = {}
    gives: tuple[Gift, ...] = ("text", "vectors")
    stores_responses: bool = False


def limits_from(
    config: RouterConfig,
    base_names: tuple[str, ...],
    sampling_defaults: dict[str, float],
    gives: tuple[Gift, ...],
    vocab_size: int = 2**31,
) -> ApiLimits:
    return ApiLimits(
        base_names=base_names,
        default_adapter=config.default_adapter,
        default_source=config.default_source,
        max_n=config.max_n,
        max_stop_sequences=config.max_stop_sequences,
        max_logprobs=config.max_logprobs,
        processed_logprobs=config.logprobs_mode.startswith("processed"),
        vocab_size=vocab_size,
        sampling_defaults=sampling_defaults,
        gives=gives,
        stores_responses=bool(config.responses.keep_s),
    )


class Formatter(Protocol):
    """Writes one answer. A stream is prompt*, chunk*, end; or error in place of what is missing.

    Everything a stream returns is whole server-sent events, possibly none (b"").
    """

    def prompt(self, info: PromptInfo) -> bytes:
        """Writes what a stream shows of a prompt, once, before its choices' first chunk."""
        ...

    def chunk(self, event: TextEvent) -> bytes: ...

    def end(self) -> bytes: ...

    def error(self, error: RequestError) -> bytes:
        """Writes an error as the event that ends a stream which has begun."""
        ...

    def whole(self, results: Sequence[ChoiceResult], prompts: Sequence[PromptInfo]) -> Any:
        """Writes the JSON body of an answer that is not streamed, as bytes or as what is to be
        encoded. results: all best_of of every prompt.
        """
        ...


class ApiRequest(msgspec.Struct, frozen=True):
    """A parsed body. `parse(body, limits, bearer=None)` of each API's module makes it.

    bearer: the value of `Authorization: Bearer …`; lent to the Hub only if it is a Hub token.
    form: makes the API's formatter. options: how the request wants its answer, as `form` reads it.
    """

    call: GenerationCall
    form: Callable[[AnswerHead, Any], Formatter]
    options: Any

    def formatter(self, head: AnswerHead) -> Formatter:
        return self.form(head, self.options)
