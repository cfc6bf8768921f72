"""Output of benchmarks: for a person, or one JSON object a line."""

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from typing import Any


def print_points(points: Iterable[Any], as_json: bool) -> None:
    """Prints dataclasses, as JSON each as soon as it is there, else a table of all."""
    results = []
    for point in points:
        results.append(point)
        if as_json:
            print(json.dumps(asdict(point)), flush=True)
    if not as_json:
        print(table(results))


def table(results: Sequence[Any]) -> str:
    """Makes a column of each field; results: dataclasses of one kind."""
    if not results:
        return "nothing to measure"
    head = list(asdict(results[0]))
    rows = [[_cell(value) for value in asdict(result).values()] for result in results]
    widths = [max(map(len, column)) + 2 for column in zip(head, *rows, strict=True)]
    return "\n".join("".join(map(str.rjust, line, widths)) for line in (head, *rows))


def _cell(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.3f}"
    return "-" if value is None else str(value)
