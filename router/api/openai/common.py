"""Shared by the bodies of OpenAI's routes: fields, their checks, the form of an answer, and whether
and how long the model reasons. Pure.

Of the latter's fields `enable_thinking` and `thinking_budget` are Qwen's and LMDeploy's, `thinking`
that of DeepSeek, GLM and Anthropic, `reasoning` OpenRouter's.
"""

from typing import Annotated, Any, ClassVar, Literal, NamedTuple, TypeVar

import msgspec
from msgspec import Meta

from loraplex.adapters.chat.conversation import ReasoningEffort
from loraplex.router.api.openai.openai_formatter import AnswerOptions, UsageIn
from loraplex.router.api.request.body import agreed, decode_plain, require, same
from loraplex.router.api.request.fields import (
    MAX_INT32,
    AdapterFields,
    GenerationFields,
    NonNegative,
    Pattern,
    Positive,
    RequestId,
    StopString,
    ThinkingTokens,
    UnitInterval,
    adapter_named,
    check_counts,
    check_patterns,
    sampling_params,
    texts_of,
    with_fields,
    within_base,
)
from loraplex.router.api.request.formatter import ApiLimits
from loraplex.router.api.request.known_elsewhere import (
    check_unknown_parts,
    typed_by_aliases,
    unsupported,
)
from loraplex.router.api.request.shapes import (
    StructuredOutputs,
    check_ends,
    choice_of,
    format_shape,
    grammar_of,
    json_of,
    only_shape,
    regex_of,
    structured_shapes,
    whitespace_of,
)
from loraplex.router.call import BASE_PLACEHOLDERS, AdapterChoice, GenerationCall, MergedChoice
from loraplex.router.shape.shape import AnyJson, Shape
from loraplex.server.protocol import SamplingParams

# Fields that change nothing about the text, whatever they say.
HARMLESS = frozenset(
    ("metadata", "store", "service_tier", "safety_identifier")
    + ("prompt_cache_key", "prompt_cache_retention", "prompt_cache_options", "prediction")
    + ("moderation", "session_id", "client_metadata", "keep_alive", "cache_prompt")
)
LORA_PATH = "lora_path"
WHOLE_AT_MINUS_ONE = ("logprobs", "top_logprobs", "prompt_logprobs")
# Tokens that are kept; -1 = as many as fit. Nothing at all is no prompt.
Truncation = Annotated[int, Meta(ge=-1, le=MAX_INT32, extra_json_schema={"not": {"const": 0}})]


class StreamOptions(msgspec.Struct, frozen=True):
    """Options of a stream. include_usage: one more chunk, with the counts, before `[DONE]`.
    continuous_usage_stats (vLLM's): the counts so far in each chunk, as well.
    """

    include_usage: bool | None = None
    include_obfuscation: bool | None = None
    continuous_usage_stats: bool | None = None


class SharedBody(GenerationFields, frozen=True, kw_only=True):
    """Fields of every route; every optional one may be null.

    model: an adapter's alias or reference, or the base's name, or both with a colon between; absent
    = the base.
    """

    harmless: ClassVar[frozenset[str]] = HARMLESS

    model: str | None = None
    seed: Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)] | None = None
    stop: str | list[StopString] | None = None
    stream: bool | None = None
    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    top_p: UnitInterval | None = None
    user: str | None = None
    ignore_eos: bool | None = None
    lora_path: str | None = None
    spaces_between_special_tokens: bool | None = None
    include_stop_str_in_output: bool | None = None
    truncate_prompt_tokens: Truncation | None = None
    truncation_side: Literal["left", "right"] | None = None
    request_id: RequestId | None = None


class OpenAIBody(SharedBody, frozen=True, kw_only=True):
    """Fields of completions and chat. From return_token_ids on: extensions.

    From structured_outputs on: forms of the answer as vLLM asks for them, SGLang from json_schema
    on, and llama.cpp, which has `grammar`. guided_decoding_backend: of no effect.
    return_hidden_states (SGLang's): of each choice, the state from which its last token was drawn.
    return_routed_experts (SGLang's): experts of each token of prompt and choice.
    """

    response_format: dict[str, Any] | None = None
    n: Positive | None = None
    stream_options: StreamOptions | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    prompt_logprobs: NonNegative | None = None
    logprob_token_ids: list[NonNegative] | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: dict[str, Any] | str | None = None
    guided_json_object: bool | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    guided_whitespace_pattern: str | None = None
    guided_decoding_backend: str | None = None
    json_schema: dict[str, Any] | str | None = None
    regex: str | None = None
    ebnf: str | None = None
    grammar: str | None = None
    allowed_token_ids: list[NonNegative] | None = None
    bad_words: list[StopString] | None = None
    stop_regex: Pattern | list[Pattern] | None = None
    return_hidden_states: bool | Literal["last"] | None = None
    return_routed_experts: bool | None = None


S = TypeVar("S", bound=SharedBody)
B = TypeVar("B", bound=OpenAIBody)


def decode_shared(plain: dict[str, Any], kind: type[S], limits: ApiLimits) -> S:
    """Reads the typed body from plain values. Fields that it does not know are refused unless they
    are harmless or ask for nothing. Raises RequestError."""
    return typed_by_aliases(_bounded(plain, limits), kind)


def decode_openai(body: bytes, kind: type[B], limits: ApiLimits) -> B:
    """Reads the typed body from JSON, as `decode_shared` checks it. Raises RequestError."""
    return typed_openai(decode_plain(body), kind, limits)


def typed_openai(plain: dict[str, Any], kind: type[B], limits: ApiLimits) -> B:
    """Reads the typed body from plain values, as `decode_openai`. Raises RequestError."""
    request = decode_shared(plain, kind, limits)
    options = plain.get("stream_options") or {}
    outputs = plain.get("structured_outputs") or {}
    check_unknown_parts(outputs, StructuredOutputs.__struct_fields__, "structured_outputs.")
    check_unknown_parts(options, StreamOptions.__struct_fields__, "stream_options.")
    require(
        request.stream or not any(options.values()),
        "only allowed when `stream` is true",
        "stream_options",
    )
    require(isinstance(plain.get("metadata"), dict | None), "expected an object", "metadata")
    return request


def adapter_of(
    request: SharedBody, limits: ApiLimits, bearer: str | None
) -> AdapterChoice | MergedChoice | None:
    """Finds the adapter that a body asks for; None for the base. Raises RequestError."""
    return adapter_by(request, request.model, request.lora_path, limits, bearer)


def adapter_by(
    fields: AdapterFields,
    model: str | None,
    path: str | None,
    limits: ApiLimits,
    bearer: str | None,
) -> AdapterChoice | MergedChoice | None:
    """The adapter named by `model`, SGLang's `base:adapter` too, or by `lora_path` or
    `merged_adapters` with the base's name. path: `lora_path`. Raises RequestError."""
    name, param = within_base(model or "", limits.base_names), "model"
    if path:
        on_base = name in (*BASE_PLACEHOLDERS, *limits.base_names)
        require(on_base or name == path, f"contradicts the adapter in `model`, {name!r}", LORA_PATH)
        name, param = path, LORA_PATH
    needs = "needs an adapter in `model`, got the base"
    named = None if name in BASE_PLACEHOLDERS else name
    return adapter_named(fields, named, param, limits, bearer, needs)


def with_shared(call: GenerationCall, request: SharedBody, limits: ApiLimits) -> GenerationCall:
    """Adds to a call what bodies of all routes say alike. Raises RequestError."""
    seed, cut = request.seed, request.truncate_prompt_tokens
    require(cut != 0, "expected at least 1, or -1 for all that fit", "truncate_prompt_tokens")
    require(
        cut is not None or request.truncation_side is None,
        "needs `truncate_prompt_tokens`",
        "truncation_side",
    )
    return msgspec.structs.replace(
        with_fields(call, request),
        stop=texts_of(request.stop),
        include_stop=bool(request.include_stop_str_in_output),
        stream=bool(request.stream),
        # OpenAI's seeds are signed; the generator's are their 64 bits.
        seed=None if seed is None else seed % 2**64,
        truncate=cut,
        truncate_keeps="first" if request.truncation_side == "right" else "last",
        user=request.user,
        rids=(request.request_id,) if request.request_id else (),
        spaces_between_special_tokens=request.spaces_between_special_tokens is not False,
    )


def options_of(request: OpenAIBody, call: GenerationCall) -> AnswerOptions:
    """Collects how the request wants its answer. Raises RequestError."""
    as_ids = bool(request.return_tokens_as_token_ids)
    logprobs = call.sampling.logprobs
    require(logprobs is not None or not as_ids, "needs `logprobs`", "return_tokens_as_token_ids")
    require(
        request.prompt_logprobs is None or not request.stream,
        "not available when streaming",
        "prompt_logprobs",
    )
    return AnswerOptions(
        n=call.n,
        logprobs=logprobs,
        prompt_logprobs=request.prompt_logprobs,
        usage=_usage_wanted(request),
        token_ids=bool(request.return_token_ids),
        tokens_as_ids=as_ids,
        id=request.request_id,
        echoes_prompt=call.echo,
    )


def sampling_of(
    request: SharedBody,
    limits: ApiLimits,
    *,
    max_tokens: int | None,
    logprobs: int | None,
    prompt_logprobs: int | None = None,
) -> SamplingParams:
    """The request's sampling, else the model's, else OpenAI's. Raises RequestError."""
    check_counts(request, max_tokens, limits)
    said = request.temperature
    return sampling_params(
        request,
        limits.sampling_defaults,
        temperature=limits.sampling_defaults.get("temperature", 1.0) if said is None else said,
        ignore_eos=bool(request.ignore_eos or request.ignore_eos_token),
        logprobs=logprobs,
        prompt_logprobs=prompt_logprobs,
        processed=limits.processed_logprobs,
    )


def _usage_wanted(request: OpenAIBody) -> UsageIn:
    options = request.stream_options
    if options is None or not options.include_usage:
        return "none"
    return "each" if options.continuous_usage_stats else "last"


def _bounded(plain: dict[str, Any], limits: ApiLimits) -> dict[str, Any]:
    """Check what no type states; write -1 logprobs as a number. Raises RequestError."""
    if isinstance(plain.get(LORA_PATH), list):
        raise unsupported(LORA_PATH, "one adapter a request: put its name into `model`")
    return whole_logprobs(plain, limits)


def whole_logprobs(plain: dict[str, Any], limits: ApiLimits) -> dict[str, Any]:
    """Writes -1 logprobs as a number of them. Raises RequestError where that is too many."""
    size, most = limits.vocab_size, limits.max_logprobs
    named = {name for name in WHOLE_AT_MINUS_ONE if same(plain.get(name), -1)}
    for name in named:
        asked = f"-1 asks for the whole vocabulary, {size} tokens; `--max-logprobs` is {most}"
        require(size <= most, asked, name)
    return plain | dict.fromkeys(named, most)


def with_shape(call: GenerationCall, request: OpenAIBody, limits: ApiLimits) -> GenerationCall:
    """Adds to a call what bodies say alike, and what its answer must be. Raises RequestError."""
    call = with_shared(call, request, limits)
    shape = _asked(request)
    ignores = "ignore_eos" if request.ignore_eos else "ignore_eos_token"
    check_ends(shape, call.sampling.ignore_eos, ignores)
    allowed, words = request.allowed_token_ids, request.bad_words or []
    require(allowed is None or allowed, "leaves no token", "allowed_token_ids")
    sampling = msgspec.structs.replace(
        _listing(call.sampling, request),
        allowed_token_ids=tuple(sorted({*(allowed or ())})),
    )
    return msgspec.structs.replace(
        call,
        shape=shape,
        lists_all=bool(request.return_token_ids),
        bad_words=tuple(words),
        sampling=sampling,
        stop_regex=check_patterns(request.stop_regex, "stop_regex"),
        last_states=bool(request.return_hidden_states),
        routed_experts=bool(request.return_routed_experts),
    )


def _listing(sampling: SamplingParams, body: OpenAIBody) -> SamplingParams:
    """Listed tokens take the likeliest's place, as in vLLM. Raises RequestError."""
    listed = body.logprob_token_ids or ()
    if not listed:
        return sampling
    require(sampling.logprobs is not None, "needs `logprobs`", "logprob_token_ids")
    return msgspec.structs.replace(sampling, logprobs=0, logprob_token_ids=tuple(listed))


def _asked(body: OpenAIBody) -> Shape | None:
    """The form that all fields ask for together. Raises RequestError, for two that differ, too."""
    spaces = whitespace_of(body.guided_whitespace_pattern, "guided_whitespace_pattern")
    guided = [
        json_of(body.guided_json, "guided_json", spaces),
        AnyJson("guided_json_object", spaces) if body.guided_json_object else None,
    ]
    require(spaces is None or any(guided), "needs `guided_json`", "guided_whitespace_pattern")
    return only_shape(
        [
            format_shape(body.response_format, "response_format"),
            *structured_shapes(body.structured_outputs),
            *guided,
            regex_of(body.guided_regex, "guided_regex"),
            choice_of(body.guided_choice, "guided_choice"),
            grammar_of(body.guided_grammar, "guided_grammar"),
            json_of(body.json_schema, "json_schema"),
            regex_of(body.regex, "regex"),
            grammar_of(body.ebnf, "ebnf"),
            grammar_of(body.grammar, "grammar"),
        ]
    )


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
