"""`make soak`: rounds of a fleet with everything on, under faults, until enough tokens came.

A round that ended stands in the record; a run that was broken off goes on with the next one.
"""

import argparse
import json
import shutil
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

import uvloop

from tests.soak.rounds import Outcome, Round, run


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.soak", description=__doc__)
    parser.add_argument("--tokens", type=int, default=10_000_000, help="of the whole run")
    parser.add_argument("--round", type=int, default=2_000_000, help="tokens of a round")
    parser.add_argument("--seed", type=int, default=1, help="of the first round; others follow")
    parser.add_argument("--clients", type=int, default=192, help="requests under way at once")
    parser.add_argument("--calm-s", type=float, default=2.0, help="longest calm between faults")
    parser.add_argument("--folder", type=Path, help="where logs are kept (default: nowhere)")
    parser.add_argument("--record", type=Path, default=Path(".cache/soak.jsonl"))
    options = parser.parse_args()
    options.record.parent.mkdir(parents=True, exist_ok=True)
    options.record.touch()
    while sum(line["tokens"] for line in _lines(options)) < options.tokens:
        seed = options.seed + len(_lines(options))
        asked = Round(seed, options.round, options.clients, calm_s=options.calm_s)
        with tempfile.TemporaryDirectory() as temporary:
            folder = (options.folder or Path(temporary)) / str(seed)
            shutil.rmtree(folder, ignore_errors=True)  # of a round that was broken off
            folder.mkdir(parents=True)
            outcome = uvloop.run(run(asked, folder))
        with options.record.open("a") as file:
            file.write(json.dumps(_line(asked, outcome)) + "\n")
        print(_table([_line(asked, outcome)]), flush=True)
        if outcome.problems():
            print("\n".join(outcome.problems()))
            return 1
    print(_table(_lines(options)))
    return 0


def _lines(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Rounds of this run that ended: those with its seed or a later one."""
    lines = map(json.loads, options.record.read_text().splitlines())
    return [line for line in lines if line["seed"] >= options.seed]


def _line(asked: Round, outcome: Outcome) -> dict[str, Any]:
    tally = outcome.tally
    return {
        "seed": asked.seed,
        "tokens": tally.tokens,
        "streamed": tally.streamed,
        "seconds": round(outcome.seconds, 1),
        "results": tally.results,
        "kinds": tally.kinds,
        "events": tally.events,
        "faults": outcome.faults,
        "used": outcome.used,
        "weights": outcome.weights,
    }


def _table(lines: list[dict[str, Any]]) -> str:
    """Sums in Markdown."""
    results, faults, kinds = Counter[str](), Counter[str](), Counter[str]()
    for line in lines:
        results.update(line["results"])
        faults.update(line["faults"])
        kinds.update(line["kinds"])
    tokens, streamed = (sum(line.get(of, 0) for line in lines) for of in ("tokens", "streamed"))
    seconds = sum(line["seconds"] for line in lines)
    rows = {
        "rounds": f"{len(lines)}, seeds {', '.join(str(line['seed']) for line in lines)}",
        "certified tokens": f"{tokens:,} in {seconds:,.0f} s, {streamed:,} of them streamed",
        "answers": ", ".join(f"{count:,} {result}" for result, count in results.items()),
        "kinds": ", ".join(f"{count:,} {kind}" for kind, count in sorted(kinds.items())),
        "faults": ", ".join(f"{count:,} {fault}" for fault, count in sorted(faults.items())),
    }
    return "\n".join(["| | |", "| --- | --- |", *(f"| {k} | {v} |" for k, v in rows.items())])


if __name__ == "__main__":
    sys.exit(main())
