"""The arithmetic of quotas: tokens that a request reserves, and those refunded at its end. Pure.

Whole numbers only, so that the Lua script of `router/shared/lua` reaches the same ones. A bucket's
level is in 1/60000 of a request or token: a limit per minute refills `limit` of those each ms.
"""

from collections.abc import Sequence
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

UNIT = 60_000
# What a request that does not say `max_tokens` reserves for its output.
UNSTATED_TOKENS = 1024
_CONCURRENCY_RETRY_MS = 1000

Amount = Annotated[int, Meta(ge=1, le=2**31 - 1)]
Reason = Literal["requests", "tokens", "concurrency", "budget"]
REASONS: tuple[Reason, ...] = ("requests", "tokens", "concurrency", "budget")


class Limits(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Limits on a key or tenant. None = no limit. A minute's worth may be used at once, and refills
    evenly.

    concurrency: requests being answered. budget_tokens: in each period of `budget_period_s`,
    periods counted from 1970-01-01 UTC (86400: from midnight to midnight).
    """

    requests_per_minute: Amount | None = None
    tokens_per_minute: Amount | None = None
    concurrency: Amount | None = None
    budget_tokens: Annotated[int, Meta(ge=1, le=2**46)] | None = None
    budget_period_s: Amount = 86400


class Subject(msgspec.Struct, frozen=True):
    """A key or a tenant whose use is counted: `key:<id>` or `tenant:<name>`."""

    name: str
    limits: Limits


class Ask(msgspec.Struct, frozen=True):
    """One request before it starts; every subject must have room. lease: names the request, which
    takes its place (concurrency, and one of the requests a minute) once.

    tokens: reserved, prompt and output together; 0 = they are not known yet. lease_ms: how long it
    counts as running unless it is settled or renewed.
    """

    tenant: str
    subjects: tuple[Subject, ...]
    lease: str
    tokens: int
    lease_ms: int = 60_000


class QuotaAccount(msgspec.Struct):
    """The remembered state of a subject. Absent levels are full. leases: request -> end, in ms."""

    requests: int | None = None
    requests_at: int = 0
    tokens: int | None = None
    tokens_at: int = 0
    window: int = 0
    used: int = 0
    leases: dict[str, int] = {}


class Standing(msgspec.Struct, frozen=True):
    """The state of one subject after a decision.

    Levels are in 1/UNIT. used: tokens of the budget's period `window`.
    """

    requests: int
    tokens: int
    window: int
    used: int
    running: int


class Verdict(msgspec.Struct, frozen=True):
    """The answer to a request for quota. reason: None = admitted; else what is used up, with the
    subject at fault and how long.
    """

    now_ms: int
    standings: tuple[Standing, ...]
    reason: Reason | None = None
    subject: int = 0
    retry_ms: int = 0


def admit(accounts: Sequence[QuotaAccount], ask: Ask, now_ms: int) -> Verdict:
    """Takes what is asked for from every account, or from none. accounts: the subjects'."""
    for account, subject in zip(accounts, ask.subjects, strict=True):
        _bring_up(account, subject.limits, now_ms)
    worst: tuple[int, int, Reason] | None = None
    for index, (account, subject) in enumerate(zip(accounts, ask.subjects, strict=True)):
        for retry_ms, reason in _obstacles(account, subject.limits, ask, now_ms):
            if worst is None or retry_ms > worst[0]:
                worst = retry_ms, index, reason
    if worst is None:
        for account in accounts:
            _take(account, ask, now_ms)
    standings = tuple(
        _standing(account, subject.limits)
        for account, subject in zip(accounts, ask.subjects, strict=True)
    )
    if worst is None:
        return Verdict(now_ms, standings)
    return Verdict(now_ms, standings, worst[2], worst[1], worst[0])


def settle(
    accounts: Sequence[QuotaAccount], ask: Ask, windows: Sequence[int], used: int, now_ms: int
) -> int:
    """Settles a request in its subjects' accounts. The request is over and used so many tokens.
    Counts once: the lease must be there.

    windows: each subject's, as in the verdict. Returns for how many subjects it counted.
    """
    counted = 0
    for account, subject, window in zip(accounts, ask.subjects, windows, strict=True):
        if account.leases.pop(ask.lease, None) is None:
            continue
        counted += 1
        _bring_up(account, subject.limits, now_ms)
        if account.tokens is not None:
            per_minute = subject.limits.tokens_per_minute or 0
            account.tokens = min(per_minute * UNIT, account.tokens + (ask.tokens - used) * UNIT)
        if account.window == window:
            account.used = max(0, account.used + used - ask.tokens)
    return counted


def share(limits: Limits, parts: int) -> Limits:
    """One of `parts` equal shares, at least 1 of each."""

    def part(limit: int | None) -> int | None:
        return None if limit is None else max(1, limit // max(1, parts))

    return Limits(
        part(limits.requests_per_minute),
        part(limits.tokens_per_minute),
        part(limits.concurrency),
        part(limits.budget_tokens),
        limits.budget_period_s,
    )


def is_idle(account: QuotaAccount, limits: Limits, now_ms: int) -> bool:
    """Whether nothing would be lost if it were forgotten."""
    _bring_up(account, limits, now_ms)
    full = (
        account.requests in (None, (limits.requests_per_minute or 0) * UNIT),
        account.tokens in (None, (limits.tokens_per_minute or 0) * UNIT),
    )
    return all(full) and not account.used and not account.leases


def window_of(limits: Limits, now_ms: int) -> int:
    return now_ms // (limits.budget_period_s * 1000)


def _bring_up(account: QuotaAccount, limits: Limits, now_ms: int) -> None:
    """Brings an account to the present: buckets refill, leases end, a new period begins."""
    account.requests = _refill(
        account.requests, account.requests_at, limits.requests_per_minute, now_ms
    )
    account.tokens = _refill(account.tokens, account.tokens_at, limits.tokens_per_minute, now_ms)
    account.requests_at = account.tokens_at = now_ms
    window = window_of(limits, now_ms)
    if account.window != window:
        account.window, account.used = window, 0
    account.leases = {lease: end for lease, end in account.leases.items() if end > now_ms}


def _refill(level: int | None, at: int, per_minute: int | None, now_ms: int) -> int | None:
    if per_minute is None:
        return None
    full = per_minute * UNIT
    if level is None:
        return full
    return min(full, level + per_minute * max(0, now_ms - at))


def _obstacles(
    account: QuotaAccount, limits: Limits, ask: Ask, now_ms: int
) -> list[tuple[int, Reason]]:
    """Reasons that keep the request out, and for how many ms. It will take one token at least."""
    found: list[tuple[int, Reason]] = []
    tokens, has_place = max(1, ask.tokens), ask.lease in account.leases
    if limits.requests_per_minute and account.requests is not None and not has_place:
        missing = UNIT - account.requests
        if missing > 0:
            found.append((-(-missing // limits.requests_per_minute), "requests"))
    if limits.tokens_per_minute and account.tokens is not None:
        # More than a minute's worth is let in when nothing is used, and paid off afterwards.
        missing = min(tokens, limits.tokens_per_minute) * UNIT - account.tokens
        if missing > 0:
            found.append((-(-missing // limits.tokens_per_minute), "tokens"))
    if limits.concurrency and len(account.leases) >= limits.concurrency and not has_place:
        found.append((_CONCURRENCY_RETRY_MS, "concurrency"))
    if limits.budget_tokens and account.used + tokens > limits.budget_tokens:
        period_ms = limits.budget_period_s * 1000
        found.append(((account.window + 1) * period_ms - now_ms, "budget"))
    return found


def _take(account: QuotaAccount, ask: Ask, now_ms: int) -> None:
    if account.requests is not None and ask.lease not in account.leases:
        account.requests -= UNIT
    if account.tokens is not None:
        account.tokens -= ask.tokens * UNIT
    account.used += ask.tokens
    account.leases[ask.lease] = now_ms + ask.lease_ms


def _standing(account: QuotaAccount, limits: Limits) -> Standing:
    return Standing(
        account.requests or 0,
        account.tokens or 0,
        account.window,
        account.used,
        len(account.leases),
    )
