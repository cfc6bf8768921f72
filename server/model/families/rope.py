"""How positions turn queries and keys, from either spelling in `config.json`. Pure."""

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

from msgspec.structs import replace

from loraplex.server.model.families import family
from loraplex.server.model.families.family import ModelSizes
from loraplex.server.model.families.fields import Fields
from loraplex.server.model.spec.model_spec import RopeKind, RopeSpec

Table = Mapping[str, Any]
_PARTIAL = "partial_rotary_factor"
# By `rope_type`. Dynamic NTK scaling changes nothing within `max_position_embeddings`, which is
# the longest context for it.
KINDS: Mapping[object, RopeKind] = {
    "default": "default",
    "linear": "linear",
    "dynamic": "default",
    "llama3": "llama3",
    "yarn": "yarn",
    "longrope": "longrope",
}
# A part of each head's pairs turn, as if all did.
WITH_PROPORTIONAL: Mapping[object, RopeKind] = {**KINDS, "proportional": "proportional"}


class RopeRules(NamedTuple):
    """Rules of a family's code that hold where `config.json` says nothing.

    partial: of `partial_rotary_factor`; None = the family turns whole heads. kinds: by `rope_type`.
    original_context: None = as the table says, or all positions. interleaved: neighbouring features
    turn together.
    """

    theta: float = 10_000.0
    partial: float | None = None
    kinds: Mapping[object, RopeKind] = KINDS
    original_context: int | None = None
    interleaved: bool = False


LLAMA = RopeRules()


def read_rope(fields: Fields, sizes: ModelSizes, rules: RopeRules = LLAMA) -> tuple[RopeSpec, int]:
    """The rotary embedding of all layers and the context it reaches. Both spellings of the keys are
    read: `rope_theta` + `rope_scaling`, and `rope_parameters` (transformers 5)."""
    table = rope_table(fields)
    if any(isinstance(value, Mapping) for value in table.values()):
        fields.refuse("rope_parameters: one table for all layers is supported")
        table = {}
    return read_table(fields, table, sizes, rules)


def rope_table(fields: Fields) -> Table:
    """The rotation's table in `config.json`, without single keys; empty where none is."""
    old = fields.table(fields.config, "rope_scaling")
    return old or fields.table(fields.config, "rope_parameters")


def or_usual_table(fields: Fields, usual: Table) -> Fields:
    """Return fields with this table of the rotation, where `config.json` has none. A single
    `rope_theta` then means nothing.
    """
    if fields.config.get("rope_parameters") is None and not fields.config.get("rope_scaling"):
        return fields.changed(rope_parameters=usual)
    return fields


def read_tables(fields: Fields, theta: object, windowed_theta: object) -> tuple[Table, Table]:
    """Tables of layers without a window, and of layers with one.

    `rope_parameters` has a table for each (transformers 5). Single keys are `rope_scaling` and the
    two of `rope_theta`.
    """
    config = fields.config
    tables = fields.table(config, "rope_parameters")
    if not set(tables) <= {family.FULL, family.WINDOWED}:
        fields.refuse(f"rope_parameters must have tables {family.FULL} and {family.WINDOWED}")
        tables = {}
    scaling = fields.table(config, "rope_scaling")
    if "type" in scaling and "rope_type" not in scaling:
        fields.refuse("rope_scaling must say rope_type where layers differ: type is not read there")
    full = {"rope_theta": theta, **fields.table(tables, family.FULL), **scaling}
    windowed = {"rope_theta": windowed_theta, **fields.table(tables, family.WINDOWED)}
    for table in (full, windowed):
        if table.get("truncate", True) is not True:
            fields.refuse("truncate must be true where layers differ: transformers reads no other")
    return full, windowed


def read_table(
    fields: Fields, table: Table, sizes: ModelSizes, rules: RopeRules = LLAMA
) -> tuple[RopeSpec, int]:
    """Read the rotation that a table describes, as `read_rope` does."""
    return _Source(fields, table, sizes, rules).rope()


def original_context(
    fields: Fields, table: Table, sizes: ModelSizes, rules: RopeRules = LLAMA
) -> int:
    """Tokens of a context before scaling."""
    key = "original_max_position_embeddings"
    value = fields.config.get(key) or rules.original_context or table.get(key)
    found = fields.number({key: value}, key, sizes.positions)
    if found < 1:
        fields.refuse(f"{key} must be at least 1, got {value!r}")
    return max(int(found), 1)


class _Source(NamedTuple):
    """A table and what stands around it."""

    fields: Fields
    table: Table
    sizes: ModelSizes
    rules: RopeRules

    def number(self, key: str, default: float | None = None) -> float:
        return self.fields.number(self.table, key, default)

    def rope(self) -> tuple[RopeSpec, int]:
        outer_theta = self.fields.number(self.fields.config, "rope_theta", self.rules.theta)
        theta = self.number("rope_theta", outer_theta)
        positions = self.sizes.positions
        named = self.table.get("rope_type") or self.table.get("type") or "default"
        kind = self.rules.kinds.get(str(named))
        if kind == "proportional":
            return self._proportional(theta), positions
        plain = RopeSpec(
            "default", theta, rotary_dim=self._rotary_dim(), interleaved=self.rules.interleaved
        )
        match kind:
            case "default":
                return plain, positions
            case "linear":
                factor = self.number("factor")
                rope = replace(plain, kind="linear", factor=factor)
                return rope, int(positions * max(factor, 1.0))
            case "llama3":
                return self._llama3(plain), positions
            case "yarn":
                rope = self._yarn(plain)
                return rope, max(positions, int(rope.factor * rope.original_context))
            case "longrope":
                return self._longrope(plain), positions
        *others, last = map(str, self.rules.kinds)
        self.fields.refuse(f"rope_type must be {', '.join(others)} or {last}, got {named!r}")
        return plain, positions

    def _rotary_dim(self) -> int | None:
        part = self.table.get(_PARTIAL)
        part = self.fields.config.get(_PARTIAL) if part is None else part
        if self.rules.partial is None:
            if part not in (None, 1, 1.0):
                self.fields.refuse(f"{_PARTIAL} must be 1, got {part!r}")
            return None
        head_dim = self.sizes.head_dim
        part = self.fields.number({_PARTIAL: part}, _PARTIAL, self.rules.partial)
        size = int(head_dim * part)
        if not 0 < size <= head_dim or size % 2:
            self.fields.refuse(f"{_PARTIAL} must give an even part of {head_dim}, got {part!r}")
        return None if size == head_dim else size

    def _proportional(self, theta: float) -> RopeSpec:
        part, factor = self.number(_PARTIAL, 1.0), self.number("factor", 1.0)
        turning = int(part * self.sizes.head_dim // 2)
        if not 0 < turning <= self.sizes.head_dim // 2:
            self.fields.refuse(f"{_PARTIAL} must give a part of a head, got {part!r}")
        return RopeSpec("proportional", theta, factor, turning=turning)

    def _original_context(self) -> int:
        return original_context(*self)

    def _llama3(self, plain: RopeSpec) -> RopeSpec:
        low, high = self.number("low_freq_factor"), self.number("high_freq_factor")
        if high <= low:
            self.fields.refuse("high_freq_factor must be greater than low_freq_factor")
        return replace(
            plain,
            kind="llama3",
            factor=self.number("factor"),
            original_context=self._original_context(),
            low_freq_factor=low,
            high_freq_factor=high,
        )

    def _yarn(self, plain: RopeSpec) -> RopeSpec:
        original = self._original_context()
        factor = self.number("factor", self.sizes.positions / original)
        mscale, all_dim = (
            self.number(key) if self.table.get(key) else None
            for key in ("mscale", "mscale_all_dim")
        )
        attention = yarn_mscale(factor, 1.0)
        if mscale and all_dim:
            attention = yarn_mscale(factor, mscale) / yarn_mscale(factor, all_dim)
        return replace(
            plain,
            kind="yarn",
            factor=factor,
            original_context=original,
            attention_factor=self.number("attention_factor", attention),
            beta_fast=self.number("beta_fast", 32.0),
            beta_slow=self.number("beta_slow", 1.0),
            truncate=bool(self.table.get("truncate", True)),
        )

    def _longrope(self, plain: RopeSpec) -> RopeSpec:
        """Read a rotation of LongRoPE (arXiv 2402.13753)."""
        original = self._original_context()
        factor = self.number("factor", self.sizes.positions / original)
        attention = 1.0
        if factor > 1 and original > 1:
            attention = math.sqrt(1 + math.log(factor) / math.log(original))
        count = (plain.rotary_dim or self.sizes.head_dim) // 2
        return replace(
            plain,
            kind="longrope",
            original_context=original,
            attention_factor=self.number("attention_factor", attention),
            short_factors=self._factors("short_factor", count),
            long_factors=self._factors("long_factor", count),
        )

    def _factors(self, key: str, count: int) -> tuple[float, ...]:
        values = self.table.get(key)
        if not isinstance(values, list) or len(values) != count:
            self.fields.refuse(f"{key} must be a list of {count} numbers")
            return ()
        return tuple(self.fields.number({key: value}, key, None) for value in values)


def yarn_mscale(factor: float, mscale: float) -> float:
    """YaRN, section 3.4: softens attention as the context grows."""
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0
