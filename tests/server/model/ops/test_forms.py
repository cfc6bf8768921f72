"""Layers of two forms, each with its own heads and pages, against attention over dense keys."""

import os
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from msgspec.structs import replace

from loraplex.adapters.base import Shard
from loraplex.server.model.devices.sharding import shard_counts
from loraplex.server.model.families.registry import read_model
from loraplex.server.model.lora.lora import AdapterTable
from loraplex.server.model.lora.sites import Sites
from loraplex.server.model.ops.ops import KVCache, StepLayout
from loraplex.server.model.ops.ops_torch import TorchOps
from loraplex.server.model.ops.rope import cos_sin, inverse_frequencies, rotate
from loraplex.server.model.ops.row_states import RowStates
from loraplex.server.model.spec.model_spec import AttentionSpec, ModelSpec
from loraplex.server.model.spec.page_groups import page_groups
from loraplex.server.model.weights import KvScales
from tests.server.model import fake_flashinfer
from tests.server.model.spec.layers import with_attention

PAGE, ROWS, PAGES_A_ROW = 4, 2, 4
CPU = torch.device("cpu")
WIDE: dict[str, Any] = {"num_heads": 3, "num_kv_heads": 1, "head_dim": 80}
CHANGES: tuple[dict[str, Any], ...] = ({}, WIDE, {"scale": 0.3}, {**WIDE, "window": 5})
NO_NORMS = SimpleNamespace(qk_norm=None, sinks=None)
# Row, start, tokens: prompts, a decode beside a prompt's chunk, decodes.
STEPS = (((0, 0, 7), (1, 0, 3)), ((1, 3, 1), (0, 7, 6)), ((0, 13, 1), (1, 4, 1)))


def model_of_two_forms() -> ModelSpec:
    config: dict[str, Any] = {
        "model_type": "llama",
        "vocab_size": 100,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": len(CHANGES),
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": PAGE * PAGES_A_ROW,
    }
    model = read_model(config)
    layers = tuple(
        with_attention(layer, **change) for layer, change in zip(model.layers, CHANGES, strict=True)
    )
    return replace(model, layers=layers)


MODEL = model_of_two_forms()


@pytest.fixture(params=["torch", "kernels"])
def ops(request: pytest.FixtureRequest) -> Iterator[Any]:
    """Operations with a cache whose pages hold NaN."""
    groups = page_groups(MODEL)
    shape = (len(groups.windows) * ROWS * PAGES_A_ROW, 2 * PAGE * groups.width)
    pool = torch.full(shape, torch.nan)
    cache = KVCache(pool, MODEL, groups, PAGE, torch.float32, (KvScales(),) * MODEL.num_layers)
    sites = Sites(MODEL, Shard())
    table = AdapterTable(
        sites, slots=1, extents=1, extent_bytes=4096, dtype=torch.float32, device=CPU
    )
    states = RowStates(MODEL, ROWS, torch.float32, CPU)
    if request.param == "torch":
        yield TorchOps(MODEL, cache, table, states)
        return
    if os.environ.get("TRITON_INTERPRET") != "1":
        pytest.skip("kernels on the CPU need TRITON_INTERPRET=1")
    with pytest.MonkeyPatch.context() as patch:
        fake_flashinfer.install(patch)
        from loraplex.server.model.ops.attention import prompt_attention
        from loraplex.server.model.ops.attention.attention_cuda import PagedAttention
        from loraplex.server.model.ops.cuda.ops_cuda import CudaOps

        patch.setattr(prompt_attention, "_FLASHINFER_HEADS", (16, 80))
        attention = PagedAttention(MODEL, cache, "fa3", 4, 4)
        limits = (MODEL.max_context, 32)
        yield CudaOps(MODEL, cache, table, attention, limits, states=states)
    fake_flashinfer.forget()


def layout_of(slices: tuple[tuple[int, int, int], ...], page_table: torch.Tensor) -> StepLayout:
    """Decodes come first."""
    rows, starts, counts = np.ascontiguousarray(np.array(slices).T)
    positions = [start + i for _, start, n in slices for i in range(n)]
    return StepLayout(
        num_decodes=int((counts == 1).sum()),
        seq_rows=rows,
        starts=starts,
        num_new=counts,
        token_rows=torch.from_numpy(rows).repeat_interleave(torch.from_numpy(counts)),
        positions=torch.tensor(positions),
        page_table=page_table,
        long_rows=torch.zeros(ROWS, dtype=torch.int64),
    )


def dense(attention: AttentionSpec, qkv: torch.Tensor) -> torch.Tensor:
    """Attention of a whole sequence. qkv: `[tokens, features]` -> `[tokens, heads * head_dim]`."""
    heads, kv_heads, size = attention.num_heads, attention.num_kv_heads, attention.head_dim
    each = qkv.view(len(qkv), -1, size)
    q, k, v = each[:, :heads], each[:, heads:-kv_heads], each[:, -kv_heads:]
    at = torch.arange(len(qkv))
    assert attention.rope is not None
    turns = cos_sin(at, inverse_frequencies(attention.rope, size), 1.0)
    q, k = (rotate(x, *turns, attention.rope) for x in (q, k))
    k, v = (x.repeat_interleave(heads // kv_heads, dim=1) for x in (k, v))
    scores = torch.einsum("nhd,mhd->hnm", q, k) * attention.scale
    seen = at <= at[:, None]
    if attention.window is not None:
        seen &= at > at[:, None] - attention.window
    weights = scores.masked_fill(~seen, -torch.inf).softmax(-1)
    return torch.einsum("hnm,mhd->nhd", weights, v).flatten(1)


def test_layers_of_two_forms_attend_as_dense_attention_does(ops: Any) -> None:
    groups = page_groups(MODEL)
    assert (groups.windows, groups.width) == ((None, None, 5), 80)  # of the first form 64
    torch.manual_seed(0)
    pages = torch.randperm(len(ops.cache.pool)).view(-1, ROWS, PAGES_A_ROW)
    lengths = [14, 5]
    of_layers = [layer.attention for layer in MODEL.layers]
    given = [[torch.randn(n, a.q_size + 2 * a.kv_size) for n in lengths] for a in of_layers]
    found = [[torch.zeros(n, a.q_size) for n in lengths] for a in of_layers]
    for slices in STEPS:
        plan = ops.plan(layout_of(slices, pages))
        for layer, (qkv, out) in enumerate(zip(given, found, strict=True)):
            new = torch.cat([qkv[row][start : start + n] for row, start, n in slices])
            attended = ops.attend(plan, layer, as_product(ops, new), NO_NORMS)
            parts = attended.split([n for *_, n in slices])
            for (row, start, n), part in zip(slices, parts, strict=True):
                out[row][start : start + n] = part
    for attention, qkv, out in zip(of_layers, given, found, strict=True):
        for row in range(ROWS):
            torch.testing.assert_close(out[row], dense(attention, qkv[row]), atol=1e-5, rtol=1e-5)


def test_devices_share_the_heads_of_every_layer() -> None:
    counts = [shard_counts(replace(MODEL, layers=(layer,))) for layer in MODEL.layers[:2]]
    assert (*counts, shard_counts(MODEL)) == ((1, 2, 4), (1, 3), (1,))


def as_product(ops: Any, qkv: torch.Tensor) -> Any:
    """As the operations give a product."""
    return qkv if isinstance(ops, TorchOps) else ops.completed(qkv)
