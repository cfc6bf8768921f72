"""Keeps the options in the chart's values.schema.json as `loraplex` has them.

Run it after a change of an option: `.venv/bin/python -m deploy.helm.options_schema`. Options of
earlier versions stop `helm template` with their successors, and so do options that the chart sets
itself, from values of their own. Among these are those by which workers enlist themselves, since a
chart's routers know their workers' names, and several processes in a pod, since more routers are
more pods.
"""

import json
import math
import sys
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import Any

from loraplex.launcher.config import ROUTER_OPTIONS, WORKER_OPTIONS
from loraplex.launcher.options import RETIRED, Option

CHART = Path(__file__).parent / "loraplex"
SCHEMA = CHART / "values.schema.json"
# Sentences of options that values must not have, by command and flag. Templates read it.
GONE = CHART / "options.gone.yaml"
# Values of the chart by the flags for which they stand; "" = no value, it is always the same.
SET_BY_CHART: dict[str, dict[str, str]] = {
    "routerOptions": {
        "adapter": "adapters",
        "adapters-file": "adapters",
        "base": "bases",
        "cache-dir": "router.cacheSize",
        "drain-delay-s": "router.drainDelaySeconds",
        "drain-timeout-s": "router.drainSeconds",
        "files-dir": "router.filesClaim",
        "host": "",
        "hub-owner": "hubOwners",
        "keys-file": "secrets.apiKeys",
        "metrics-port": "",
        "otlp-endpoint": "tracing.endpoint",
        "port": "router.port",
        "redis": "redis",
        "redis-prefix": "redis.prefix",
        "request-timeout-s": "requestTimeoutSeconds",
        "router-processes": "router.replicas",
        "tls-cert": "router.tlsSecretName",
        "tls-key": "router.tlsSecretName",
        "uds": "",
        "worker": "pools",
    },
    "workerOptions": {
        "adapter-disk": "worker.adapterDisk",
        "advertise": "",
        "cache-dir": "worker.cache",
        "device": "worker.gpus",
        "drain-timeout-s": "worker.drainSeconds",
        "host": "",
        "host-adapter-memory": "worker.hostAdapterMemory",
        "hub-owner": "hubOwners",
        "model": "model.id",
        "model-name": "model.names",
        "port": "",
        "redis": "redis",
        "redis-prefix": "redis.prefix",
        "revision": "model.revision",
        "worker-id": "",
    },
}
_BYTES = r"^[0-9]+(\.[0-9]+)?\s*([kKmMgGtT]([iI]?[bB])?|[bB])?$"


def definitions() -> dict[str, Any]:
    """The schema of each command's options, by flag."""
    return {
        name: _options(of_command, SET_BY_CHART[name])
        for name, of_command in (
            ("routerOptions", ROUTER_OPTIONS),
            ("workerOptions", WORKER_OPTIONS),
        )
    }


def render() -> str:
    """The whole schema as it should be."""
    schema = json.loads(SCHEMA.read_text())
    schema["definitions"] |= definitions()
    return json.dumps(schema, indent=2, ensure_ascii=False) + "\n"


def gone() -> str:
    """The sentences of options that the schema passes, so that a template can say why not."""
    found = {
        name.removesuffix("Options"): {
            **{flag: f"is no option any more: {why}" for flag, why in RETIRED.items()},
            **{flag: f"is set by the chart{_by(value)}" for flag, value in taken.items()},
        }
        for name, taken in SET_BY_CHART.items()
    }
    head = "# Written by deploy/helm/options_schema.py.\n"
    return head + json.dumps(found, indent=2, sort_keys=True, ensure_ascii=False) + "\n"


def _by(value: str) -> str:
    return f", from {value}" if value else ""


def _options(options: Iterable[Option], taken: Collection[str]) -> dict[str, Any]:
    free = {o.flag: _option(o) for o in options if o.flag not in taken and not o.is_secret}
    refused = "|".join(sorted({*RETIRED, *taken}))
    return {
        "type": "object",
        "additionalProperties": False,
        "properties": dict(sorted(free.items())),
        # A template refuses these, and says what stands in their place.
        "patternProperties": {f"^({refused})$": {}},
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
    for path, fresh in ((SCHEMA, render()), (GONE, gone())):
        path.write_text(fresh)
        sys.stdout.write(f"{path}: {len(fresh)} bytes\n")
