"""Output of benchmarks: for a person, or one JSON object a line."""

import json
from collections.abc import Callable, Iterable
from dataclasses import asdict
from typing import Any


def print_points(points: Iterable[Any], as_json: bool, table: Callable[[list[Any]], str]) -> None:
    """points: dataclasses; as JSON each is printed as soon as it is there."""
    results = []
    for point in points:
        results.append(point)
        if as_json:
            print(json.dumps(asdict(point)), flush=True)
    if not as_json:
        print(table(results))


def print_fields(result: Any, as_json: bool, spec: str = "") -> None:
    """result: a dataclass; a line each for a person. spec: how its values are formatted there."""
    values = asdict(result)
    lines = (f"{name:20} {value:{spec}}" for name, value in values.items())
    print(json.dumps(values) if as_json else "\n".join(lines))
