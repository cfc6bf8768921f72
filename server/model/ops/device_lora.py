"""LoRA of one batch on a GPU: its adapters, by which kernels they are computed, and what of it a
product leaves to whoever takes the product up."""

from dataclasses import dataclass

import torch

from server.kernels.launch.configs import KernelConfigs, Phase, SkinnyLoraConfig
from server.kernels.linear.stack import Stack, allocate_stack
from server.kernels.lora.pending import PendingDelta, PendingLora
from server.kernels.lora.segments import Segments
from server.kernels.lora.workspace import Workspace

# Up to so many tokens the widest product's delta costs less beside it than expanded by the
# activation, and tiles are shared out.
FEW_TOKENS = 256
# Up to so many, inputs are split, and the activation alone expands on its way.
MIXED_TOKENS = 2048


@dataclass(frozen=True, slots=True)
class OnTheWay:
    """How products of few tokens have their LoRA on the way."""

    config: SkinnyLoraConfig
    stack: Stack


def on_the_way(
    configs: KernelConfigs, rows: int, num_sites: int, dtype: torch.dtype, device: torch.device
) -> OnTheWay | None:
    """None: of too many rows."""
    config = configs.skinny_lora(rows)
    if config is None:
        return None
    return OnTheWay(config, allocate_stack(rows, num_sites, dtype, device))


@dataclass(frozen=True, slots=True)
class DeviceLora:
    """Adapters of a batch, routed on the device by slots, int32 `[tokens]`.

    phase: of its launch parameters; "prefill": what takes up products does more of LoRA.
    model_sites: whether one of them changes the embedding or the head. decodes: every token is a
    decode, whose attention adds a delta. captured: of a graph, where decodes come after prompts.
    few: of so few tokens that products have it on the way; None: kernels beside them have it.
    down: where the activation leaves what shrink would of its result; None: shrink does it.
    """

    slots: torch.Tensor
    segments: Segments
    workspace: Workspace
    phase: Phase
    model_sites: bool
    decodes: bool
    captured: bool
    few: OnTheWay | None
    down: Workspace | None = None


@dataclass(frozen=True, slots=True)
class Product:
    """y: `[tokens, out]`. lora, delta: what is not in y yet. phase: of lora. shrunk: where the
    activation leaves what the next site's shrink would."""

    y: torch.Tensor
    lora: PendingLora | None = None
    delta: PendingDelta | None = None
    phase: Phase = "prefill"
    shrunk: Workspace | None = None


def adds_delta(kind: str, lora: DeviceLora) -> bool:
    """Whether what takes up the product adds a delta: else it expands on its way."""
    if kind == "qkv":
        return lora.decodes
    return kind != "gate_up" or len(lora.slots) <= FEW_TOKENS


def phase_of(rows: int, decodes: bool) -> Phase:
    """decodes: all are. Of few rows, and of decodes, each may have an adapter of its own."""
    if rows > MIXED_TOKENS:
        return "prefill"
    return "decode" if decodes or rows <= FEW_TOKENS else "mixed"


def shares_tiles(rows: int) -> bool:
    """Whether tiles are shared out among programs: where the activation expands it takes whole
    ones."""
    return rows <= FEW_TOKENS
