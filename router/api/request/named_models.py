"""The names in a request's body of what is to answer it, before the body is read for good. Pure."""

from typing import Any

import msgspec


class _Parameters(msgspec.Struct):
    adapter_id: Any = None
    merged_adapters: Any = None


class _Body(_Parameters):
    """Fields of all APIs that may name a base or an adapter."""

    model: Any = None
    lora_path: Any = None
    parameters: Any = None


_decode = msgspec.json.Decoder(_Body).decode


def named_models(body: bytes) -> list[str]:
    """Names of bases and adapters in any API's body; what cannot be read names nothing."""
    try:
        said = _decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return []
    inside = said.parameters if isinstance(said.parameters, dict) else {}
    paths = said.lora_path if isinstance(said.lora_path, list) else [said.lora_path]
    found = [said.model, *paths, said.adapter_id, inside.get("adapter_id")]
    for merged in (said.merged_adapters, inside.get("merged_adapters")):
        ids = merged.get("ids") if isinstance(merged, dict) else None
        found += ids if isinstance(ids, list) else []
    return [name for name in found if isinstance(name, str) and name]
