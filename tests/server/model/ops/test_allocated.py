"""The memory table of bases with states is what a start allocates, at widths of real models."""

import json
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from itertools import product
from pathlib import Path

import pytest
import torch

from loraplex.adapters.base import Shard
from loraplex.launcher.bench.engine.random_weights import random_weights
from loraplex.launcher.known_models import served_families
from loraplex.server.config import AtLoad
from loraplex.server.model.devices.group import Alone
from loraplex.server.model.families.registry import read_model
from loraplex.server.model.graphs.start_phases import StartPhases
from loraplex.server.model.ops.memory import WORKSPACE, memory_table, state_bytes, weights_bytes
from loraplex.server.model.start import build_parts
from tests.grids import beyond, sparse
from tests.server.model.driver import engine_config

META = torch.device("meta")
GIB = 1 << 30
STATES = [
    name
    for name, known in served_families().items()
    if known.config and read_model(known.config).states
]

# Hundreds of experts in each layer, which take seconds.
WITH_EXPERTS = ("qwen3_5_moe", "qwen3_5_moe_text", "qwen3_next")


def tensors(of: object) -> Iterator[torch.Tensor]:
    """All tensors that an object has, however deep."""
    if isinstance(of, torch.Tensor):
        yield of
        return
    inner: object = ()
    if is_dataclass(of):
        inner = [getattr(of, field.name) for field in fields(of)]
    elif isinstance(of, dict):
        inner = of.values()
    elif isinstance(of, list | tuple):
        inner = of
    elif hasattr(of, "__dict__"):
        inner = vars(of).values()
    for each in inner:  # type: ignore[attr-defined]
        yield from tensors(each)


def allocated(of: object) -> int:
    """Bytes of all its tensors, of each once."""
    return sum({id(each): each.nbytes for each in tensors(of)}.values())


def test_every_family_with_states_is_tried() -> None:
    types = {"bamba", "falcon_h1", "granitemoehybrid", "lfm2", "lfm2_moe", "nemotron_h"}
    assert types | {"olmo_hybrid", "qwen3_5_text", "qwen3_5_moe_text", "qwen3_next"} <= {*STATES}


@pytest.mark.parametrize(
    ("name", "devices", "at_load"),
    [
        *sparse([name for name in STATES if name not in WITH_EXPERTS], [1, 2], [None, "fp8"]),
        *beyond(0, [*product(WITH_EXPERTS, [1, 2], [None, "fp8"])]),
    ],
)
def test_the_table_is_what_a_start_allocates(
    name: str,
    devices: int,
    at_load: AtLoad | None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A whole start of the text part, all layers. What has no line of its own is of the
    workspace."""
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda of: of)  # wants a GPU
    (tmp_path / "config.json").write_text(json.dumps(served_families()[name].config))
    memory = {"kv_memory": GIB, "adapter_memory": GIB, "snapshot_memory": GIB, "picture_memory": 0}
    shape = {"max_running": 19, "max_draft": 3, "page_size": 16, "extent_bytes": 1 << 20}
    engine = engine_config(tmp_path, dtype="bfloat16", quantize=at_load, **memory, **shape)
    group = Alone()
    group.shard = Shard(0, devices)
    parts = build_parts(engine, group, random_weights, META, StartPhases())
    model, states = parts.model, allocated(parts.states)
    table = {
        line.name: line.nbytes
        for line in memory_table(model, engine, weights_bytes(model, "bfloat16", packed=True))
    }
    found = {"weights": parts.weights, "KV cache": parts.cache.pool, "adapters": parts.table}
    for line, part in found.items():
        assert allocated(part) == pytest.approx(table.get(line, 0), rel=0.01), line
    assert sum(table.get(line, 0) for line in ("states", "snapshots", "inputs of drafts")) == states
    assert (parts.limits.num_snapshots > 0) == bool(model.attentions)
    assert allocated((parts.rows, parts.parameters)) < table[WORKSPACE]
    # Bytes of a sequence, as `loraplex info` prints them.
    of_row = state_bytes(model, "bfloat16")
    assert of_row * (engine.max_running + 1) == table["states"]
