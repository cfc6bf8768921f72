"""What bodies of OpenAI's completions and chat routes share: fields and their checks. Pure."""

from collections.abc import Sequence
from typing import Annotated, Any, TypeVar

import msgspec
from msgspec import Meta

from router.api.body import decode_body, require
from router.api.fields import (
    NonNegative,
    Penalty,
    Positive,
    Probability,
    RepetitionPenalty,
    StopString,
    TopK,
    check_stops,
    choose_adapter,
    credential,
    temperature_of,
)
from router.api.formatter import ApiLimits
from router.api.openai_answer import UsageIn
from router.generation import BASE_PLACEHOLDERS, AdapterChoice, RequestError
from server.protocol import SamplingParams

# Fields that change nothing about the text, whatever they say.
HARMLESS = frozenset(
    ("metadata", "store", "service_tier", "safety_identifier", "parallel_tool_calls")
    + ("prompt_cache_key", "prompt_cache_retention", "prediction", "moderation")
)


class StreamOptions(msgspec.Struct, frozen=True):
    """include_usage: one more chunk, with the counts, before `[DONE]`. continuous_usage_stats
    (vLLM's): and the counts so far in each chunk."""

    include_usage: bool | None = None
    include_obfuscation: bool | None = None
    continuous_usage_stats: bool | None = None


class OpenAIBody(msgspec.Struct, frozen=True, kw_only=True):
    """Fields of both routes; every optional one may be null.

    model: an adapter's alias or reference, or the base's name. From top_k on: extensions.
    """

    model: str
    n: Positive | None = None
    seed: Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)] | None = None
    stop: str | list[StopString] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    top_p: Probability | None = None
    frequency_penalty: Penalty | None = None
    presence_penalty: Penalty | None = None
    logit_bias: (
        dict[Annotated[int, Meta(ge=0, le=2**31 - 1)], Annotated[float, Meta(ge=-100, le=100)]]
        | None
    ) = None
    user: str | None = None
    top_k: TopK | None = None
    min_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    typical_p: Probability | None = None
    repetition_penalty: RepetitionPenalty | None = None
    ignore_eos: bool | None = None
    ignore_eos_token: bool | None = None
    min_tokens: NonNegative | None = None
    stop_token_ids: list[NonNegative] | None = None
    adapter_source: str | None = None
    api_token: str | None = None


B = TypeVar("B", bound=OpenAIBody)


def decode_openai(body: bytes, kind: type[B], unsupported: Sequence[str]) -> B:
    """The typed body. Fields that it does not know are refused unless they are harmless or null.

    Raises RequestError.
    """
    request, plain = decode_body(body, kind)
    for name, value in plain.items():
        if value is None or name in kind.__struct_fields__ or name in HARMLESS:
            continue
        if name not in unsupported:
            raise _unknown(name)
        if not _asks_for_nothing(name, value):
            raise RequestError("unsupported", f"`{name}` is not supported yet", param=name)
    require(
        request.stream_options is None or request.stream,
        "only allowed when `stream` is true",
        "stream_options",
    )
    for name, value in (plain.get("stream_options") or {}).items():
        if value is not None and name not in StreamOptions.__struct_fields__:
            raise _unknown(f"stream_options.{name}")
    require(isinstance(plain.get("metadata"), dict | None), "expected an object", "metadata")
    return request


def adapter_of(request: OpenAIBody, limits: ApiLimits, bearer: str | None) -> AdapterChoice | None:
    """Raises RequestError."""
    if not request.model or request.model in BASE_PLACEHOLDERS:
        return None
    token = credential(request.api_token, bearer)
    return choose_adapter(request.model, request.adapter_source, token, "model", limits)


def stops_of(request: OpenAIBody, limits: ApiLimits) -> tuple[str, ...]:
    """Raises RequestError."""
    stop = request.stop
    return check_stops([stop] if isinstance(stop, str) else stop or [], limits)


def seed_of(request: OpenAIBody) -> int | None:
    """OpenAI's seeds are signed; the generator's are their 64 bits."""
    return None if request.seed is None else request.seed % 2**64


def usage_wanted(request: OpenAIBody) -> UsageIn:
    options = request.stream_options
    if options is None or not options.include_usage:
        return "none"
    return "each" if options.continuous_usage_stats else "last"


def sampling_of(
    request: OpenAIBody,
    limits: ApiLimits,
    *,
    max_tokens: int | None,
    logprobs: int | None,
    prompt_logprobs: int | None = None,
) -> SamplingParams:
    """What the request says, else the model's own defaults, else OpenAI's. Raises RequestError."""
    _check_lists(request, limits)
    least = request.min_tokens or 0
    require(
        max_tokens is None or least <= max_tokens,
        f"expected at most the {max_tokens} tokens to generate, got {least}",
        "min_tokens",
    )
    require(
        (logprobs or 0) <= limits.max_logprobs,
        f"expected at most {limits.max_logprobs}, got {logprobs}",
        "logprobs",
    )

    def chosen(name: str, default: float) -> float:
        value: float | None = getattr(request, name)
        return limits.sampling_defaults.get(name, default) if value is None else value

    return SamplingParams(
        temperature=temperature_of(chosen("temperature", 1.0)),
        top_k=max(0, int(chosen("top_k", 0))),
        top_p=chosen("top_p", 1.0),
        min_p=chosen("min_p", 0.0),
        typical_p=chosen("typical_p", 1.0),
        repetition_penalty=chosen("repetition_penalty", 1.0),
        frequency_penalty=request.frequency_penalty or 0.0,
        presence_penalty=request.presence_penalty or 0.0,
        min_tokens=least,
        ignore_eos=bool(request.ignore_eos or request.ignore_eos_token),
        stop_token_ids=tuple(request.stop_token_ids or ()),
        logit_bias=request.logit_bias or {},
        logprobs=logprobs,
        prompt_logprobs=prompt_logprobs,
    )


def _check_lists(request: OpenAIBody, limits: ApiLimits) -> None:
    for name, most in (
        ("logit_bias", limits.max_logit_bias),
        ("stop_token_ids", limits.max_stop_token_ids),
    ):
        size = len(getattr(request, name) or ())
        require(size <= most, f"expected at most {most} entries, got {size}", name)


def _unknown(name: str) -> RequestError:
    message = f"Unrecognized request argument supplied: {name[:100]}"
    return RequestError("invalid", message, param=name[:100])


def _asks_for_nothing(name: str, value: Any) -> bool:
    """Values of unsupported fields that are what is done anyway."""
    if name == "response_format":
        return isinstance(value, dict) and value.get("type") == "text"
    if name in ("tool_choice", "function_call"):
        # Tools to choose from are refused by their own name.
        return value in ("auto", "none")
    if name == "best_of":
        return bool(value == 1 and not isinstance(value, bool))
    if name == "reasoning_effort":
        return bool(value == "none")
    return bool(value in ([], "", ["text"]))
