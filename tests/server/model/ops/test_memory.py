"""The KV cache gets what is left of a GPU, or the start says what takes its room."""

from pathlib import Path

import msgspec
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from loraplex.launcher.bench.engine.offline import SHIPPED
from loraplex.launcher.bench.engine.random_weights import random_packed
from loraplex.launcher.known_models import served_families
from loraplex.server.config import ConfigError, WorkerConfig
from loraplex.server.engine.memory.room import tokens_that_fit
from loraplex.server.model.checkpoint.checkpoint import read_config
from loraplex.server.model.families.registry import read_model
from loraplex.server.model.graphs.warm_up import warm_sizes
from loraplex.server.model.linear.quantised import (
    QuantisedLinear,
    RoundedLinear,
    matrix_of,
    of_rounded_inputs,
)
from loraplex.server.model.ops.memory import (
    LOGITS_ROWS,
    DeviceMemory,
    executor_limits,
    fill_device,
    memory_table,
    page_bytes,
    split_prompts_bytes,
    state_bytes,
    weights_bytes,
    workspace_bytes,
)
from loraplex.server.model.quantisation.forms import EightBitForm, InputForm, multiplies_rounded
from loraplex.server.model.spec.model_spec import AttentionSpec, ModelSpec
from loraplex.server.model.spec.served_as import served_as
from loraplex.server.worker.process.sizing import choose_sizes
from tests.server.model.driver import engine_config
from tests.server.model.spec.layers import with_attention

GIB = 1 << 30
FOLDER: Path = SHIPPED / "llama-3.1-8b"
MODEL = read_config(FOLDER)
AUTO = engine_config(
    FOLDER,
    dtype="bfloat16",
    kv_memory=0,
    adapter_memory=8 * GIB,
    max_running=256,
    max_step_tokens=8192,
    page_size=16,
)


@pytest.mark.parametrize("total", [80 * GIB, 140 * GIB])
def test_everything_is_used_and_nothing_twice(total: int) -> None:
    others, weights = GIB, 15 * GIB
    memory = DeviceMemory(total, total - others, total - others - weights)
    filled = fill_device(MODEL, AUTO, memory)
    used = others + weights + filled.kv_memory + filled.adapter_memory
    assert used + workspace_bytes(MODEL, filled) == int(total * 0.9)
    assert executor_limits(MODEL, filled).num_pages * 16 > 100_000


@pytest.mark.parametrize(
    ("gib", "tokens"), [(23.9, 4_000), (39.4, 80_000), (79.1, 300_000), (139.8, 600_000)]
)
def test_eight_billion_parameters_start_on_any_usual_gpu(gib: float, tokens: int) -> None:
    """By default, with a few hundred MB for the driver and others."""
    total = int(gib * GIB)
    sizes = choose_sizes(WorkerConfig(model="m"), "cuda", total, 64 * GIB)
    config = msgspec.structs.replace(
        AUTO,
        adapter_memory=sizes.adapter_memory,
        max_running=sizes.max_running,
        max_step_tokens=sizes.max_step_tokens,
    )
    free = total - GIB // 2
    filled = fill_device(MODEL, config, DeviceMemory(total, free, free - 15 * GIB))
    assert executor_limits(MODEL, filled).num_pages * 16 > tokens


def test_a_mode_for_few_leaves_the_rest_of_the_gpu() -> None:
    memory = DeviceMemory(79 * GIB, 79 * GIB, 64 * GIB)
    for context, contexts in ((8192, 8), (1000, 2)):
        asked = msgspec.structs.replace(AUTO, max_context=context, kv_contexts=contexts)
        limits = executor_limits(MODEL, fill_device(MODEL, asked, memory))
        assert limits.num_pages == contexts * (-(-context // 16) + 1)
        assert limits.max_context == context
    all_of_it = msgspec.structs.replace(AUTO, kv_contexts=1000)
    assert (
        fill_device(MODEL, all_of_it, memory).kv_memory
        == fill_device(MODEL, AUTO, memory).kv_memory
    )


def test_states_and_snapshots_are_lines_of_the_table() -> None:
    """Qwen3.5-9B has 24 layers, each with 32 matrices of 128 x 128 and 3 inputs of 8,192."""
    model = read_model(served_families()["qwen3_5_text"].config)
    each = 24 * (32 * 128 * 128 * 4 + 3 * 8192 * 2)
    assert state_bytes(model, "bfloat16") == each
    assert {line.name: line.nbytes for line in memory_table(model, AUTO, 1)}["states"] == 257 * each
    memory = DeviceMemory(140 * GIB, 139 * GIB, 121 * GIB)
    filled = fill_device(model, AUTO, memory)
    fewer = fill_device(model, msgspec.structs.replace(AUTO, max_running=128), memory)
    assert fewer.kv_memory - filled.kv_memory > 128 * each
    assert executor_limits(model, filled).has_states
    assert "states" not in {line.name for line in memory_table(MODEL, AUTO, 1)}
    kept = msgspec.structs.replace(AUTO, snapshot_memory=10 * each + 1)
    table = {line.name: line.nbytes for line in memory_table(model, kept, 1)}
    assert table["snapshots"] == 10 * each
    of_kept = fill_device(model, kept, memory)
    assert filled.kv_memory - of_kept.kv_memory == 10 * each
    assert executor_limits(model, of_kept).num_snapshots == 10


def test_the_disk_is_for_pages_where_host_memory_keeps_no_snapshot() -> None:
    model = read_model(served_families()["qwen3_5_text"].config)
    each = state_bytes(model, "bfloat16")
    sizes = {"kv_memory": 9 * each, "snapshot_memory": each, "disk_kv": 100 * each}
    little, enough = (
        msgspec.structs.replace(AUTO, host_kv_memory=count * each, **sizes) for count in (9, 10)
    )
    both, pages = executor_limits(model, enough), executor_limits(model, little)
    assert (both.host_snapshots, both.disk_snapshots) == (1, 9)
    assert (pages.host_snapshots, pages.disk_snapshots) == (0, 0)
    assert pages.disk_pages * 9 // 10 <= both.disk_pages < pages.disk_pages
    table = {(line.name, line.where): line.nbytes for line in memory_table(model, little, 1)}
    assert table["KV cache", "disk"] == 100 * each


def test_inputs_of_drafts_are_a_line_of_the_table() -> None:
    """Qwen3.5-9B has q, k, v and z, and two numbers for each of 32 heads."""
    model = read_model(served_families()["qwen3_5_text"].config)
    asked = engine_config(FOLDER, kv_memory=GIB, max_draft=3, dtype="bfloat16", max_running=7)
    table = {line.name: line.nbytes for line in memory_table(model, asked, 1)}
    assert table["inputs of drafts"] == 8 * 3 * 24 * (8192 + 4096 + 64) * 2
    assert executor_limits(model, asked).max_decodes == 16


def test_what_was_asked_for_is_kept() -> None:
    asked = engine_config(FOLDER, kv_memory=5 * GIB)
    assert fill_device(MODEL, asked, DeviceMemory(21 * GIB, 21 * GIB, 6 * GIB)) == asked


def test_what_was_asked_for_must_fit() -> None:
    asked = engine_config(FOLDER, kv_memory=8 * GIB)
    words = r"weights 15\.0 GiB.*other programs 1\.0 GiB, KV cache 8\.0 GiB.*lower.*--kv-memory"
    with pytest.raises(ConfigError, match=words):
        fill_device(MODEL, asked, DeviceMemory(24 * GIB, 23 * GIB, 8 * GIB))


def test_too_little_gives_the_estimate_and_advice() -> None:
    memory = DeviceMemory(24 * GIB, 23 * GIB, 8 * GIB)
    with pytest.raises(ConfigError, match=r"weights 15\.0 GiB.*Raise --gpu-memory-utilization"):
        fill_device(MODEL, AUTO, memory)


def test_weights_are_known_before_they_are_read() -> None:
    """Of Llama-3.1-8B: 8,030,261,248 parameters."""
    assert weights_bytes(MODEL, "bfloat16", packed=True) == 8_030_261_248 * 2


@pytest.mark.parametrize(
    ("most", "sizes"),
    [(2, {1, 2}), (300, {1, 3, 40, 300}), (8192, {1, 3, 40, 300, 600, 2100, 8192})],
)
def test_the_largest_step_is_the_first_at_start(most: int, sizes: set[int]) -> None:
    found = warm_sizes(most)
    assert set(found) == sizes
    assert found == sorted(found, reverse=True)


def test_tables_of_pages_and_adapters_are_counted() -> None:
    def workspace(**changes: int) -> int:
        return workspace_bytes(MODEL, msgspec.structs.replace(AUTO, **changes))

    pages = MODEL.max_context // 16
    assert workspace(page_size=1) - workspace() == AUTO.max_running * 15 * pages * 8
    assert workspace(adapter_slots=1016) - workspace(adapter_slots=16) == 1000 * (32 * 4 + 2) * 64


def windowed(*windows: int | None) -> ModelSpec:
    """Llama-3.1-8B, whose layers have these windows in turn."""
    layers = tuple(
        with_attention(layer, window=windows[number % len(windows)])
        for number, layer in enumerate(MODEL.layers)
    )
    return msgspec.structs.replace(MODEL, layers=layers)


TOKEN = 2 * 32 * 8 * 128 * 2  # bytes of keys and values in all layers


@pytest.mark.parametrize(
    ("windows", "groups", "page"),
    [
        ((None,), (None,), TOKEN * 16),
        ((4096, None), (None, 4096), TOKEN * 8),
        ((4096, 4096, 4096, None), (None, 4096, 4096, 4096), TOKEN * 4),
        ((4096,), (4096,), TOKEN * 16),
    ],
)
def test_pages_are_of_groups_of_layers(
    windows: tuple[int | None, ...], groups: tuple[int | None, ...], page: int
) -> None:
    model = windowed(*windows)
    engine = msgspec.structs.replace(AUTO, kv_memory=2000 * page + page // 2)
    limits = executor_limits(model, engine)
    assert (limits.page_windows, limits.num_pages) == (groups, 2000)
    assert page_bytes(model, engine) == page
    fit = tokens_that_fit(2000, 16, groups)
    assert limits.max_context == min(MODEL.max_context, fit)
    workspace = workspace_bytes(model, engine) - workspace_bytes(windowed(groups[0]), engine)
    assert workspace == (len(groups) - 1) * AUTO.max_running * MODEL.max_context // 16 * 8


def test_a_context_of_windows_needs_less_memory() -> None:
    model = windowed(4096, None)
    needed = (100_000 // 16 + 258) * 16 * TOKEN // 2
    enough = msgspec.structs.replace(AUTO, kv_memory=needed, max_context=100_000)
    assert executor_limits(model, enough).max_context == 100_000
    little = msgspec.structs.replace(enough, kv_memory=needed - 1)
    words = f"enough for 99984 tokens; --max-context 100000 takes {needed}$"
    with pytest.raises(ConfigError, match=words):
        executor_limits(model, little)
    nothing = msgspec.structs.replace(AUTO, kv_memory=8 * TOKEN)
    with pytest.raises(ConfigError, match=f"one page alone takes {16 * TOKEN}$"):
        executor_limits(model, nothing)


def test_a_mask_of_each_row_is_counted() -> None:
    """4 bytes for 32 ids, beside the copies of logits."""

    def workspace(rows: int, vocab: int) -> int:
        embedding = msgspec.structs.replace(MODEL.embedding, vocab_size=vocab)
        model = msgspec.structs.replace(MODEL, embedding=embedding)
        return workspace_bytes(model, msgspec.structs.replace(AUTO, max_running=rows))

    def of_row(vocab: int) -> int:
        return workspace(257, vocab) - workspace(256, vocab)

    assert of_row(64_001) - of_row(64_000) == 2 * 2 + 4
    assert of_row(64_032) - of_row(64_001) == 31 * 2 * 2


def test_a_longer_context_is_counted() -> None:
    """Tokens and pages of each row, tokens of those with penalties, and the rotation."""

    def workspace(context: int) -> int:
        return workspace_bytes(MODEL, msgspec.structs.replace(AUTO, max_context=context))

    of_rows = AUTO.max_running * (4 * 4096 + 8 * 256)
    more = of_rows + LOGITS_ROWS * 4 * 4096 + 4 * 4096 * MODEL.layers[0].attention.head_dim
    assert workspace(8192) - workspace(4096) == more


def planned_bytes(
    prompts: list[tuple[int, int]], heads: tuple[int, int, int], processors: int
) -> int:
    """What FlashInfer asks of its workspace for prompts of (new tokens, pages of 16); heads: of
    queries, of keys, and their size."""
    num_heads, num_kv_heads, head_dim = heads
    queries = [new * num_heads // num_kv_heads for new, _ in prompts]
    mean = sum(queries) // len(queries)
    tile = 128 if mean > 64 and head_dim < 256 else 64 if mean > 16 else 16

    def pieces(chunk: int) -> int:
        return sum(
            -(-q // tile) * -(-p // chunk) for q, (_, p) in zip(queries, prompts, strict=True)
        )

    longest = max(pages for _, pages in prompts)
    room = 2 * processors // num_kv_heads
    chunk = next((c for c in range(8, longest) if pieces(c) <= room), None)
    return 0 if chunk is None else num_heads * pieces(chunk) * tile * (head_dim + 1) * 4


@given(
    prompts=st.lists(st.tuples(st.integers(1, 900), st.integers(57, 400)), min_size=1, max_size=9),
    heads=st.tuples(st.sampled_from([8, 16, 64]), st.sampled_from([1, 2, 8]), st.just(128))
    | st.tuples(st.just(8), st.just(1), st.sampled_from([64, 256])),
    processors=st.sampled_from([58, 108, 142, 188]),
)
def test_contexts_that_are_cut_have_room(
    prompts: list[tuple[int, int]], heads: tuple[int, int, int], processors: int
) -> None:
    room = split_prompts_bytes(of_heads(*heads), processors)
    assert planned_bytes(prompts, heads, processors) <= room


def test_that_room_can_be_needed() -> None:
    """By one prompt of a tile with a long context, where 256 MiB would be too little."""
    heads, processors = (64, 4, 128), 148
    room = split_prompts_bytes(of_heads(*heads), processors)
    assert planned_bytes([(8, 74 * 16)], heads, processors) == room > 256 << 20


def of_heads(num_heads: int, num_kv_heads: int, head_dim: int) -> AttentionSpec:
    return msgspec.structs.replace(
        MODEL.layers[0].attention,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
    )


def test_quantised_matrices_need_room_to_be_written_out() -> None:
    """FP8 with rounded inputs is multiplied as it is; lengths of DoRA's rows want it written."""
    gate_and_up = 2 * 28_672 * 4096  # in bfloat16
    of_weights_alone = served_as(MODEL, "fp8", "bf16")
    for quantised, times in ((served_as(MODEL, "nf4"), 2), (served_as(MODEL, "fp8"), 1)):
        more = workspace_bytes(quantised, AUTO) - workspace_bytes(MODEL, AUTO)
        assert more == times * gate_and_up
    more = workspace_bytes(of_weights_alone, AUTO) - workspace_bytes(MODEL, AUTO)
    assert more == 2 * gate_and_up


@pytest.mark.parametrize(
    ("form", "as_they_are"),
    [
        (EightBitForm("fp8", "channel", inputs=InputForm("token")), True),
        (EightBitForm("fp8", "tensor", inputs=InputForm("tensor")), True),
        (EightBitForm("fp8", "block", (128, 128), inputs=InputForm("group", 128)), True),
        (EightBitForm("fp8", "channel", inputs=InputForm("group", 128)), False),
        (EightBitForm("int8", "channel", inputs=InputForm("token")), False),
        (EightBitForm("int8", "channel", inputs=InputForm("token", numbers="int8")), True),
    ],
)
def test_what_is_multiplied_in_eight_bits_is_known_from_its_form(
    form: EightBitForm, as_they_are: bool
) -> None:
    """As the product itself says, of a matrix of this form."""
    packed = random_packed(form, (256, 256), 0.02, torch.device("cpu"))
    matrix = matrix_of(packed)
    assert matrix is not None
    linear = of_rounded_inputs(QuantisedLinear(matrix, None, torch.bfloat16), form.inputs)
    assert isinstance(linear, RoundedLinear)
    assert linear.multiplies_rounded is as_they_are is multiplies_rounded(form)
