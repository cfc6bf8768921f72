"""What a worker allocates where nobody said how much."""

from dataclasses import fields
from typing import Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loraplex.adapters.peft.validate import MAX_LORA_RANK
from loraplex.server.config import ServeMode, WorkerConfig
from loraplex.server.kernels.lora.table import MAX_RANK
from loraplex.server.worker.process.sizing import choose_sizes

GIB = 1 << 30


def test_a_cpu_gets_small_sizes() -> None:
    sizes = choose_sizes(WorkerConfig(model="m"), "cpu", 0, 512 * GIB)
    assert (sizes.kv_memory, sizes.adapter_memory) == (256 << 20, 256 << 20)
    assert (sizes.max_running, sizes.max_step_tokens, sizes.max_draft) == (64, 512, 8)


def test_a_gpu_gets_a_share_for_adapters_and_leaves_the_cache_to_the_engine() -> None:
    sizes = choose_sizes(WorkerConfig(model="m"), "cuda", 80 * GIB, 20 * GIB)
    assert (sizes.kv_memory, sizes.adapter_memory) == (0, 8 * GIB)
    assert (sizes.host_adapter_memory, sizes.max_draft) == (5 * GIB, 0)


@pytest.mark.parametrize(
    ("gib", "running", "step_tokens"),
    [(14.6, 128, 2048), (22.5, 128, 2048), (39.4, 256, 4096), (44.4, 256, 4096),
     (79.1, 512, 8192), (139.8, 512, 8192)],
)  # fmt: skip
def test_a_larger_gpu_runs_more_at_once(gib: float, running: int, step_tokens: int) -> None:
    sizes = choose_sizes(WorkerConfig(model="m"), "cuda", int(gib * GIB), 64 * GIB)
    assert (sizes.max_running, sizes.max_step_tokens) == (running, step_tokens)


@pytest.mark.parametrize(("mode", "running"), [("local", 4), ("interactive", 1)])
@pytest.mark.parametrize(("device", "step_tokens"), [("cpu", 512), ("cuda", 2048)])
def test_modes_for_few_users(
    mode: ServeMode, running: int, device: Literal["cpu", "cuda"], step_tokens: int
) -> None:
    sizes = choose_sizes(WorkerConfig(model="m", mode=mode), device, 80 * GIB, 64 * GIB)
    assert (sizes.max_running, sizes.max_step_tokens) == (running, step_tokens)
    assert (sizes.kv_contexts, sizes.max_draft) == (2 * running, 8)
    asked = WorkerConfig(model="m", mode=mode, max_running=9, max_step_tokens=3000)
    sizes = choose_sizes(asked, device, 80 * GIB, 64 * GIB)
    assert (sizes.max_running, sizes.max_step_tokens, sizes.kv_contexts) == (9, 3000, 18)


@pytest.mark.parametrize(
    ("gib", "state", "running"),
    [(139.8, 48 << 20, 372), (139.8, 1 << 20, 512), (22.5, 48 << 20, 60), (2, 1 << 30, 1)],
)
def test_states_of_all_rows_are_an_eighth_of_the_device_at_most(
    gib: float, state: int, running: int
) -> None:
    for device, gpu, host in (("cuda", gib, 64), ("cpu", 0, gib)):
        config, sizes = WorkerConfig(model="m"), (int(gpu * GIB), int(host * GIB), state)
        found = choose_sizes(config, device, *sizes)  # type: ignore[arg-type]
        assert found.max_running == min(running, 512 if device == "cuda" else 64)
        assert found.max_draft == (0 if device == "cuda" else 8)
        memory = int(gib * GIB) // 16
        assert found.snapshot_memory == min(memory, max(16, 4 * found.max_running) * state)
        few = WorkerConfig(model="m", snapshot_memory=0)
        assert choose_sizes(few, device, *sizes).snapshot_memory == 0  # type: ignore[arg-type]


@given(st.sampled_from(["cpu", "cuda"]), st.integers(1, 1 << 40), st.integers(1, 1 << 40))
def test_what_was_asked_for_is_kept(device: Literal["cpu", "cuda"], gpu: int, host: int) -> None:
    config = WorkerConfig(
        model="m",
        adapter_memory=1,
        host_adapter_memory=2,
        kv_memory=3,
        max_running=4,
        max_step_tokens=5,
        max_draft=0,
    )
    sizes = choose_sizes(config, device, gpu, host)
    assert (sizes.adapter_memory, sizes.host_adapter_memory, sizes.kv_memory) == (1, 2, 3)
    assert (sizes.max_running, sizes.max_step_tokens, sizes.max_draft) == (4, 5, 0)


def test_no_more_run_at_once_than_a_step_has_tokens() -> None:
    sizes = choose_sizes(WorkerConfig(model="m", max_step_tokens=40), "cpu", 0, GIB)
    assert (sizes.max_running, sizes.max_step_tokens) == (40, 40)


def test_the_largest_rank_to_accept_is_what_the_kernels_serve() -> None:
    option = next(field for field in fields(WorkerConfig) if field.name == "max_lora_rank")
    assert option.metadata["max"] == option.default == MAX_LORA_RANK == MAX_RANK
