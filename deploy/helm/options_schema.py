"""Keeps the options in the chart's values.schema.json as `loraplex` has them.

Run it after a change of an option: `.venv/bin/python -m deploy.helm.options_schema`. The schema
leaves out options that the chart sets itself, from values of their own. It leaves out those by
which workers enlist themselves, since a chart's routers know their workers' names. And it leaves
out several processes in a pod, since more routers are more pods.
"""

import json
import math
import sys
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import Any

from loraplex.launcher.config import ROUTER_OPTIONS, WORKER_OPTIONS
from loraplex.launcher.options import Option

SCHEMA = Path(__file__).parent / "loraplex/values.schema.json"
SET_BY_CHART = {
    "routerOptions": {
        "adapter",
        "adapters-file",
        "base",
        "cache-dir",
        "drain-delay-s",
        "drain-timeout-s",
        "files-dir",
        "host",
        "hub-owner",
        "keys-file",
        "metrics-port",
        "otlp-endpoint",
        "port",
        "redis",
        "redis-prefix",
        "request-timeout-s",
        "router-processes",
        "tls-cert",
        "tls-key",
        "uds",
        "worker",
    },
    "workerOptions": {
        "adapter-disk",
        "advertise",
        "cache-dir",
        "device",
        "drain-timeout-s",
        "host",
        "host-adapter-memory",
        "hub-owner",
        "model",
        "model-name",
        "port",
        "redis",
        "redis-prefix",
        "revision",
        "worker-id",
    },
}
_BYTES = r"^[0-9]+(\.[0-9]+)?\s*([kKmMgGtT]([iI]?[bB])?|[bB])?$"


def definitions() -> dict[str, Any]:
    """The schema of each command's options, by flag."""
    return {
        "routerOptions": _options(ROUTER_OPTIONS, SET_BY_CHART["routerOptions"]),
        "workerOptions": _options(WORKER_OPTIONS, SET_BY_CHART["workerOptions"]),
    }


def render() -> str:
    """The whole schema as it should be."""
    schema = json.loads(SCHEMA.read_text())
    schema["definitions"] |= definitions()
    return json.dumps(schema, indent=2, ensure_ascii=False) + "\n"


def _options(options: Iterable[Option], taken: Collection[str]) -> dict[str, Any]:
    free = {o.flag: _option(o) for o in options if o.flag not in taken and not o.is_secret}
    return {
        "type": "object",
        "additionalProperties": False,
        "properties": dict(sorted(free.items())),
    }


def _option(option: Option) -> dict[str, Any]:
    schema = _value(option)
    if option.is_list:
        schema = {"type": "array", "items": schema}
    return {"description": option.help, **schema}


def _value(option: Option) -> dict[str, Any]:
    if option.kind == "bool":
        return {"type": "boolean"}
    if option.kind == "choice":
        return {"enum": list(option.choices)}
    if option.kind == "bytes":
        return {"type": ["string", "integer"], "pattern": _BYTES, "minimum": option.low}
    if option.kind in ("int", "float"):
        bounds: dict[str, Any] = {"minimum": option.low}
        if math.isfinite(option.high):
            bounds["maximum"] = option.high
        return {"type": "integer" if option.kind == "int" else "number", **bounds}
    return {"type": "string", "minLength": 1}


if __name__ == "__main__":
    fresh = render()
    SCHEMA.write_text(fresh)
    sys.stdout.write(f"{SCHEMA}: {len(fresh)} bytes\n")
