"""`python -m tests.chaos`: breaks a fleet under load and shows what its clients saw."""

import argparse
import asyncio
import json
import sys
import tempfile
from collections import Counter
from pathlib import Path

from tests.chaos.campaign import Plan, Summary, run

REDIS = ("killed", "emptied", "frozen", "slow")
SHORT = {
    "worker killed": 4,
    "engine killed": 2,
    "worker frozen": 1,
    "engine frozen": 1,
    "engine slow": 1,
    "router and worker parted": 1,
    "parted one way": 2,
    "network slow": 1,
    "router killed": 2,
    "rolling restart": 1,
    **{f"redis {how}": 1 for how in REDIS},
}
LONG = {
    "worker killed": 200,
    "engine killed": 50,
    "worker frozen": 25,
    "engine frozen": 25,
    "engine slow": 20,
    "router and worker parted": 25,
    "parted one way": 50,
    "network slow": 20,
    "router killed": 50,
    "rolling restart": 20,
    **{f"redis {how}": 20 for how in REDIS},
}


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.chaos", description=__doc__)
    parser.add_argument("--long", action="store_true", help="hundreds of faults (an hour)")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", action="append", help="this kind of fault (may be repeated)")
    parser.add_argument("--share", type=float, default=1.0, help="of the faults: a piece of a run")
    parser.add_argument("--clients", type=int, default=16, help="requests under way at once")
    parser.add_argument("--folder", type=Path, help="where logs are kept (default: nowhere)")
    parser.add_argument("--slowest", type=int, default=0, help="pauses to show, longest first")
    parser.add_argument("--record", type=Path, help="file to which the result is added, and shown")
    options = parser.parse_args()
    faults = {
        fault: max(1, round(count * options.share))
        for fault, count in (LONG if options.long else SHORT).items()
        if options.only is None or fault in options.only
    }
    plan = Plan(faults, options.seed, clients=options.clients)
    with tempfile.TemporaryDirectory() as temporary:
        folder = options.folder or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        report = asyncio.run(run(plan, folder))
    summary = report.summary()
    print(summary.table())
    if options.record is not None:
        print(f"\nall in {options.record}:\n{_record(options.record, summary).table()}")
    print("\n".join([*report.slowest(options.slowest), *report.problems()[:50]]))
    return 1 if report.problems() else 0


def _record(path: Path, summary: Summary) -> Summary:
    """Adds a line, and adds the lines up."""
    with path.open("a") as file:
        told = [summary.pauses, summary.results, summary.events, summary.orphans]
        file.write(json.dumps(told) + "\n")
    total = Summary({}, Counter(), 0, [])
    for line in path.read_text().splitlines():
        pauses, results, events, orphans = json.loads(line)
        total.add(Summary(pauses, Counter(results), events, orphans))
    return total


if __name__ == "__main__":
    sys.exit(main())
