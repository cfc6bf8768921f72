"""Tuned launch parameters, read from `configs/<arch>.json`.

Its lists are `tile_rows`, `shrink`, `expand`, `fused`, `fused_shrink`, `rope`, `skinny`, `packed`,
`rounded` and `skinny_lora`. An entry is of a phase (`decode`: rows that are decodes, or few;
`mixed`: hundreds of prompts' tokens, beside decodes; `prefill`: thousands) and applies where the
batch has at most `max_rows` rows, or any number where that is left out. The first entry that
applies wins; of `skinny`, `packed` and `rounded` all that have that one's bound are tried.
`default.json` serves every other architecture. `invariant.json` has one way for any number of
rows, on every architecture: how a row's sums are divided depends on nothing else of the batch.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar

import torch

Phase = Literal["decode", "mixed", "prefill"]
DEFAULT_ARCH, INVARIANT = "default", "invariant"
_FOLDER = Path(__file__).parent / "configs"
_CPU_PROCESSORS = 2


@dataclass(frozen=True, slots=True)
class _Limits:
    """Launch parameters that all kernels have. max_registers: of a thread, None = the compiler's
    choice. num_programs: the most programs that are launched: as many as can be on the device at
    once, so that their work ends together; each loops over its share of it. programmatic_launch:
    the device has programmatic dependent launch.
    """

    num_warps: int
    num_stages: int
    max_registers: int | None
    num_programs: int
    programmatic_launch: bool

    def launch_options(self, *, early: bool = True) -> dict[str, Any]:
        """Options for a launch. early: it may start while the kernel before it drains."""
        pdl = early and self.programmatic_launch
        options = {"num_warps": self.num_warps, "maxnreg": self.max_registers}
        return {**options, "PDL": pdl, "launch_pdl": pdl}


@dataclass(frozen=True, slots=True)
class ShrinkConfig(_Limits):
    """Launch parameters of the shrink kernel. block_k: input features a step, a power of two; of up
    to 16 rows a half with 32 ranks, and a quarter beyond, but in tiles of 32.

    max_split: the most programs that share one tile's input features.
    """

    block_k: int
    max_split: int


@dataclass(frozen=True, slots=True)
class ExpandConfig(_Limits):
    """Launch parameters of the expand kernel. piece: output features a step at rank 16 (a half at
    32, a quarter beyond); a power of two of at least 64.
    """

    piece: int


@dataclass(frozen=True, slots=True)
class FusedConfig(_Limits):
    """Launch parameters of the fused kernel. piece: as in ExpandConfig. max_pieces: of an item."""

    piece: int
    max_pieces: int


@dataclass(frozen=True, slots=True)
class RopeLoraConfig(_Limits):
    """Launch parameters of the kernel that expands LoRA and rotates q and k. max_heads: the most
    heads of one item.
    """

    max_heads: int


@dataclass(frozen=True, slots=True)
class SkinnyConfig:
    """Launch parameters of the product of few rows. block_n, block_k: output and input features of
    a step, powers of two; for more than one row at least 16 output features.
    programmatic_launch: the device has it.
    """

    block_n: int
    block_k: int
    num_warps: int
    num_stages: int
    programmatic_launch: bool


@dataclass(frozen=True, slots=True)
class PackedConfig(SkinnyConfig):
    """Configuration of a kernel with quantised weights.

    parts: in so many the warps of a program share its input features out, each of block_k a step;
    1, or all warps. splits: at most so many programs share them.
    """

    parts: int = 1
    splits: int = 1


@dataclass(frozen=True, slots=True)
class SkinnyLoraConfig(SkinnyConfig):
    """Configuration of a linear with LoRA fused into it.

    lora_programs: those that shrink, at most as many as the device has processors. lora_splits: the
    most that share an item's input features. max_registers: as in `_Limits`.
    """

    lora_programs: int
    lora_splits: int
    max_registers: int | None = None


@dataclass(frozen=True, slots=True)
class _Entry:
    phase: Phase
    max_rows: float
    values: dict[str, int]

    def applies(self, phase: Phase, rows: int) -> bool:
        return phase == self.phase and rows <= self.max_rows


_C = TypeVar("_C", bound=SkinnyConfig)


class KernelConfigs:
    """The launch parameters of one device."""

    def __init__(
        self,
        processors: int,
        programmatic_launch: bool,
        table: dict[str, list[dict[str, Any]]],
    ) -> None:
        self.processors = processors
        self.programmatic_launch = programmatic_launch
        self._lists = {name: [_entry(row) for row in rows] for name, rows in table.items()}

    def tile_rows(self, phase: Phase, rows: int) -> int:
        """Rows of a tile in a batch of `rows`."""
        return self._find("tile_rows", phase, rows)["tile_rows"]

    def shrink(self, phase: Phase, rows: int) -> ShrinkConfig:
        v = self._find("shrink", phase, rows)
        return ShrinkConfig(*self._limits(v), v["block_k"], v["max_split"])

    def expand(self, phase: Phase, rows: int) -> ExpandConfig:
        v = self._find("expand", phase, rows)
        return ExpandConfig(*self._limits(v), v["piece"])

    def fused(self, phase: Phase, rows: int) -> FusedConfig:
        """The configuration of the activation with expand fused into it."""
        v = self._find("fused", phase, rows)
        return FusedConfig(*self._limits(v), v["piece"], v["max_pieces"])

    def fused_shrink(self, rows: int) -> FusedConfig:
        """The configuration of the activation that also shrinks its result; for prefill."""
        v = self._find("fused_shrink", "prefill", rows)
        return FusedConfig(*self._limits(v), v["piece"], v["max_pieces"])

    def rope(self, rows: int) -> RopeLoraConfig:
        """The configuration of the rotation with expand fused into it; for many tokens alone."""
        v = self._find("rope", "prefill", rows)
        return RopeLoraConfig(*self._limits(v), v["max_heads"])

    def skinny(self, rows: int) -> tuple[SkinnyConfig, ...]:
        """Configurations that may be the fastest for so many rows; none for too many."""
        return self._of_few("skinny", rows, SkinnyConfig)

    def packed(self, rows: int) -> tuple[PackedConfig, ...]:
        """Configurations for products of quantised weights. The last is good for most shapes."""
        return self._of_few("packed", rows, PackedConfig)

    def rounded(self, rows: int) -> tuple[PackedConfig, ...]:
        """Return launch parameters for products of so many rounded rows; none for too many. The
        first is good for most shapes.
        """
        return self._of_few("rounded", rows, PackedConfig)

    def _of_few(self, name: str, rows: int, kind: type[_C]) -> tuple[_C, ...]:
        known = [entry for entry in self._lists[name] if entry.applies("decode", rows)]
        return tuple(
            kind(**entry.values, programmatic_launch=self.programmatic_launch)
            for entry in known
            if entry.max_rows == known[0].max_rows
        )

    def skinny_lora(self, rows: int) -> SkinnyLoraConfig | None:
        """The configuration of linears with LoRA fused in; None for too many rows."""
        for entry in self._lists["skinny_lora"]:
            if entry.applies("decode", rows):
                programs = min(entry.values["lora_programs"], self.processors)
                values = {**entry.values, "lora_programs": programs}
                return SkinnyLoraConfig(**values, programmatic_launch=self.programmatic_launch)
        return None

    def _limits(self, v: dict[str, int]) -> tuple[int, int, int | None, int, bool]:
        """The first parameters of LoRA's kernels."""
        programs = self.processors * v["programs_per_processor"]
        chosen = (v["num_warps"], v["num_stages"], v.get("max_registers"))
        return *chosen, programs, self.programmatic_launch

    def _find(self, name: str, phase: Phase, rows: int) -> dict[str, int]:
        for entry in self._lists[name]:
            if entry.applies(phase, rows):
                return entry.values
        raise ValueError(f"no launch parameters for {phase}, {rows} rows")

    def max_split(self, phase: Phase, rows: int) -> int:
        """The largest `max_split` in a batch of `rows`: what its workspace needs."""
        return max(
            entry.values["max_split"]
            for entry in self._lists["shrink"]
            if entry.phase == phase and rows <= entry.max_rows
        )

    def workspaces(self, phase: Phase, rows: int) -> dict[int, int]:
        """For every `max_split` in batches of up to `rows`: the most rows that need it."""
        bounds = {rows, *(int(min(rows, entry.max_rows)) for entry in self._lists["shrink"])}
        return {self.max_split(phase, bound): bound for bound in sorted(bounds)}


def load_configs(device: torch.device | str, *, batch_invariant: bool = False) -> KernelConfigs:
    """The tuned file of the device's architecture, else `default.json`; or `invariant.json`."""
    device = torch.device(device)
    if device.type != "cuda":
        name = INVARIANT if batch_invariant else DEFAULT_ARCH
        return read_configs(name, _CPU_PROCESSORS, programmatic_launch=False)
    properties = torch.cuda.get_device_properties(device)
    arch, processors = f"sm{properties.major}{properties.minor}", properties.multi_processor_count
    name = INVARIANT if batch_invariant else arch
    return read_configs(name, processors, programmatic_launch=properties.major >= 9)


def read_configs(arch: str, processors: int, *, programmatic_launch: bool) -> KernelConfigs:
    """Configurations of an architecture such as `sm90`, or `default.json` where it has no file."""
    if not (_FOLDER / f"{arch}.json").is_file():
        arch = DEFAULT_ARCH
    text = (_FOLDER / f"{arch}.json").read_text(encoding="utf-8")
    return KernelConfigs(processors, programmatic_launch, json.loads(text))


def _entry(row: dict[str, Any]) -> _Entry:
    values = {k: v for k, v in row.items() if k not in ("phase", "max_rows")}
    return _Entry(row["phase"], float(row.get("max_rows", "inf")), values)
