"""The load of the workers in an answer's header, as vLLM reports it (ORCA). Pure."""

import json

LOAD_FORMAT = "endpoint-load-metrics-format"


def load_headers(form: str, waiting: float, kv_usage: float) -> dict[str, str]:
    """form: TEXT or JSON; of any other there is no header."""
    numbers = {"kv_cache_usage_perc": kv_usage, "num_requests_waiting": waiting}
    written = {
        "TEXT": ", ".join(f"named_metrics.{name}={value}" for name, value in numbers.items()),
        "JSON": json.dumps({"named_metrics": numbers}),
    }
    kind = form.upper()
    return {"endpoint-load-metrics": f"{kind} {written[kind]}"} if kind in written else {}
