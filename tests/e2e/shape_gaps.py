"""Gaps between tokens beside answers with shapes, printed: a load on a running server.

    python -m tests.e2e.shape_gaps URL [--kinds plain,costly,...] [--rows N] [--tokens N]

A bystander streams beside N callers of each kind in turn, back to back. plain: no shape. costly: a
grammar whose masks take just under 0.1 s each. schema: an array of objects with strings of 3 to 40
characters, longer than the answers. ending: the same, and answers end as they like. mixed: no
shape, and answers of many lengths.
"""

import argparse
import asyncio
import json
import statistics
import time
from typing import Any

from loraplex.launcher.bench.load.serve import open_stream
from loraplex.launcher.bench.load.target import WORDS

COSTLY = "start: a\na: a b a | \nb: a | b a | /./\n"
_TEXT = {"type": "string", "minLength": 3, "maxLength": 40}
_ITEM = {
    "type": "object",
    "properties": {"name": _TEXT, "city": _TEXT, "note": _TEXT},
    "required": ["name", "city", "note"],
    "additionalProperties": False,
}
SCHEMA = {"type": "array", "items": _ITEM, "minItems": 200, "maxItems": 400}
SHAPES: dict[str, dict[str, Any]] = {
    "none": {},
    "plain": {},
    "mixed": {},
    "ending": {"guided_json": {"type": "array", "items": _ITEM}},
    "costly": {"guided_grammar": COSTLY},
    "schema": {"guided_json": SCHEMA},
}


class Load:
    def __init__(self, url: str, arguments: argparse.Namespace) -> None:
        self.url, self.arguments = url, arguments
        self.ended: list[str] = []

    async def stream(self, number: int, tokens: int, kind: str) -> list[float]:
        """When each event came, in seconds."""
        chosen = (WORDS[(7 * number + i) % len(WORDS)] for i in range(self.arguments.prompt))
        body = {
            "model": self.arguments.model,
            "prompt": " ".join(chosen),
            "max_tokens": tokens,
            "seed": number,
            "stream": True,
            "ignore_eos": kind in ("none", "plain", "mixed"),
            **SHAPES[kind],
        }
        body |= json.loads(self.arguments.body)
        protocol = await open_stream(f"{self.url}/v1/completions", json.dumps(body).encode(), {})
        try:
            await protocol.done
        except asyncio.CancelledError:
            protocol.abandon()
            raise
        finally:
            times = [*protocol.answer.token_s]
        if protocol.status != 200 or protocol.answer.fault:
            self.ended.append(f"{protocol.status} {protocol.answer.fault} {protocol.head[:200]!r}")
        return times

    async def beside(self, kind: str) -> None:
        """One round of a kind."""
        found: list[list[float]] = []
        begun = time.monotonic()

        async def caller(number: int) -> None:
            while True:
                number += 1000
                tokens = self.arguments.tokens
                if kind == "mixed":
                    tokens = tokens // 2 + 37 * number % tokens
                found.append(await self.stream(number, tokens, kind))

        rows = 0 if kind == "none" else self.arguments.rows
        callers = [asyncio.create_task(caller(i)) for i in range(rows)]
        await asyncio.sleep(self.arguments.settle)
        bystander = gaps([await self.stream(0, self.arguments.bystander, "plain")])
        await asyncio.sleep(max(0.0, begun + self.arguments.least - time.monotonic()))
        for task in callers:
            task.cancel()
        await asyncio.gather(*callers, return_exceptions=True)
        taken = time.monotonic() - begun
        print(f"{kind:7} bystander {said(bystander)}", flush=True)
        if found:
            print(f"        rows      {said(gaps(found))}; {sum(map(len, found)) / taken:.0f} "
                  f"events/s of {len(found)} whole answers", flush=True)  # fmt: skip
        for text in self.ended[:3]:
            print(f"        ended: {text}", flush=True)
        self.ended.clear()


def gaps(streams: list[list[float]]) -> list[float]:
    """Milliseconds."""
    return [1e3 * (b - a) for times in streams for a, b in zip(times, times[1:], strict=False)]


def said(values: list[float]) -> str:
    if len(values) < 2:
        return "no gaps"
    cuts = statistics.quantiles(values, n=100)
    p50, p90, p99 = cuts[49], cuts[89], cuts[98]
    return (
        f"p50 {p50:.2f} p90 {p90:.2f} p99 {p99:.2f} max {max(values):.2f} ms ({len(values)} gaps)"
    )


async def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("url")
    parser.add_argument("--kinds", default="none,plain,costly")
    parser.add_argument("--model", default="loraplex/demo")
    parser.add_argument("--rows", type=int, default=32)
    parser.add_argument("--prompt", type=int, default=60, help="words")
    parser.add_argument("--tokens", type=int, default=200)
    parser.add_argument("--bystander", type=int, default=400, help="tokens")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--settle", type=float, default=2.0, help="seconds")
    parser.add_argument("--least", type=float, default=10.0, help="seconds of a round")
    parser.add_argument("--body", default="{}", help="more fields of each body")
    arguments = parser.parse_args()
    load = Load(arguments.url, arguments)
    for _ in range(arguments.rounds):
        for kind in arguments.kinds.split(","):
            await load.beside(kind)


if __name__ == "__main__":
    asyncio.run(main())
