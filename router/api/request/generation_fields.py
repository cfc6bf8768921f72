"""The fields that LoRAX's and OpenAI's bodies have in common, and their checks. Pure."""

from hashlib import sha256

import msgspec

from loraplex.router.api.request.body import require
from loraplex.router.api.request.fields import (
    CacheSalt,
    LogitBias,
    NonNegative,
    Penalty,
    Priority,
    Probability,
    RepetitionPenalty,
    TopK,
    UnitInterval,
    choose_adapter,
    credential,
)
from loraplex.router.api.request.formatter import ApiLimits
from loraplex.router.api.request.merge import MergedAdapters, choose_merge, choose_scaled
from loraplex.router.call import AdapterChoice, GenerationCall, MergedChoice


class AdapterFields(msgspec.Struct, frozen=True, kw_only=True):
    """What may be said of an adapter beside its name; each may be null.

    merged_adapters: instead of an adapter. adapter_scale: of what the adapter adds.
    """

    adapter_source: str | None = None
    merged_adapters: MergedAdapters | None = None
    adapter_scale: float | None = None
    api_token: str | None = None


class GenerationFields(AdapterFields, frozen=True, kw_only=True):
    """Each may be null. priority: how far behind the key's own the request stands. drafts: false =
    the answer has none, which is never another answer."""

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


def adapter_named(
    fields: AdapterFields,
    name: str | None,
    param: str,
    limits: ApiLimits,
    bearer: str | None,
    needs: str,
) -> AdapterChoice | MergedChoice | None:
    """The adapter that field `param` names, or the default one, or those to be merged; None for the
    base. needs: what the fields that say more of an adapter lack beside the base. Raises
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
    """max_tokens: to generate; None = all that fit. Raises RequestError."""
    for name, given, most in (
        ("logit_bias", fields.logit_bias, limits.max_logit_bias),
        ("stop_token_ids", fields.stop_token_ids, limits.max_stop_token_ids),
    ):
        size = len(given or ())
        require(size <= most, f"expected at most {most} entries, got {size}", name)
    least = fields.min_tokens or 0
    require(
        max_tokens is None or least <= max_tokens,
        f"expected at most the {max_tokens} tokens to generate, got {least}",
        "min_tokens",
    )


def with_fields(call: GenerationCall, fields: GenerationFields) -> GenerationCall:
    """The call, and what the fields say beside its sampling."""
    return msgspec.structs.replace(
        call,
        skip_special_tokens=fields.skip_special_tokens is not False,
        cache_salt=salt_of(fields.cache_salt),
        priority=fields.priority or 0,
        drafts=fields.drafts is not False,
    )


def salt_of(cache_salt: str | None) -> str:
    """Its SHA-256: a salt may be a secret, and has the length of one on the wire."""
    return sha256(cache_salt.encode()).hexdigest() if cache_salt else ""
