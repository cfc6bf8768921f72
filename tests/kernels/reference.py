"""LoRA over a batch as the obvious loop in float32: what the kernels are tested against."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class SiteTensors:
    """One adapter's tensors at one site, one entry for each projection.

    a: `[rank, in_features]`; b: `[out_features, rank]`; rank 0 = the projection is not targeted.
    """

    a: tuple[torch.Tensor, ...]
    b: tuple[torch.Tensor, ...]
    scales: tuple[float, ...]


def lora_reference(
    y: torch.Tensor,
    x: torch.Tensor,
    slots: Sequence[int],
    adapters: Sequence[SiteTensors | None],
    widths: Sequence[int],
) -> torch.Tensor:
    """`y[i] + scale * (x[i] A^T) B^T` for each row i and projection, in float32.

    y: `[rows, sum(widths)]`; x: `[rows, in_features]`; slots: the adapter of each row, -1 = none;
    adapters: by slot, None = it does not touch the site; widths: output features by projection.
    """
    out = y.float().clone()
    for row, slot in enumerate(slots):
        site = adapters[slot] if slot >= 0 else None
        if site is None:
            continue
        column = 0
        for a, b, scale, width in zip(site.a, site.b, site.scales, widths, strict=True):
            delta = (x[row].float() @ a.float().T) @ b.float().T
            out[row, column : column + width] += scale * delta
            column += width
    return out


def embed_reference(
    y: torch.Tensor,
    token_ids: Sequence[int],
    slots: Sequence[int],
    adapters: Sequence[SiteTensors | None],
) -> torch.Tensor:
    """`y[i] + scale * A[:, token_ids[i]] B^T` for each row i, in float32; A is `[rank, vocab]`."""
    out = y.float().clone()
    for row, (token, slot) in enumerate(zip(token_ids, slots, strict=True)):
        site = adapters[slot] if slot >= 0 else None
        if site is not None:
            out[row] += site.scales[0] * (site.a[0][:, token].float() @ site.b[0].float().T)
    return out
