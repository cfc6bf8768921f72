"""How positions turn queries and keys, from either spelling in `config.json`. Pure."""

import math
from collections.abc import Mapping
from typing import Any

from server.model.families.fields import Fields
from server.model.spec import RopeSpec

_DEFAULT_THETA = 10_000.0


def read_rope(fields: Fields, positions: int) -> tuple[RopeSpec, int]:
    """The rotary embedding and the context it reaches. Both spellings of the keys are read:
    `rope_theta` + `rope_scaling`, and `rope_parameters` (transformers 5)."""
    table = fields.config.get("rope_scaling") or fields.config.get("rope_parameters") or {}
    if not isinstance(table, Mapping) or any(isinstance(v, Mapping) for v in table.values()):
        fields.refuse("rope_parameters: one table for all layers is supported")
        table = {}
    partial = table.get("partial_rotary_factor", fields.config.get("partial_rotary_factor"))
    if partial not in (None, 1, 1.0):
        fields.refuse(f"partial_rotary_factor must be 1, got {partial!r}")
    outer_theta = fields.number(fields.config, "rope_theta", _DEFAULT_THETA)
    theta = fields.number(table, "rope_theta", outer_theta)
    kind = table.get("rope_type") or table.get("type") or "default"
    # Dynamic NTK scaling changes nothing within `max_position_embeddings`, our limit for it.
    if kind in ("default", "dynamic"):
        return RopeSpec(kind="default", theta=theta), positions
    if kind == "linear":
        factor = fields.number(table, "factor", None)
        return RopeSpec("linear", theta, factor), int(positions * max(factor, 1.0))
    if kind == "llama3":
        return _llama3(fields, table, theta, positions), positions
    if kind == "yarn":
        rope = _yarn(fields, table, theta, positions)
        return rope, max(positions, int(rope.factor * rope.original_context))
    fields.refuse(f"rope_type must be default, linear, dynamic, llama3 or yarn, got {kind!r}")
    return RopeSpec("default", theta), positions


def _original_context(fields: Fields, table: Mapping[str, Any], positions: int) -> int:
    key = "original_max_position_embeddings"
    value = fields.config.get(key) or table.get(key)
    return int(fields.number({key: value}, key, positions))


def _llama3(fields: Fields, table: Mapping[str, Any], theta: float, positions: int) -> RopeSpec:
    low = fields.number(table, "low_freq_factor", None)
    high = fields.number(table, "high_freq_factor", None)
    if high <= low:
        fields.refuse("high_freq_factor must be greater than low_freq_factor")
    return RopeSpec(
        kind="llama3",
        theta=theta,
        factor=fields.number(table, "factor", None),
        original_context=_original_context(fields, table, positions),
        low_freq_factor=low,
        high_freq_factor=high,
    )


def _yarn(fields: Fields, table: Mapping[str, Any], theta: float, positions: int) -> RopeSpec:
    original = _original_context(fields, table, positions)
    factor = fields.number(table, "factor", positions / original)
    mscale, all_dim = table.get("mscale"), table.get("mscale_all_dim")
    attention = _yarn_mscale(factor, 1.0)
    if mscale and all_dim:
        attention = _yarn_mscale(factor, mscale) / _yarn_mscale(factor, all_dim)
    return RopeSpec(
        kind="yarn",
        theta=theta,
        factor=factor,
        original_context=original,
        attention_factor=fields.number(table, "attention_factor", attention),
        beta_fast=fields.number(table, "beta_fast", 32.0),
        beta_slow=fields.number(table, "beta_slow", 1.0),
        truncate=bool(table.get("truncate", True)),
    )


def _yarn_mscale(factor: float, mscale: float) -> float:
    """YaRN, section 3.4: softens attention as the context grows."""
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0
