"""Reads numbers from a model's JSON tables; collects every problem, not the first only. Pure."""

import json
import math
from collections.abc import Mapping
from typing import Any


class Fields:
    """`config.json` and the problems found in it so far."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        self.config = config
        self.problems: list[str] = []

    def changed(self, **keys: Any) -> "Fields":
        """Return fields as if `config.json` said this; problems are shared with the original."""
        other = Fields({**self.config, **keys})
        other.problems = self.problems
        return other

    def refuse(self, problem: str) -> None:
        if problem not in self.problems:
            self.problems.append(problem)

    def only(self, key: str, usual: object) -> None:
        """Refuse another value at the top level than the usual one, or null."""
        value = self.config.get(key)
        if value is not None and value != usual:
            self.refuse(f"{key} must be {json.dumps(usual)}, got {value!r}")

    def table(self, of: Mapping[str, Any], key: str) -> Mapping[str, Any]:
        """A table in a table; empty where nothing is said."""
        value = of.get(key) or {}
        if isinstance(value, Mapping):
            return value
        self.refuse(f"{key} must be a table, got {value!r}")
        return {}

    def positive(self, key: str, default: int | None = None) -> int:
        """A positive integer at the top level; 1 when it is malformed."""
        value = self.config.get(key)
        if value is None:
            value = default
        if not isinstance(value, int) or isinstance(value, bool) or value <= 0:
            self.refuse(f"{key} must be a positive integer, got {value!r}")
            return 1
        return value

    def count(self, key: str, default: int) -> int:
        """An integer at the top level that may be 0; 0 when it is malformed. default: without the
        key."""
        value = self.config.get(key, default)
        if type(value) is not int or value < 0:
            self.refuse(f"{key} must be an integer from 0 on, got {value!r}")
            return 0
        return value

    def listed(self, key: str) -> list[Any]:
        """A list at the top level; empty where nothing is said."""
        value = self.config.get(key)
        if value is None or isinstance(value, list):
            return value or []
        self.refuse(f"{key} must be a list, got {value!r}")
        return []

    def number(self, table: Mapping[str, Any], key: str, default: float | None) -> float:
        """A positive, finite number of `table`; 1 when it is malformed."""
        value = table.get(key)
        if value is None:
            value = default
        good = isinstance(value, int | float) and not isinstance(value, bool)
        if value is None or not good or not math.isfinite(value) or value <= 0:
            self.refuse(f"{key} must be a positive number, got {value!r}")
            return 1.0
        return float(value)

    def factor(self, key: str) -> float:
        """A positive factor; 1 where `config.json` has none, or a malformed one."""
        return self.number(self.config, key, 1.0)
