"""Many forms asked of a real server; what became of each request."""

from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import httpx

from loraplex.launcher.demo import EXAMPLES

TEMPERATURES = (0, 2)
AT_ONCE = 16
ENDS = {"stop", "length", "refused"}


class Asked(NamedTuple):
    """fields: of the body; they ask for the form. check: of the text of an answer that ended by
    itself; raises for one of another form. max_tokens: None = what the context leaves."""

    fields: dict[str, Any]
    check: Callable[[str], object]
    model: str
    temperature: float
    max_tokens: int | None


def outcomes(http: httpx.Client, cases: Sequence[Asked]) -> list[str]:
    """Of each: `stop` with the form asked for, `length` or `refused`."""
    with ThreadPoolExecutor(AT_ONCE) as threads:
        ends = list(threads.map(lambda asked: _outcome(http, asked), cases))
    assert set(ends) <= ENDS
    return ends


def _outcome(http: httpx.Client, asked: Asked) -> str:
    body = {
        "model": asked.model,
        "messages": [{"role": "user", "content": EXAMPLES[0]}],
        "temperature": asked.temperature,
        "seed": 5,
        "max_tokens": asked.max_tokens,
        **asked.fields,
    }
    answer = http.post("/v1/chat/completions", json=body, timeout=600)
    if answer.status_code == 400:
        assert "response_format" in answer.json()["error"]["message"], answer.text
        return "refused"
    assert answer.status_code == 200, (asked, answer.text)
    choice = answer.json()["choices"][0]
    if choice["finish_reason"] == "stop":
        asked.check(choice["message"]["content"])
    return str(choice["finish_reason"])


def ended_share(ends: Counter[str]) -> float:
    """Of those that were not refused, how many ended by themselves."""
    return ends["stop"] / max(1, ends["stop"] + ends["length"])
