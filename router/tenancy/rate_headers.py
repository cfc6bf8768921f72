"""Headers about a caller's quotas: OpenAI's `x-ratelimit-*`, and why the caller must wait. Pure."""

from collections.abc import Sequence

from loraplex.router.policy.quota import UNIT, Reason, Subject, Verdict

_WHAT: dict[Reason, str] = {
    "requests": "the requests a minute",
    "tokens": "the tokens a minute",
    "concurrency": "the requests at a time",
    "budget": "the tokens of the budget",
}


def rate_headers(subjects: Sequence[Subject], verdict: Verdict) -> dict[str, str]:
    """Headers for the subject with the least left; none for what has no limit."""
    headers: dict[str, str] = {}
    for what in ("requests", "tokens"):
        standings: list[tuple[int, int, int]] = []
        for subject, standing in zip(subjects, verdict.standings, strict=True):
            limits = subject.limits
            is_requests = what == "requests"
            limit = limits.requests_per_minute if is_requests else limits.tokens_per_minute
            level = standing.requests if is_requests else standing.tokens
            if limit is not None:
                standings.append(
                    (max(0, level) // UNIT, limit, -(-(limit * UNIT - level) // limit))
                )
        if standings:
            left, limit, reset_ms = min(standings)
            headers[f"x-ratelimit-limit-{what}"] = str(limit)
            headers[f"x-ratelimit-remaining-{what}"] = str(left)
            headers[f"x-ratelimit-reset-{what}"] = duration(reset_ms)
    return headers


def refusal(subjects: Sequence[Subject], verdict: Verdict, tokens: int) -> str:
    """One sentence for a verdict with a reason. tokens: that the request asked for."""
    assert verdict.reason is not None
    subject = subjects[verdict.subject]
    whose = "this key" if subject.name.startswith("key:") else "this tenant"
    wait = duration(verdict.retry_ms)
    left = (subject.limits.budget_tokens or 0) - verdict.standings[verdict.subject].used
    if verdict.reason == "budget" and 0 < left < tokens:
        asked = f"the request may take {tokens} tokens, and {whose} has {left} left of its budget"
        return f"{asked}: ask for fewer, or try again in {wait}"
    return f"{_WHAT[verdict.reason]} of {whose} are used up; try again in {wait}"


def refusal_for_ever(subjects: Sequence[Subject], tokens: int) -> str | None:
    """One sentence for a request that a budget has no room for in any period."""
    budgets = [s.limits.budget_tokens for s in subjects if s.limits.budget_tokens is not None]
    if not budgets or tokens <= min(budgets):
        return None
    return f"the request may take {tokens} tokens, its budget is {min(budgets)}: ask for fewer"


def duration(ms: int) -> str:
    """Writes a time as OpenAI does: 250ms, 1.5s, 2m30s, 1h0m0s."""
    if ms < 1000:
        return f"{ms}ms" if ms else "0s"
    seconds = f"{ms % 60_000 / 1000:.3f}".rstrip("0").rstrip(".")
    minutes, hours = ms // 60_000 % 60, ms // 3_600_000
    if hours:
        return f"{hours}h{minutes}m{seconds}s"
    return f"{minutes}m{seconds}s" if minutes else f"{seconds}s"
