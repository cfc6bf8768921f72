"""Argument checks that the kernels' wrappers share. Host-side only: no device sync."""

from collections.abc import Sequence

import torch

from loraplex.server.kernels.lora.segments import Segments
from loraplex.server.kernels.lora.table import MAX_PROJECTIONS, LoraTable
from loraplex.server.kernels.lora.workspace import Workspace

DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def check_rows(name: str, matrix: torch.Tensor, segments: Segments, workspace: Workspace) -> None:
    """Check that `matrix` holds the batch's rows, in a dtype that the kernels compute. Raises
    ValueError where it does not.
    """
    if matrix.dim() != 2 or matrix.shape[0] != segments.rows:
        raise ValueError(f"{name} must be [{segments.rows}, features], got {list(matrix.shape)}")
    if matrix.stride(1) != 1 and matrix.shape[1] > 1:
        raise ValueError(f"the last dimension of {name} must be contiguous: {matrix.stride()}")
    if matrix.dtype not in DTYPES or matrix.dtype != workspace.dtype:
        raise ValueError(f"{name} is {matrix.dtype}, the workspace for {workspace.dtype}")
    if matrix.device != segments.order.device:
        raise ValueError(f"{name} is on {matrix.device}, not {segments.order.device}")


def check_context(table: LoraTable, site: int, segments: Segments, workspace: Workspace) -> None:
    """Check that all a launch reads besides its rows fits together. Raises ValueError."""
    table.check_site(site)
    table.check_slots(segments.num_slots)
    if segments.rows > workspace.rows:
        raise ValueError(f"{segments.rows} rows, a workspace of {workspace.rows}")
    devices = {table.words.device, segments.order.device, workspace.planes.device}
    if len(devices) != 1:
        raise ValueError(f"table, segments and workspace are on {sorted(map(str, devices))}")


def check_whole_tiles(segments: Segments) -> None:
    """Check that each tile is listed once. Raises ValueError where one is not."""
    if segments.max_parts > 1:
        raise ValueError(f"tiles are shared out in up to {segments.max_parts} parts")


def padded_widths(widths: Sequence[int], features: int) -> tuple[int, int, int]:
    """Output features of a site's 1 to 3 projections, 0 for those it lacks. Raises ValueError."""
    if not 1 <= len(widths) <= MAX_PROJECTIONS or sum(widths) != features or min(widths) < 1:
        raise ValueError(f"widths {list(widths)} do not add up to {features} columns")
    first, second, third = (*widths, 0, 0)[:MAX_PROJECTIONS]
    return first, second, third
