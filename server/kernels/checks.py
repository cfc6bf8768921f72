"""Argument checks that the kernels' wrappers share. Host-side only: no device sync."""

import torch

from server.kernels.segments import Segments
from server.kernels.table import LoraTable
from server.kernels.workspace import Workspace

DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def check_launch(
    name: str,
    matrix: torch.Tensor,
    table: LoraTable,
    site: int,
    segments: Segments,
    workspace: Workspace,
) -> None:
    """`matrix` is the launch's input or output rows. Raises ValueError."""
    if matrix.dim() != 2 or matrix.shape[0] != segments.rows:
        raise ValueError(f"{name} must be [{segments.rows}, features], got {list(matrix.shape)}")
    if matrix.stride(1) != 1 and matrix.shape[1] > 1:
        raise ValueError(f"the last dimension of {name} must be contiguous: {matrix.stride()}")
    if matrix.dtype not in DTYPES or matrix.dtype != workspace.bridge.dtype:
        raise ValueError(f"{name} is {matrix.dtype}, the workspace {workspace.bridge.dtype}")
    check_context(table, site, segments, workspace)
    if matrix.device != workspace.bridge.device:
        raise ValueError(f"{name} is on {matrix.device}, not {workspace.bridge.device}")


def check_context(table: LoraTable, site: int, segments: Segments, workspace: Workspace) -> None:
    """What a launch reads besides its rows fits together. Raises ValueError."""
    if not 0 <= site < table.num_sites:
        raise ValueError(f"site {site} is not in 0..{table.num_sites - 1}")
    if segments.num_slots > table.num_slots:
        raise ValueError(f"segments of {segments.num_slots} slots, a table of {table.num_slots}")
    if segments.rows > workspace.rows:
        raise ValueError(f"{segments.rows} rows, a workspace of {workspace.rows}")
    devices = {table.words.device, segments.order.device, workspace.bridge.device}
    if len(devices) != 1:
        raise ValueError(f"table, segments and workspace are on {sorted(map(str, devices))}")
