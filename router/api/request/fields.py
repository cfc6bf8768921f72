"""Fields that several APIs share: types with their ranges, bounds that options set, the adapter and
the sampling that they ask for. Pure."""

from collections.abc import Collection, Mapping, Sequence
from hashlib import sha256
from typing import Annotated, Any, NamedTuple, cast, get_args

import msgspec
from msgspec import Meta

from loraplex.adapters.errors import AdapterError
from loraplex.adapters.merge.recipe import (
    MAX_MEMBERS,
    MAX_WEIGHT,
    SIGN_METHODS,
    STRATEGIES,
    MergeStrategy,
    SignMethod,
)
from loraplex.adapters.ref import RefSource, parse_ref
from loraplex.router.api.request.body import require
from loraplex.router.api.request.formatter import ApiLimits
from loraplex.router.api.request.known_elsewhere import Body, unsupported
from loraplex.router.call import AdapterChoice, GenerationCall, MergedChoice, RequestError, Secret
from loraplex.router.text.stop_patterns import compiled
from loraplex.server.protocol import SamplingParams

MAX_INT32 = 2**31 - 1
# Characters of a pattern.
MAX_PATTERN = 256
# The engine divides logits by the temperature: what lies below this is greedy.
LEAST_TEMPERATURE = 1e-5
# OpenAI's 0 keeps the likeliest token alone, and so does this: one of a vocabulary is likelier.
LEAST_TOP_P = 1e-9

NonNegative = Annotated[int, Meta(ge=0, le=MAX_INT32)]
Positive = Annotated[int, Meta(ge=1, le=MAX_INT32)]
# 0 and -1 are off.
TopK = Annotated[int, Meta(ge=-1, le=MAX_INT32)]
# -1 = any number.
ThinkingTokens = Annotated[int, Meta(ge=-1, le=MAX_INT32)]
Probability = Annotated[float, Meta(gt=0, le=1)]
Penalty = Annotated[float, Meta(ge=-2, le=2)]
RepetitionPenalty = Annotated[float, Meta(ge=1e-3, le=1e3)]
UnitInterval = Annotated[float, Meta(ge=0, le=1)]
StopString = Annotated[str, Meta(min_length=1)]
# `check_patterns` refuses others, in its own words.
Pattern = Annotated[str, Meta(extra_json_schema={"minLength": 1, "maxLength": MAX_PATTERN})]
LogitBias = dict[NonNegative, Annotated[float, Meta(ge=-100, le=100)]]
# Steps behind the caller's own: nobody raises what the key was given.
Priority = Annotated[int, Meta(ge=0, le=100)]
CacheSalt = Annotated[str, Meta(min_length=1, max_length=1024)]
# Kinds of log-probabilities, by vLLM's names and by short ones -> whether they are processed.
LOGPROBS_MODES = {"raw": False, "processed": True, "raw_logprobs": False} | {
    "processed_logprobs": True
}
LogprobsMode = Annotated[str, Meta(extra_json_schema={"enum": [*LOGPROBS_MODES]})]
# The caller's own, in place of the request's.
RequestId = Annotated[str, Meta(min_length=1, max_length=128)]

SOURCES = ("hub", "local", "s3", "https", "modelscope")
# Only what asks for nothing: the feature is not served.
Off = Annotated[bool | None, Meta(extra_json_schema={"enum": [None, False]})]
_HUB_TOKEN_PREFIX = "hf_"


class Bound(NamedTuple):
    """A bound that options set. things: entries of a list or map; "" = the field is a number.

    most, longest: fields of ApiLimits; of the number or the entries, and of each text. least:
    entries.
    """

    most: str
    things: str = ""
    least: int = 0
    longest: str = ""

    def check(self, value: Any, param: str, limits: ApiLimits) -> None:
        """Checks a number, or how many entries and how long texts are. Raises RequestError."""
        most: int = getattr(limits, self.most)
        if not self.things:
            number = 0 if isinstance(value, bool | None) else value  # a chat's `logprobs` is a bool
            require(number <= most, f"expected at most {most}, got {number}", param)
        elif isinstance(value, list | dict):
            expected = f"{self.least} to {most}" if self.least else f"at most {most}"
            message = f"expected {expected} {self.things}, got {len(value)}"
            require(self.least <= len(value) <= most, message, param)
        if self.longest:
            longest: int = getattr(limits, self.longest)
            for text in texts_of(value):
                size = f"{self.things} of 1 to {longest} characters, got {len(text)}"
                require(0 < len(text) <= longest, f"expected {size}", param)


_LOGPROBS = Bound("max_logprobs")
_LOGPROB_IDS = Bound("max_logprobs", "ids")
_STOPS = Bound("max_stop_sequences", "stop strings", longest="max_stop_chars")
# By field: what `check_bounds` checks, and what `/openapi.json` says.
BOUNDS = {
    "n": Bound("max_n"),
    "best_of": Bound("max_n"),
    "logprobs": _LOGPROBS,
    "top_logprobs": _LOGPROBS,
    "prompt_logprobs": _LOGPROBS,
    "return_k_alternatives": _LOGPROBS,
    "top_n_tokens": _LOGPROBS,
    "top_logprobs_num": _LOGPROBS,
    "logprob_token_ids": _LOGPROB_IDS,
    "label_token_ids": _LOGPROB_IDS,
    "stop": _STOPS,
    "stop_sequences": _STOPS,
    "stop_regex": Bound("max_stop_sequences", "patterns"),
    "stop_token_ids": Bound("max_stop_token_ids", "entries"),
    "logit_bias": Bound("max_logit_bias", "entries"),
    "bad_words": Bound("max_bad_words", "words", longest="max_stop_chars"),
    "messages": Bound("max_messages", "messages", least=1),
    "input": Bound("max_messages", "items"),
}


def check_bounds(body: msgspec.Struct, limits: ApiLimits) -> None:
    """Checks each field of the body that has a bound in `BOUNDS`. Raises RequestError."""
    for name in body.__struct_fields__:
        if name in BOUNDS:
            BOUNDS[name].check(getattr(body, name), name, limits)


def texts_of(given: str | Sequence[str] | None) -> tuple[str, ...]:
    """Lists the texts of a field that may hold one text or several."""
    return (given,) if isinstance(given, str) else tuple(given or ())


def check_patterns(given: str | Sequence[str] | None, param: str) -> tuple[str, ...]:
    """Reads patterns, and checks that each compiles and is not too long. Raises RequestError."""
    patterns = texts_of(given)
    for pattern in patterns:
        size = f"expected patterns of 1 to {MAX_PATTERN} characters, got {len(pattern)}"
        require(0 < len(pattern) <= MAX_PATTERN, size, param)
        try:
            compiled(pattern)
        except ValueError as error:
            raise RequestError("invalid", f"`{param}`: {error}", param=param) from error
    return patterns


def within_base(model: str, base_names: Collection[str]) -> str:
    """The adapter of SGLang's `base:adapter`, "" of `base:`; any other name as it is. A base that
    is called as a source of adapters is (`hub`) hides no reference."""
    if model in base_names:
        return model
    for base in sorted(base_names, key=len, reverse=True):
        if base not in get_args(RefSource) and model.startswith(f"{base}:"):
            return model[len(base) + 1 :]
    return model


def choose_adapter(
    name: str | None,
    source: str | None,
    token: str | None,
    param: str,
    limits: ApiLimits,
) -> AdapterChoice | None:
    """The adapter that the caller names, None for the base. Raises RequestError."""
    if not name or (name in limits.base_names and not source):
        return None
    if source == "pbase":
        message = "`adapter_source`: adapters from Predibase are not supported yet"
        raise RequestError("unsupported", message, param="adapter_source")
    require(
        not source or source in SOURCES,
        f"expected one of {', '.join(SOURCES)}; got {source!r:.40}",
        "adapter_source",
    )
    try:
        ref = parse_ref(name, cast(RefSource, source or limits.default_source))
    except AdapterError as error:
        raise RequestError("invalid", f"`{param}`: {error.message}", param=param) from None
    require(
        not source or ref.source in (source, "alias"),
        f"{source!r} contradicts the adapter's own source {ref.source!r}",
        "adapter_source",
    )
    return AdapterChoice(name, ref, Secret(token) if token else None)


def credential(api_token: str | None, bearer: str | None) -> str | None:
    """The caller's credential for the adapter's source: the one named so, or a Hub token as bearer.

    Other bearers are keys for this service, or the placeholder that some SDKs insist on sending;
    they are nobody else's business.
    """
    if api_token:
        return api_token
    return bearer if bearer and bearer.startswith(_HUB_TOKEN_PREFIX) else None


def prompts_of(
    given: str | list[str | int | list[int]], param: str, most: int
) -> tuple[str | list[int], ...]:
    """Prompts of one kind: texts, lists of ids, or one prompt's ids. Raises RequestError."""
    if isinstance(given, str):
        return (given,)
    require(given, "expected at least one prompt", param)
    ids = [item for item in given if isinstance(item, int)]
    if ids:
        require(len(ids) == len(given), "expected token ids only, or none", param)
        return (ids,)
    require(len(given) <= most, f"expected at most {most} prompts, got {len(given)}", param)
    several = tuple(item for item in given if not isinstance(item, int))
    texts = sum(isinstance(item, str) for item in several)
    require(texts in (0, len(several)), "expected texts only, or lists of token ids only", param)
    require(all(item or item == "" for item in several), "expected no empty list", param)
    return several


_FIELD = "merged_adapters"
_IDS = f"{_FIELD}.ids"
_WEIGHTS = f"{_FIELD}.weights"


def _one(known: Collection[str]) -> dict[str, Any]:
    return {"enum": [None, *known]}


_MEMBERS = Meta(extra_json_schema={"minItems": 1, "maxItems": MAX_MEMBERS})
_MergeWeight = Annotated[
    float, Meta(extra_json_schema={"minimum": -MAX_WEIGHT, "maximum": MAX_WEIGHT})
]


class MergedAdapters(msgspec.Struct, frozen=True):
    """Adapters that are merged for one request. ids, weights: as many of the one as of the other.
    merge_strategy: linear by default.

    density: needed for `ties` and `dare_*`. majority_sign_method: total by default.
    """

    ids: Annotated[list[str], _MEMBERS]
    weights: Annotated[list[_MergeWeight], _MEMBERS] = []
    merge_strategy: Annotated[str | None, Meta(extra_json_schema=_one(STRATEGIES))] = None
    density: float | None = None
    majority_sign_method: Annotated[str | None, Meta(extra_json_schema=_one(SIGN_METHODS))] = None


def choose_merge(
    given: MergedAdapters, source: str | None, token: str | None, limits: ApiLimits
) -> MergedChoice:
    """Makes a merge's choice, with fields checked and defaults. Raises RequestError."""
    strategy = _one_of("merge_strategy", given.merge_strategy, STRATEGIES)
    sign = _one_of("majority_sign_method", given.majority_sign_method, SIGN_METHODS)
    _check_numbers(given, strategy)
    return MergedChoice(
        members=tuple(
            _member(index, name, source, token, limits) for index, name in enumerate(given.ids)
        ),
        weights=tuple(given.weights),
        strategy=cast(MergeStrategy, strategy),
        density=1.0 if strategy == "linear" else given.density or 0.0,
        majority_sign_method=cast(SignMethod, sign),
    )


def choose_scaled(adapter: AdapterChoice, scale: float) -> AdapterChoice:
    """Returns the adapter with this scale, by which what it adds is multiplied. Raises RequestError
    for 0, and for a scale beyond `MAX_WEIGHT`.
    """
    require(scale != 0, "0 is the base: leave the adapter out", "adapter_scale")
    require(
        abs(scale) <= MAX_WEIGHT,
        f"expected a scale within +-{MAX_WEIGHT:g}, got {scale:g}",
        "adapter_scale",
    )
    return msgspec.structs.replace(adapter, scale=scale)


def _one_of(name: str, value: str | None, known: tuple[str, ...]) -> str:
    """Checks that a name is one of the known ones; the first is the default."""
    chosen = known[0] if value is None else value
    expected = ", ".join(known)
    require(chosen in known, f"expected one of {expected}, got {chosen!r:.40}", f"{_FIELD}.{name}")
    return chosen


def _check_numbers(given: MergedAdapters, strategy: str) -> None:
    count = len(given.ids)
    require(1 <= count <= MAX_MEMBERS, f"expected 1 to {MAX_MEMBERS} adapters, got {count}", _IDS)
    require(
        len(given.weights) == count,
        f"expected a weight for each of {count} ids, got {len(given.weights)}",
        _WEIGHTS,
    )
    for weight in given.weights:
        require(
            abs(weight) <= MAX_WEIGHT,
            f"expected weights within +-{MAX_WEIGHT:g}, got {weight:g}",
            _WEIGHTS,
        )
    require(any(given.weights), "at least one weight must differ from 0", _WEIGHTS)
    density = given.density or 0.0
    require(
        strategy == "linear" or 0 < density <= 1,
        f"expected a density above 0 and at most 1 for {strategy!r}, got {density:g}",
        f"{_FIELD}.density",
    )


def _member(
    index: int, name: str, source: str | None, token: str | None, limits: ApiLimits
) -> AdapterChoice:
    param = f"{_IDS}[{index}]"
    choice = choose_adapter(name, source, token, param, limits)
    if choice is None:
        message = f"`{param}`: expected an adapter, got the base model"
        raise RequestError("invalid", message, param=param)
    return choice


class AdapterFields(Body, frozen=True, kw_only=True):
    """Fields about an adapter, its name apart; each may be null.

    merged_adapters: instead of an adapter. adapter_scale: of what the adapter adds.
    """

    adapter_source: Annotated[
        str | None, Meta(extra_json_schema={"enum": [None, "", *SOURCES]})
    ] = None
    merged_adapters: MergedAdapters | None = None
    adapter_scale: float | None = None
    api_token: str | None = None


class GenerationFields(AdapterFields, frozen=True, kw_only=True):
    """Fields of every request that generates text. Each may be null. priority: how far behind the
    key's own the request stands. drafts: false = the answer has none, which is never another
    answer. logprobs_mode: what the logprobs of generated tokens are, where there are any.
    """

    top_p: Probability | None = None
    top_k: TopK | None = None
    min_p: UnitInterval | None = None
    typical_p: Probability | None = None
    repetition_penalty: RepetitionPenalty | None = None
    frequency_penalty: Penalty | None = None
    presence_penalty: Penalty | None = None
    logit_bias: LogitBias | None = None
    min_tokens: NonNegative | None = None
    stop_token_ids: list[NonNegative] | None = None
    ignore_eos_token: bool | None = None
    skip_special_tokens: bool | None = None
    priority: Priority | None = None
    cache_salt: CacheSalt | None = None
    drafts: bool | None = None
    logprobs_mode: LogprobsMode | None = None


def adapter_named(
    fields: AdapterFields,
    name: str | None,
    param: str,
    limits: ApiLimits,
    bearer: str | None,
    needs: str,
) -> AdapterChoice | MergedChoice | None:
    """The adapter that field `param` names, or the default one, or those to be merged; None for the
    base. needs: the error of fields that need an adapter, where the base is named. Raises
    RequestError."""
    token, source = credential(fields.api_token, bearer), fields.adapter_source
    merged, scale = fields.merged_adapters, fields.adapter_scale
    if merged is not None:
        base = not name or name in limits.base_names
        require(base, f"it and the adapter in `{param}` cannot both be given", "merged_adapters")
        require(scale is None, "`merged_adapters.weights` are the scales", "adapter_scale")
        return choose_merge(merged, source, token, limits)
    adapter = choose_adapter(name or limits.default_adapter, source, token, param, limits)
    for extra in ("adapter_source", "api_token", "adapter_scale"):
        require(adapter or not getattr(fields, extra), needs, extra)
    return adapter if adapter is None or scale is None else choose_scaled(adapter, scale)


def check_counts(fields: GenerationFields, max_tokens: int | None, limits: ApiLimits) -> None:
    """Checks counts and sizes. max_tokens: None = all that fit. Raises RequestError."""
    check_bounds(fields, limits)
    least = fields.min_tokens or 0
    require(
        max_tokens is None or least <= max_tokens,
        f"expected at most the {max_tokens} tokens to generate, got {least}",
        "min_tokens",
    )


_DRAWN = tuple({*GenerationFields.__struct_fields__} & {*SamplingParams.__struct_fields__})


def sampling_params(
    fields: GenerationFields,
    advised: Mapping[str, float],
    *,
    temperature: float,
    ignore_eos: bool,
    logprobs: int | None,
    prompt_logprobs: int | None,
    processed: bool,
) -> SamplingParams:
    """Takes what the fields say of a draw, else the model's advice, else what changes nothing.
    processed: whether logprobs are, where the fields do not say. Raises RequestError.
    """
    said = {name: getattr(fields, name) for name in _DRAWN}
    found = {name: advised.get(name) if value is None else value for name, value in said.items()}
    drawn: dict[str, Any] = {name: value for name, value in found.items() if value is not None}
    if "top_p" in drawn:
        drawn["top_p"] = max(drawn["top_p"], LEAST_TOP_P)
    whole = {name: max(0, int(drawn.get(name, 0))) for name in ("top_k", "min_tokens")}
    return SamplingParams(
        **drawn | whole | {"stop_token_ids": tuple(fields.stop_token_ids or ())},
        temperature=0.0 if temperature < LEAST_TEMPERATURE else temperature,
        ignore_eos=ignore_eos,
        logprobs=logprobs,
        prompt_logprobs=prompt_logprobs,
        processed_logprobs=_is_processed(fields.logprobs_mode, processed),
    )


def _is_processed(mode: str | None, default: bool) -> bool:
    if mode is None:
        return default
    if mode in ("raw_logits", "processed_logits"):
        raise unsupported("logprobs_mode", "logits are not sent, log-probabilities are")
    expected = f"expected one of {', '.join(LOGPROBS_MODES)}; got {mode!r:.40}"
    require(mode in LOGPROBS_MODES, expected, "logprobs_mode")
    return LOGPROBS_MODES[mode]


def with_fields(call: GenerationCall, fields: GenerationFields) -> GenerationCall:
    """Adds to a call all fields that are no sampling."""
    return msgspec.structs.replace(
        call,
        skip_special_tokens=fields.skip_special_tokens is not False,
        cache_salt=salt_of(fields.cache_salt),
        priority=fields.priority or 0,
        drafts=fields.drafts is not False,
    )


def salt_of(cache_salt: str | None) -> str:
    """The SHA-256 of a cache salt, which may be secret and gets one length on the wire."""
    return sha256(cache_salt.encode()).hexdigest() if cache_salt else ""
