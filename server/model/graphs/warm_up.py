"""Steps on the scratch row, which is no sequence's: what they launch is warm then."""

from collections.abc import Iterable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from loraplex.server.engine.executor import ExecutorLimits
from loraplex.server.kernels.attention.decode_attention import rows_of_each_shape
from loraplex.server.kernels.moe.grouped import tokens_of_each_shape
from loraplex.server.model.decoder import Decoder
from loraplex.server.model.ops.memory import LOGITS_ROWS
from loraplex.server.model.ops.ops import StepLayout
from loraplex.server.model.ops.sizes import MOST_PADDING
from loraplex.server.model.spec.model_spec import ModelSpec
from loraplex.server.model.spec.moe_spec import MoeSpec
from loraplex.server.model.steps.rows import Rows

if TYPE_CHECKING:
    from loraplex.server.model.ops.cuda.ops_cuda import CudaOps  # which needs FlashInfer

# Token counts that between them use every kernel of steps outside graphs.
_WARM_TOKENS = (1, 3, 40, 300, 600, 2100)
_JOINED_TOKENS = 40  # of a step whose pictures are joined


def run_steps(
    decoder: Decoder[Any, Any, Any], ops: "CudaOps", rows: Rows, limits: ExecutorLimits
) -> None:
    """Run steps of as many tokens as use every kernel; with adapters, where some may come."""
    context, adapters = limits.max_context, limits.adapter_slots > 0
    most = min(limits.max_step_tokens, limits.max_rows * context)
    for tokens in warm_sizes(most, _of_experts(decoder.spec)):
        run_step(decoder, ops, rows, tokens, context, adapters)
    kv_heads = {attention.num_kv_heads for attention in decoder.spec.attentions.values()}
    for decodes in {n for heads in kv_heads for n in warm_decodes(heads, limits)}:
        layout = _on_scratch(rows, np.array([1] * decodes + [2]))
        token_ids = torch.zeros(decodes + 2, dtype=torch.int64, device=rows.device)
        decoder.forward(token_ids, ops.plan(layout), None)
        torch.cuda.synchronize()  # uploads come round
    if limits.pictures is not None and limits.pictures.is_joined:
        tokens = min(most, _JOINED_TOKENS)
        layout = prompts_of(rows, context, tokens)
        layout = replace(layout, lasts=layout.positions.cpu().numpy())
        token_ids = torch.zeros(tokens, dtype=torch.int64, device=rows.device)
        decoder.forward(token_ids, ops.plan(layout), None)


def run_texts(
    decoder: Decoder[Any, Any, Any], ops: "CudaOps", rows: Rows, limits: ExecutorLimits
) -> None:
    """Run steps of whole texts, as `run_steps` does."""
    most = min(limits.max_step_tokens, limits.max_rows * limits.max_context)
    for tokens in warm_sizes(most):
        layout = prompts_of(rows, limits.max_context, tokens)
        token_ids = torch.zeros(tokens, dtype=torch.int64, device=rows.device)
        loras = ops.lora_batches.to_warm(tokens) if limits.adapter_slots else []
        for lora in (None, *loras):
            decoder.forward(token_ids, ops.plan(layout), lora)


def warm_decodes(kv_heads: int, limits: ExecutorLimits) -> list[int]:
    """Decodes of steps with a prompt: such steps are padded with decodes, and may have more of them
    than any graph."""
    most = min(limits.most_decodes + MOST_PADDING, limits.max_step_tokens - 2)
    return rows_of_each_shape(kv_heads, most)


def _of_experts(model: ModelSpec) -> set[int]:
    """Tokens that between them use every kernel of experts."""
    branches = {branch for layer in model.layers for branch in layer.feed_forwards}
    specs = {branch for branch in branches if isinstance(branch, MoeSpec)}
    return {n for spec in specs for n in tokens_of_each_shape(spec.top_k, spec.experts)}


def warm_sizes(max_step_tokens: int, others: Iterable[int] = ()) -> list[int]:
    """Tokens of steps, with `others`, the most first: the allocator has then asked the device for
    all that any step takes, and what is too much is said at start."""
    sizes = {min(tokens, max_step_tokens) for tokens in (*_WARM_TOKENS, *others)}
    return sorted(sizes | {max_step_tokens}, reverse=True)


def run_step(
    decoder: Decoder[Any, Any, Any],
    ops: "CudaOps",
    rows: Rows,
    tokens: int,
    max_context: int,
    adapters: bool,
) -> None:
    """A mixed step on the scratch row: one decode, and chunks of the rest; logits of one token and
    of as many as a step can want. With adapters also as if they changed the embedding and the head,
    which no graph does, of small ranks and of any."""
    chunks, rest = divmod(tokens - 1, max_context)
    # Decodes come first, and a rest of one is another.
    layout = _on_scratch(rows, np.array([1] + ([rest] if rest else []) + [max_context] * chunks))
    token_ids = torch.zeros(tokens, dtype=torch.int64, device=rows.device)
    loras = [None, *ops.lora_batches.to_warm(tokens)] if adapters else [None]
    for lora in loras:
        normed = decoder.forward(token_ids, ops.plan(layout), lora)
        for wanted in {1, min(tokens, max(rows.scratch, LOGITS_ROWS))}:
            of_head = None if lora is None else ops.lora_batches.to_warm(wanted)[0]
            decoder.logits(normed[-wanted:], of_head)
    torch.cuda.synchronize()


def prompts_of(rows: Rows, max_context: int, tokens: int) -> StepLayout:
    """Lay out as few prompts as have so many tokens, of about equal length."""
    count = -(-tokens // max_context)
    num_new = np.full(count, tokens // count)
    num_new[: tokens % count] += 1
    return _on_scratch(rows, num_new)


def _on_scratch(rows: Rows, num_new: np.ndarray) -> StepLayout:
    """Slices that begin their contexts, all on the scratch row. Slices of one token come first."""
    tokens = int(num_new.sum())
    positions = np.concatenate([np.arange(n) for n in num_new])
    return StepLayout(
        num_decodes=int((num_new == 1).sum()),
        seq_rows=np.full(len(num_new), rows.scratch),
        starts=np.zeros(len(num_new), dtype=np.int64),
        num_new=num_new,
        token_rows=torch.full((tokens,), rows.scratch, device=rows.device),
        positions=torch.from_numpy(positions).to(rows.device),
        page_table=rows.page_table,
        long_rows=rows.long_rows,
    )
