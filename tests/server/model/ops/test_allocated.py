"""The memory table of bases with states is what their tensors take, at widths of real models."""

from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from pathlib import Path

import pytest
import torch
from msgspec.structs import replace

from loraplex.launcher.bench.engine.random_weights import random_weights
from loraplex.launcher.known_models import served_families
from loraplex.server.config import AtLoad
from loraplex.server.model.devices.sharding import sharded
from loraplex.server.model.families.registry import read_model
from loraplex.server.model.ops.memory import executor_limits, memory_table, weights_bytes
from loraplex.server.model.ops.row_states import RowStates
from loraplex.server.model.spec.served_as import served_as
from tests.grids import sparse
from tests.server.model.driver import engine_config

META = torch.device("meta")
GIB = 1 << 30
STATES = [
    name
    for name, known in served_families().items()
    if known.config and read_model(known.config).states
]


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


@pytest.mark.parametrize(("name", "devices", "at_load"), sparse(STATES, [1, 2], [None, "fp8"]))
def test_the_table_is_what_is_allocated(name: str, devices: int, at_load: AtLoad | None) -> None:
    """The text part's first layers are of every kind."""
    whole = served_as(read_model(served_families()[name].config), at_load, picture_memory=0)
    model = sharded(replace(whole, layers=whole.layers[: whole.kinds_within]), devices)
    engine = engine_config(
        Path(), dtype="bfloat16", kv_memory=GIB, max_running=19, max_draft=3, snapshot_memory=GIB
    )
    limits, dtype = executor_limits(model, engine), torch.bfloat16
    states = RowStates(model, limits.max_rows, dtype, META, limits.num_snapshots, engine.max_draft)
    weights = random_weights(model, dtype, META)
    table = {
        line.name: line.nbytes
        for line in memory_table(model, engine, weights_bytes(model, "bfloat16", packed=True))
    }
    assert table["weights"] == pytest.approx(allocated(weights), rel=0.01)
    said = sum(table[line] for line in ("states", "snapshots", "inputs of drafts"))
    assert said == allocated(states)
    assert limits.num_snapshots > 0
