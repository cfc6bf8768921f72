"""Which kernel attends to a layer's prompts, and that both give what float64 gives."""

import os
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from msgspec.structs import replace

from loraplex.server.kernels.attention.scores import ScoreRule
from loraplex.server.model.families.registry import read_model
from loraplex.server.model.ops.ops import KVCache, StepLayout
from loraplex.server.model.spec.model_spec import ModelSpec
from loraplex.server.model.spec.page_groups import PageGroups
from loraplex.server.model.weights import KvScales
from tests.grids import sparse
from tests.kernels.test_prompt_attention import attended
from tests.server.model import fake_flashinfer
from tests.server.model.spec.layers import with_attention

PAGE, ROWS, PAGES_A_ROW = 16, 3, 24
SLICES = ((2, 0, 130), (0, 33, 17), (1, 300, 60))  # row, start, tokens
CHANGES: tuple[dict[str, Any], ...] = (
    {},
    {"scale": 0.3},
    {"window": 40},
    {"softcap": 5.0},
    {"num_heads": 4, "num_kv_heads": 1, "head_dim": 64},
)
LAYERS = ((0, 0), (0, 1), (1, 0), (0, 2), (2, 1))  # group, place


def model_of(head_dim: int) -> ModelSpec:
    """A layer for each of CHANGES."""
    config: dict[str, Any] = {
        "model_type": "llama",
        "vocab_size": 100,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": len(CHANGES),
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "head_dim": head_dim,
        "max_position_embeddings": 512,
    }
    model = read_model(config)
    layers = tuple(
        with_attention(layer, **change) for layer, change in zip(model.layers, CHANGES, strict=True)
    )
    return replace(model, layers=layers)


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> Iterator[torch.device]:
    """With a stand-in for FlashInfer on the CPU."""
    interpreted = os.environ.get("TRITON_INTERPRET") == "1"
    if request.param == "cuda":
        if interpreted or not torch.cuda.is_available():
            pytest.skip("no CUDA device")
        yield torch.device("cuda")
        return
    if not interpreted:
        pytest.skip("kernels on the CPU need TRITON_INTERPRET=1")
    with pytest.MonkeyPatch.context() as patch:
        fake_flashinfer.install(patch)
        yield torch.device("cpu")
    fake_flashinfer.forget()


def layout_of(slices: Sequence[tuple[int, int, int]], page_table: torch.Tensor) -> StepLayout:
    seq_rows, starts, num_new = np.ascontiguousarray(np.array(slices).T)
    nothing = torch.zeros(0, dtype=torch.int64, device=page_table.device)
    return StepLayout(0, seq_rows, starts, num_new, nothing, nothing, page_table, nothing)


@pytest.mark.parametrize(
    ("head_dim", "captured", "fp8"),
    sparse([64, 96, 128, 256], [False, True], [None, "with room", "without room"]),
)
def test_layers_of_every_kind(
    device: torch.device,
    head_dim: int,
    captured: bool,
    fp8: str | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Captured: for a step of more tokens than this one. FP8: the room is for widened pages."""
    from loraplex.server.model.ops.attention import prompt_attention
    from loraplex.server.model.ops.attention.attention_cuda import prompt_backend
    from loraplex.server.model.ops.attention.prompt_attention import (
        ChosenPrompts,
        PromptAttention,
        prompt_kernels,
    )
    from loraplex.server.model.ops.sizes import MAX_PROMPTS, PromptRoom

    model, dtype = model_of(head_dim), torch.bfloat16 if device.type == "cuda" else torch.float32
    plain = "Triton" if head_dim == 96 else "FlashInfer"
    assert prompt_kernels(model) == (plain, plain, "Triton", "Triton", "FlashInfer")
    assert set(prompt_kernels(model, rounded_cache=True, captured=True)) == {"Triton"}
    if fp8 == "without room":
        monkeypatch.setattr(prompt_attention, "WIDENED_BYTES", PAGE)
    capability = torch.cuda.get_device_capability(device)
    backend = prompt_backend(capability) if device.type == "cuda" else "fa3"
    if captured and backend != "fa3":
        pytest.skip("graphs launch FlashInfer's FA3 alone")
    torch.manual_seed(head_dim)
    groups = PageGroups((None, 40, None), LAYERS, 3 * 2 * head_dim)
    pool = torch.randn(ROWS * PAGES_A_ROW, 2 * PAGE * groups.width).to(device, dtype)
    scales = (KvScales(0.5, 2.0) if fp8 else KvScales(),) * model.num_layers
    pool = pool.to(torch.float8_e4m3fn) if fp8 else pool
    cache = KVCache(pool, model, groups, PAGE, dtype, scales)
    pages = torch.stack([torch.randperm(ROWS * PAGES_A_ROW) for _ in groups.windows])
    page_table = pages.view(-1, ROWS, PAGES_A_ROW).to(device)
    tokens, most = sum(n for _, _, n in SLICES), 250
    room = PromptRoom(most, MAX_PROMPTS * PAGES_A_ROW) if captured else None
    prompts = PromptAttention(model, cache, backend, room)
    widened = [of for of in prompts._plans if isinstance(of, ChosenPrompts)]
    of_pages = [of._widened for of in widened if of._widened is not None]
    assert len(of_pages) == len(widened)
    memory = {of._wide.untyped_storage().data_ptr() for of in of_pages}
    assert len(memory) == min(1, len(widened))
    sizes = [(of.attention.num_heads, of.attention.head_dim) for of in model.layers]
    rows = most if captured else tokens
    queries = [torch.randn(rows, *size).to(device, dtype) for size in sizes]
    outs = [torch.zeros_like(q) for q in queries]
    launches: list[Callable[[], None]] = [
        partial(prompts.run, number, q, out)
        for number, (q, out) in enumerate(zip(queries, outs, strict=True))
    ]
    if captured:
        prompts.plan(layout_of([(0, 0, most)], page_table))
        launches = [replayed(launch, device) for launch in launches]
    prompts.plan(layout_of(SLICES, page_table))
    for launch in launches:
        launch()
    tolerance = 5e-5 if dtype == torch.float32 else 2e-2
    for number, out in enumerate(outs):
        table = page_table[groups.group(number)]
        stored = zip(cache.of(number), scales[number], strict=True)
        k, v = (each.to(dtype) * scale for each, scale in stored)
        wanted = expected(model, number, queries[number], (k, v), table)
        torch.testing.assert_close(out[:tokens].double(), wanted, atol=tolerance, rtol=tolerance)


def expected(
    model: ModelSpec,
    number: int,
    q: torch.Tensor,
    pages: tuple[torch.Tensor, torch.Tensor],
    page_table: torch.Tensor,
) -> torch.Tensor:
    spec = model.layers[number].attention
    rule, found, first = ScoreRule(spec.scale, spec.softcap, spec.window), [], 0
    for row, start, n in SLICES:
        k, v = (each[page_table[row]].flatten(0, 1)[: start + n].double() for each in pages)
        found.append(attended(q[first : first + n].double(), k, v, start, rule, None))
        first += n
    return torch.cat(found)


def replayed(launch: Callable[[], None], device: torch.device) -> Callable[[], None]:
    """From a graph, where there are any."""
    if device.type == "cpu":
        return launch
    launch()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        launch()
    replay: Callable[[], None] = graph.replay
    return replay
