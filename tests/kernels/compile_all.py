"""Compile every kernel for a GPU that need not be there.

`python -m tests.kernels.compile_all 90`: for the capability 9.0.

The wrappers are called on tensors of the CPU and in bfloat16, as they are on a GPU; nothing is
launched. The interpreter that other tests use accepts more than the compiler does.
"""

import os
import sys
from dataclasses import replace

os.environ["TRITON_INTERPRET"] = "0"  # before Triton is imported

import numpy as np
import torch
import triton
from triton.backends.compiler import GPUTarget

from loraplex.server.kernels.attention.decode_attention import (
    DecodeBatchView,
    DecodeScratch,
    LayerScores,
    decode_attention,
)
from loraplex.server.kernels.attention.decode_inputs import Shifted, gather_inputs, gather_pages
from loraplex.server.kernels.attention.decode_work import WorkLayout
from loraplex.server.kernels.attention.latent_append import LatentNorm, NewTokens, latent_append
from loraplex.server.kernels.attention.latent_attention import (
    latent_decodes,
    latent_prompts,
    latent_tiles,
)
from loraplex.server.kernels.attention.pages import CachePages, widen_pages
from loraplex.server.kernels.attention.prompt_attention import prompt_attention, tile_shape
from loraplex.server.kernels.attention.rope_append import (
    QkNorm,
    Rotation,
    rope_append,
    rope_append_lora,
)
from loraplex.server.kernels.attention.scores import ScoreRule
from loraplex.server.kernels.attention.unfolded_attention import (
    UnfoldedKeys,
    unfolded_prompts,
    unfolded_tiles,
)
from loraplex.server.kernels.attention.whole_attention import whole_attention
from loraplex.server.kernels.launch.compile_ahead import compiled_together
from loraplex.server.kernels.launch.configs import (
    INVARIANT,
    KernelConfigs,
    Phase,
    SkinnyLoraConfig,
    read_configs,
)
from loraplex.server.kernels.linear import matrix as matrix_module
from loraplex.server.kernels.linear.few_rows import packed_product, rounded_product
from loraplex.server.kernels.linear.packed import dequantise
from loraplex.server.kernels.linear.round_rows import quantise_rows
from loraplex.server.kernels.linear.row_form import RowForm, allocate_rows
from loraplex.server.kernels.linear.skinny import fixed_product, skinny_product, stages_of
from loraplex.server.kernels.linear.skinny_lora import SkinnyLora, skinny_product_lora
from loraplex.server.kernels.linear.stack import allocate_stack, stack_rows
from loraplex.server.kernels.lora.expand import expand, scale_outputs
from loraplex.server.kernels.lora.latent_lora import (
    AbsorbedLora,
    HeadRows,
    LatentProduct,
    absorb,
)
from loraplex.server.kernels.lora.pending import PendingDelta, PendingLora
from loraplex.server.kernels.lora.segments import allocate_segments, route
from loraplex.server.kernels.lora.shrink import gather_embedding, shrink
from loraplex.server.kernels.lora.table import RANK_BLOCKS, LoraTable, VectorTable
from loraplex.server.kernels.lora.workspace import allocate_workspace
from loraplex.server.kernels.moe.choose import ChoiceRule, assign_experts
from loraplex.server.kernels.moe.expert_lora import ExpertLora, add_expert_lora
from loraplex.server.kernels.moe.grouped import (
    ExpertTiles,
    grouped_product,
    grouped_shape,
    row_product,
    tokens_of_each_shape,
)
from loraplex.server.kernels.moe.row_lora import activated_row_lora, add_row_lora
from loraplex.server.kernels.pointwise.add_norm import (
    ExpertTerms,
    add_experts_norm,
    add_norm,
    rms_norm,
)
from loraplex.server.kernels.pointwise.gated import (
    Activation,
    ExpertActivation,
    GatedActivation,
    gated,
    gated_lora,
)
from loraplex.server.kernels.pointwise.shared_terms import SharedTerms
from loraplex.server.kernels.pointwise.sum_norm import sum_norm
from loraplex.server.kernels.sampling.draw import DrawRows, draw_append
from loraplex.server.kernels.sampling.draw_columns import DRAW_COLUMNS
from loraplex.server.kernels.sampling.greedy import DrawMasks, GreedyScratch, greedy_append
from loraplex.server.kernels.states.causal_conv import Runs, Singles, Walks, causal_conv
from loraplex.server.kernels.states.operands import (
    Convolution,
    GatedNorm,
    StateGates,
    StateHeads,
)
from loraplex.server.kernels.states.recurrence import delta_rule, gated_norm, state_space
from loraplex.server.model.linear.quantised import matrix_of
from tests.kernels.quantised import LAYOUTS, Make

CPU = torch.device("cpu")
DTYPE = torch.bfloat16
ACTIVATION_OF_EXPERTS: GatedActivation = "clamped_swiglu"
OF_EXPERTS: tuple[ExpertActivation | None, ...] = (None, ACTIVATION_OF_EXPERTS, "relu2")
# Scores of a layer with nothing beside a scale, and with all that a layer may have.
PLAIN = LayerScores(ScoreRule(1.0))
FULL = LayerScores(ScoreRule(1.0, 50.0, 4096), 0, torch.zeros(8))
SLOPED = LayerScores(ScoreRule(1.0, slopes=torch.zeros(8)))
FULL_SLOPED = LayerScores(replace(FULL.rule, slopes=torch.zeros(8)), 0, FULL.sinks)
WIDTHS = (512, 128, 128)
HALVES, NONE = Rotation(torch.zeros(8, 64)), Rotation(torch.zeros(8, 0))
PART = Rotation(torch.zeros(8, 48), q_scale=torch.zeros(8))
NEIGHBOURS = Rotation(torch.zeros(8, 32), interleaved=True)
SCALED = Rotation(torch.zeros(8, 32), q_scale=torch.zeros(8))
ACTIVATIONS: tuple[Activation, ...] = ("gelu_tanh", "silu")


class _Target:
    """What Triton asks of a driver before it compiles."""

    def __init__(self, capability: int) -> None:
        self._target = GPUTarget("cuda", capability, 32)

    def get_current_target(self) -> GPUTarget:
        return self._target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


def compile_for(capability: int) -> list[str]:
    """Names of the kernels that are compiled from now on, as they come."""
    compiled: list[str] = []
    triton.runtime.driver.set_active(_Target(capability))
    triton.knobs.runtime.jit_post_compile_hook = lambda *, fn, **_: compiled.append(fn.name)
    return compiled


def lora(configs: KernelConfigs, phase: Phase, rows: int) -> None:
    table = LoraTable(2, 8, CPU)
    segments = allocate_segments(rows, configs.tile_rows(phase, rows), 8, CPU)
    shared = segments
    if phase == "decode":
        shared = allocate_segments(rows, segments.tile_rows, 8, CPU, shared=True)
    workspace = allocate_workspace(rows, DTYPE, CPU, configs.max_split(phase, rows))
    slots = torch.zeros(rows, dtype=torch.int32)
    each = {id(of): of for of in (segments, shared)}.values()
    for routed in each:
        route(slots, routed, table)
    x, y = torch.zeros(rows, 512, dtype=DTYPE), torch.zeros(rows, sum(WIDTHS), dtype=DTYPE)
    of_shrink = configs.shrink(phase, rows)
    of_expand = configs.expand(phase, rows)
    shrink(x, table, 0, segments, workspace, of_shrink, after_input=False)
    for routed in each:
        of_site = (table, 0, routed, workspace)
        shrink(x, *of_site, of_shrink, after_input=True)
        expand(y, WIDTHS, *of_site, of_expand, accumulate=phase != "decode", after_gemm=True)
    scale_outputs(y, slots, VectorTable(2, 8, CPU), 0)
    pending = PendingLora(table, 0, segments, workspace)
    for activation in ACTIVATIONS:
        gated_lora(y, pending, configs.fused(phase, rows), activation)
    gather_embedding(torch.zeros(rows, dtype=torch.int32), table, 0, segments, workspace)
    if phase == "decode":
        early = configs.programmatic_launch
        delta = PendingDelta(table, 0, slots, y.clone())
        for of in (None, delta):
            for activation in ACTIVATIONS:
                gated(y, of, activation, programmatic_launch=early)
            norms(y, of, early)
        gated(y, None, "gelu_tanh", up=y.clone(), programmatic_launch=early)
        attentions(rows, delta, early)
    elif phase == "prefill":
        many_tokens(configs, y, pending)


def norms(y: torch.Tensor, delta: PendingDelta | None, early: bool) -> None:
    hidden, norm = y.clone(), (y[0].clone(), 1e-5)
    add_norm(y, delta, hidden, norm, programmatic_launch=early)
    add_norm(y, delta, hidden, norm, norm, programmatic_launch=early)
    add_norm(y, delta, hidden, None, norm, (0.5, 2.0), programmatic_launch=early)
    rms_norm(hidden, norm, programmatic_launch=early)
    addresses = torch.zeros(2, dtype=torch.int64)
    terms = SharedTerms(y, y.clone(), addresses, y.numel(), addresses, 0)
    for post in (None, norm):
        sum_norm(terms, delta, hidden, norm, post, programmatic_launch=early)


def attentions(rows: int, delta: PendingDelta, early: bool) -> None:
    weights = torch.zeros(10, 64, dtype=DTYPE)
    for all_heads, rotation in ((False, PART), (True, NEIGHBOURS), (True, NONE)):
        attention(rows, delta, QkNorm(weights, 1e-5, all_heads), rotation, early)
    for parts in (1, 2, 3):
        k, v = torch.zeros(2, 4, 16, 2, 64, dtype=DTYPE)
        pages, heads = CachePages(k, v, parts=parts), 14 - 2 * parts  # the product is as wide
        norm = QkNorm(weights, 1e-5, values=True)
        attention(rows, delta, norm, HALVES, early, PLAIN, pages, heads)
    attention(1, None, None, HALVES, early)
    for scores in (FULL, SLOPED, FULL_SLOPED):
        attention(rows, None, None, HALVES, early, scores)


def many_tokens(configs: KernelConfigs, y: torch.Tensor, pending: PendingLora) -> None:
    rows = len(y)
    for width in RANK_BLOCKS:
        down = allocate_workspace(rows, DTYPE, CPU, 16, width)
        gated_lora(y, pending, configs.fused_shrink(rows), "silu", down)
    places, (k, v) = torch.zeros(rows, dtype=torch.int64), torch.zeros(2, 4, 16, 2, 64, dtype=DTYPE)
    norm = QkNorm(torch.zeros(10, 64, dtype=DTYPE), 1e-5)
    forms = [(HALVES, None), (HALVES, norm), (PART, norm), (NEIGHBOURS, None)]
    for rotation, of in forms:
        rope_append_lora(
            y, pending, 3, rotation, places, places, CachePages(k, v), of, configs.rope(rows)
        )


def products(configs: KernelConfigs) -> None:
    for rows, n in ((1, 4096), (1, 1000), (8, 4096), (8, 1000), (16, 4096), (32, 4096)):
        config = configs.skinny(rows)[0]  # others differ in numbers alone
        x, weight = torch.zeros(rows, 4096, dtype=DTYPE), torch.zeros(n, 4096, dtype=DTYPE)
        bias = torch.zeros(n, dtype=DTYPE) if n == 1000 else None
        skinny_product(x, weight, bias, torch.zeros(rows, n, dtype=DTYPE), config)
        of_lora = configs.skinny_lora(rows)
        if of_lora is not None:
            for dtype in (DTYPE, torch.float32):
                out = torch.zeros(rows, n, dtype=dtype)
                skinny_product_lora(x, weight, bias, out, of_lora, lora_of(rows, of_lora, n))


def lora_of(rows: int, config: SkinnyLoraConfig, n: int) -> SkinnyLora:
    table, slots = LoraTable(2, 8, CPU), torch.zeros(rows, dtype=torch.int32)
    workspace = allocate_workspace(rows, DTYPE, CPU, config.lora_splits)
    stack = allocate_stack(rows, 2, DTYPE, CPU)
    stack_rows(slots, stack, table)
    return SkinnyLora(table, 0, slots, (n - 600, 300, 300), workspace, stack)


def quantised(configs: KernelConfigs) -> None:
    """Of every layout products of one row, of few and of more."""
    setattr(matrix_module, "_converts", lambda bits, device: True)  # noqa: B010
    quantised_experts()
    for make in LAYOUTS.values():
        weight = matrix_of(make(4096, 4096))
        assert weight is not None
        dequantise(weight, torch.zeros(4096, 4096, dtype=DTYPE), programmatic_launch=True)
        for rows in (1, 8, 64):
            x, out = torch.zeros(2, rows, 4096, dtype=DTYPE)
            for config in configs.packed(rows):
                packed_product(x, weight, None, out, config)
    for name in ("fp8-rows", "fp8-wide-blocks", "int8-rows"):
        rounded_rows(configs, LAYOUTS[name])


def rounded_rows(configs: KernelConfigs, make: Make) -> None:
    """Rounded beside what norms and activations write, by a kernel of its own, and multiplied."""
    weight, early = matrix_of(make(4096, 4096)), configs.programmatic_launch
    assert weight is not None
    assert weight.rounded_dtype is not None
    form = RowForm(weight.group, dtype=weight.rounded_dtype)
    for rows in (1, 64, 128):
        x, out, hidden = torch.zeros(3, rows, 4096, dtype=DTYPE)
        found = quantise_rows(x, form, programmatic_launch=early)
        quantise_rows(x, form._replace(scale=1.0), programmatic_launch=early)
        for config in configs.rounded(rows):
            rounded_product(found, weight, None, out, config)
            rounded_product(found, weight, out[0], out, config)
        norm, room = (x[0].clone(), 1e-5), (found, form)
        rms_norm(hidden, norm, room, programmatic_launch=early)
        add_norm(x, None, hidden, norm, rounding=room, programmatic_launch=early)
        half = (allocate_rows(x, form, 2048), form)
        gated(x, None, "silu", half, programmatic_launch=early)


def quantised_experts() -> None:
    experts = matrix_of(LAYOUTS["nf4"](8 * 512, 256))
    assert experts is not None
    x, tiles = torch.zeros(4, 256, dtype=DTYPE), assign(torch.zeros(4, 8, dtype=DTYPE), 16, True)[0]
    weight, shape = replace(experts, matrices=8), grouped_shape(4, 2, 8)
    for activation in (ACTIVATION_OF_EXPERTS, None):
        grouped_product(x, weight, None, tiles, shape, activation, programmatic_launch=True)


def attention(
    rows: int,
    pending: PendingDelta | None,
    norm: QkNorm | None,
    rotation: Rotation,
    early: bool,
    scores: LayerScores = PLAIN,
    pages: CachePages | None = None,
    heads: int = 8,
) -> None:
    kv_heads, head_dim = 2, 64
    layout = WorkLayout((scores.rule.window,), rows)
    packed = np.zeros(layout.length, dtype=np.int32)
    layout.cut(np.ones(rows, dtype=np.int64), packed)
    work = layout.items(torch.from_numpy(packed))
    view = DecodeBatchView(
        torch.zeros(rows, dtype=torch.int32),
        torch.zeros(rows, dtype=torch.int64),
        torch.zeros(4, 4, dtype=torch.int64),
        work,
    )
    if pages is None:
        pages = CachePages(*torch.zeros(2, 4, 16, kv_heads, head_dim, dtype=DTYPE))
    scratch = DecodeScratch(rows, heads, head_dim, CPU)
    qkv = torch.zeros(rows, (heads + (pages.parts - 1) * kv_heads) * head_dim, dtype=DTYPE)
    out = torch.zeros(rows, heads, head_dim, dtype=DTYPE)
    context = (view, pages, rotation, norm, scores, scratch, out)
    decode_attention(qkv, pending, *context, programmatic_launch=early)


def rounded_pages(early: bool, whole: bool) -> None:
    """Kernels that write keys and values in FP8 or int8, and those that read them."""
    k, v = torch.zeros(2, 4, 16, 2, 64).to(torch.int8 if whole else torch.float8_e4m3fn)
    scales = torch.zeros(2, 4, 2, 16) if whole else (None, None)
    pages = CachePages(k, v, 0.5, 0.25, *scales)
    rows = torch.zeros(4, dtype=torch.int64)
    rope_append(torch.zeros(4, 6 * 64, dtype=DTYPE), HALVES, rows, rows, pages, None)
    for batch in (1, 256):
        attention(batch, None, None, HALVES, early, pages=pages, heads=4)
    q = torch.zeros(8, 4, 64, dtype=DTYPE)
    table, tiles = torch.zeros(4, 4, dtype=torch.int64), torch.zeros(4, 4, dtype=torch.int32)
    shape = tile_shape(2, 64, (9, 0))
    prompt_attention(q, pages, table, tiles, shape, PLAIN.rule, None, q.clone())
    widen_pages(pages, tiles[0], torch.zeros(2, 4, 16, 2, 64, dtype=DTYPE))


def prompts(capability: int) -> None:
    """Of padded head sizes, with and without a window, a soft cap and sinks."""
    table, tiles = torch.zeros(4, 4, dtype=torch.int64), torch.zeros(4, 4, dtype=torch.int32)
    shapes = [(head_dim, False) for head_dim in (64, 96, 256, 512)]
    for head_dim, of_decodes in [*shapes, (128, True), (256, True), (512, True)]:
        q, pages = (
            torch.zeros(8, 8, head_dim, dtype=DTYPE),
            torch.zeros(4, 16, 2, head_dim).to(DTYPE),
        )
        shape = tile_shape(4, head_dim, divmod(capability, 10), of_decodes=of_decodes)
        for scores in (FULL, PLAIN, SLOPED, FULL_SLOPED):
            context = (table, tiles, shape, scores.rule, scores.sinks, q.clone())
            prompt_attention(q, CachePages(pages, pages), *context)
            if scores.rule.slopes is None:
                lasts = torch.zeros(8, dtype=torch.int32)
                prompt_attention(q, CachePages(pages, pages), *context, lasts)


def latents(capability: int) -> None:
    """Attention to latents with few heads and many: decodes, prompts, LoRA that is absorbed, and
    keys that are unfolded."""
    early, table = capability >= 90, LoraTable(2, 8, CPU)
    places, page_table = torch.zeros(4, dtype=torch.int64), torch.zeros(4, 4, dtype=torch.int64)
    layout = WorkLayout((None,), 4)
    work = layout.items(torch.zeros(layout.length, dtype=torch.int32))
    view = DecodeBatchView(places.int(), places, page_table, work)
    tiles, slots = torch.zeros(4, 4, dtype=torch.int32), torch.zeros(4, dtype=torch.int32)
    for heads, latent, part, rotation in ((20, 512, 64, NEIGHBOURS), (128, 256, 32, SCALED)):
        q = torch.zeros(4, heads, latent + part, dtype=DTYPE)
        pages = torch.zeros(4, 16, 1, latent + part, dtype=DTYPE)
        norm, product = LatentNorm(q[0, 0, :latent], 1e-6), torch.zeros(4, heads * (64 + part))
        rows, heads_of = HeadRows(64, 64), torch.zeros(heads, 128, latent, dtype=DTYPE)
        lora = AbsorbedLora(slots, table, 0, rows)
        few = [LatentProduct(heads_of[:, :64], of, early) for of in (None, lora)]
        for where in (places, view):
            for absorbing in (None, *few):
                append = (pages, norm, rotation, NewTokens(places, where), absorbing)
                latent_append(product.to(DTYPE), q[:, 0].contiguous(), q, *append)
        out, scratch = q[..., :latent].contiguous(), DecodeScratch(4, heads, latent, CPU)
        latent_decodes(q, view, pages, PLAIN, scratch, out, programmatic_launch=early)
        shape = latent_tiles(heads, divmod(capability, 10))
        latent_prompts(q, pages, page_table, tiles, shape, 1.0, out)
        absorb(q[..., :64], q[..., :latent], LatentProduct(None, lora), "keys")
        values = heads_of[:, 64:].transpose(1, 2)
        for of_values in (None, values):
            absorb(out, q[..., :64], LatentProduct(of_values, lora, early), "values")
    for heads, nope, part, value in ((20, 192, 64, 256), (16, 128, 64, 128), (40, 64, 32, 64)):
        q, keys = (torch.zeros(4, heads, nope + n, dtype=DTYPE) for n in (part, value))
        parts, out = keys[:, 0, :part].contiguous(), keys[..., nope:].contiguous()
        shape = unfolded_tiles(nope, value, divmod(capability, 10))
        pieces = (torch.zeros(4, 6, dtype=torch.int32), shape, 1.0, torch.zeros(4, heads), out)
        unfolded_prompts(q, q[..., nope:], UnfoldedKeys(keys, parts), *pieces)


def whole_texts() -> None:
    """Attention of whole texts with padded head sizes, with a window, a soft cap and biases."""
    tiles, biases = torch.zeros(4, 3, dtype=torch.int32), torch.zeros(8, 15)
    for head_dim in (32, 64, 96, 256):
        qkv = torch.zeros(8, 12, head_dim, dtype=DTYPE)
        for rule, added in ((FULL.rule, None), (PLAIN.rule, None), (PLAIN.rule, biases)):
            out = torch.zeros(8, 8 * head_dim, dtype=DTYPE)
            whole_attention(qkv, (8, 2), tiles, rule, added, out)


def experts(early: bool) -> None:
    """Products of few rows and of many, with and without an activation; LoRA."""
    table, slots = LoraTable(2, 8, CPU), torch.zeros(4, dtype=torch.int32)
    both = ExpertLora(table, 0, (128, 128), slots)
    of_experts = torch.zeros(8, 512, 256, dtype=DTYPE)
    bias = of_experts[:, :, 0].contiguous()
    x, logits = torch.zeros(4, 256, dtype=DTYPE), torch.zeros(200, 8, dtype=DTYPE)
    for tokens in (4, len(logits)):
        tiles, weights = assign(logits[:tokens], 16, early)
    for tokens in tokens_of_each_shape(2, 8):
        shape = grouped_shape(tokens, 2, 8)
        tiles, weights = assign(logits[:4], shape.tile_rows, early)
        for alone in (None, "relu2"):
            grouped_product(x, of_experts, bias, tiles, shape, alone, programmatic_launch=early)
        y = grouped_product(
            x, of_experts, bias, tiles, shape, ACTIVATION_OF_EXPERTS, programmatic_launch=early
        )
        add_expert_lora(x, y, tiles, both, programmatic_launch=early)
    for activation in OF_EXPERTS:
        of = (x, of_experts, bias, tiles.experts)
        row_product(*of, activation, programmatic_launch=early)
    activated_row_lora(x, y, tiles, both, ACTIVATION_OF_EXPERTS, programmatic_launch=early)
    one = ExpertLora(table, 0, (256,), slots)
    activated_row_lora(x, y, tiles, one, "relu2", programmatic_launch=early)
    add_row_lora(x, y, tiles, one, programmatic_launch=early)
    hidden, norm = torch.zeros(4, 256, dtype=DTYPE), (torch.zeros(256, dtype=DTYPE), 1e-5)
    for beside in (None, hidden):
        terms = ExpertTerms(y, weights, beside)
        add_experts_norm(terms, hidden, norm, programmatic_launch=early)


def assign(logits: torch.Tensor, tile_rows: int, early: bool) -> tuple[ExpertTiles, torch.Tensor]:
    numbers = torch.zeros(logits.shape[1])
    rule = ChoiceRule(of_chosen=True, rounded=DTYPE)
    if early:
        rule = ChoiceRule(
            sigmoid=True, factor=2.0, groups=(4, 2), correction=numbers, scales=numbers
        )
    return assign_experts(logits, 2, tile_rows, rule, programmatic_launch=early)


def step() -> None:
    columns = torch.zeros(9, 4, dtype=torch.int32)
    tokens = torch.zeros(4, 8, dtype=torch.int32)
    page_table = torch.zeros(4, 4, dtype=torch.int64)
    ids, positions = (torch.zeros(4, dtype=torch.int64) for _ in range(2))
    for shifted in (None, Shifted(ids, 1, positions.clone())):
        gather_inputs(columns, tokens, page_table.expand(2, 4, 4), ids, positions, shifted)
    gather_pages(ids, torch.zeros(5, dtype=torch.int32), page_table, torch.zeros(8).int())
    logits = torch.zeros(4, 2048, dtype=DTYPE)
    greedy_append(logits, columns[0], columns[1], tokens, columns[2], GreedyScratch(4, CPU))
    of, parameters = DrawRows(*columns[:3]), torch.zeros(4, DRAW_COLUMNS, dtype=torch.int32)
    masked = replace(of, masks=DrawMasks(torch.zeros(4, 64, dtype=torch.int32), columns[3]))
    for scores in (logits, logits.half(), logits.float()):
        for rows in (of, masked):
            draw_append(scores, rows, parameters, tokens, GreedyScratch(4, CPU), finite=True)
    k, v = torch.zeros(2, 4, 16, 2, 64, dtype=DTYPE)
    qkv, weights = torch.zeros(4, 6 * 64, dtype=DTYPE), torch.zeros(4, 64, dtype=DTYPE)
    norms = (None, QkNorm(weights, 1e-5), QkNorm(weights, 1e-5, all_heads=True), None)
    for rotation, norm in zip((HALVES, PART, NEIGHBOURS, NONE), norms, strict=True):
        rope_append(qkv, rotation, positions, positions, CachePages(k, v), norm)
    for parts in (1, 2):
        norm = QkNorm(weights, 1e-5, values=True)
        pages = CachePages(k, v, parts=parts)
        rope_append(qkv, HALVES, positions, positions, pages, norm)


def states() -> None:
    """Of slices of one token, and of several."""
    mixed, gates = torch.zeros(4, 768, dtype=DTYPE), torch.zeros(4, 4, dtype=DTYPE)
    columns, numbers = torch.zeros(2, 256, dtype=torch.int32), torch.zeros(2)
    window, memory = torch.zeros(3, 3, 256, dtype=DTYPE), torch.zeros(3, 2, 64, 64)
    weight, qkv = torch.zeros(256, 4, dtype=DTYPE), torch.zeros(12, 256, dtype=DTYPE)
    found, column = torch.zeros(4, 128, dtype=DTYPE), columns[0]
    rows, positions = torch.zeros(4, dtype=torch.int32), torch.zeros(4, dtype=torch.int64)
    runs = Runs(torch.zeros(4, 2, dtype=torch.int32), 2)
    heads, of_delta = StateHeads(1, 2, 64, 64), StateGates(column[:4], numbers, numbers)
    of_space = StateGates(column[:2], numbers, numbers, numbers, (0.001, 0.1))
    wide = found.float()
    for slices in (Singles(rows, positions), Walks(rows, positions, rows, rows, 2), runs):
        for bias, factors in ((None, None), (weight[:, 0].contiguous(), columns)):
            conv = Convolution(column, weight, bias, factors)
            causal_conv(mixed, conv, window, slices, qkv, mixed)
        delta_rule(qkv, heads, gates, of_delta, memory, slices, found, gates)
        state_space(qkv, heads, mixed, of_space, memory, slices, wide, mixed)
    for x, norm in (
        (found, GatedNorm(qkv[0, :128], 1e-6, 64)),
        (wide, GatedNorm(qkv[0, :128], 1e-6, 128, gate_first=True)),
        (wide, GatedNorm(None, 1e-6, 64)),
    ):
        gated_norm(x, mixed, column[:128], norm, found)


def in_any_batch(configs: KernelConfigs, capability: tuple[int, int]) -> None:
    """Kernels of `--batch-invariant`, whose launch parameters are the same for any batch."""
    for n in (4096, 1000):
        x, weight = torch.zeros(70, 4096, dtype=DTYPE), torch.zeros(n, 4096, dtype=DTYPE)
        bias = torch.zeros(n, dtype=DTYPE) if n == 1000 else None
        fixed_product(x, weight, bias, torch.zeros(70, n, dtype=DTYPE), stages_of(capability))
    table, segments = LoraTable(2, 8, CPU), allocate_segments(70, 8, 8, CPU)
    workspace = allocate_workspace(70, DTYPE, CPU, 1)
    y = torch.zeros(70, sum(WIDTHS), dtype=DTYPE)
    route(torch.zeros(70, dtype=torch.int32), segments, table)
    of_site, ids = (table, 0, segments, workspace), torch.zeros(70, dtype=torch.int32)
    for early in (False, True):
        shrink(x, *of_site, configs.shrink("decode", 70), after_input=early)
        expand(y, WIDTHS, *of_site, configs.expand("decode", 70), after_gemm=early)
    gather_embedding(ids, *of_site)


def main() -> None:
    capability = int(sys.argv[1])
    compiled = compile_for(capability)
    configs = read_configs(f"sm{capability}", 132, programmatic_launch=capability >= 90)
    with compiled_together():
        lora(configs, "prefill", 300)
        lora(configs, "mixed", 300)
        lora(configs, "decode", 256)
        prompts(capability)
        latents(capability)
        whole_texts()
        experts(configs.programmatic_launch)
        states()
        step()
        products(configs)
        of_any = read_configs(INVARIANT, 132, programmatic_launch=capability >= 90)
        in_any_batch(of_any, divmod(capability, 10))
        quantised(configs)
        rounded_pages(configs.programmatic_launch, whole=False)
        rounded_pages(configs.programmatic_launch, whole=True)
    print(*sorted(set(compiled)))


if __name__ == "__main__":
    main()
