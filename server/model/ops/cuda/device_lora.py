"""LoRA of one batch on a GPU: its regime, and what the batch owns of device memory for it."""

from dataclasses import dataclass, replace

import numpy as np
import torch

from loraplex.server.kernels.launch.configs import KernelConfigs, Phase, SkinnyLoraConfig
from loraplex.server.kernels.linear.stack import Stack, allocate_stack, stack_rows
from loraplex.server.kernels.lora.segments import Segments, allocate_segments, route
from loraplex.server.kernels.lora.table import RANK_BLOCKS, LoraTable, VectorTable
from loraplex.server.kernels.lora.workspace import Workspace, allocate_workspace
from loraplex.server.model.lora.lora import AdapterTable, Reach
from loraplex.server.model.lora.own_rows import OwnSegment
from loraplex.server.model.ops.cuda import lora_strategy
from loraplex.server.model.ops.cuda.lora_strategy import Consumers, Regime, Strategies
from loraplex.server.model.ops.transfers import to_device

# Parts of the activation's columns whose sums for down's LoRA are kept apart.
_DOWN_SPLIT = 16


@dataclass(frozen=True, slots=True)
class FusedKernel:
    """Parts that linears of few tokens need for LoRA in their own kernel.

    stack: B of all rows' adapters.
    """

    config: SkinnyLoraConfig
    stack: Stack


@dataclass(frozen=True, slots=True)
class DeviceLora:
    """Adapters of a batch, for kernels that go through tiles of rows with one adapter.

    slots: int32 `[tokens]`, -1 = no adapter. segments: the tiles. workspace: what shrink leaves for
    expand. phase: which launch parameters apply. strategies: the regime's, by role. reach:
    the most that the adapters may change in layers. vectors: of what they do to the base's own
    products; None = nothing. model_sites: whether an adapter may change the embedding or the head;
    own: tokens whose adapters have rows of their own there, or norms. kernel: of the regime FUSED,
    in which the embedding and the head alone go through tiles. down: of SHRINKING_PREFILL, where
    the activation leaves what shrink would for down.
    """

    slots: torch.Tensor
    segments: Segments
    workspace: Workspace
    phase: Phase
    strategies: Strategies
    reach: Reach
    vectors: VectorTable | None
    model_sites: bool
    own: tuple[OwnSegment, ...]
    kernel: FusedKernel | None = None
    down: Workspace | None = None

    @property
    def expert_sites(self) -> bool:
        """Whether an adapter may change experts."""
        return self.reach >= Reach.EXPERTS

    def route(self, table: LoraTable) -> None:
        """Find the tiles of the slots as they are now. A captured step begins with this."""
        if self.kernel is not None:
            stack_rows(self.slots, self.kernel.stack, table)
        if self.kernel is None or self.model_sites:
            route(self.slots, self.segments, table)


def fused_kernel(
    configs: KernelConfigs, rows: int, num_sites: int, dtype: torch.dtype, device: torch.device
) -> FusedKernel | None:
    """Return the kernel that computes a product with LoRA; None for too many rows."""
    config = configs.skinny_lora(rows)
    if config is None:
        return None
    return FusedKernel(config, allocate_stack(rows, num_sites, dtype, device))


class LoraBatches:
    """Makes a `DeviceLora` for each batch. Owns the workspaces, which all batches share."""

    def __init__(
        self,
        configs: KernelConfigs,
        table: AdapterTable,
        dtype: torch.dtype,
        device: torch.device,
        max_tokens: int,
        consumers: Consumers,
    ) -> None:
        """Allocate workspaces for all steps. max_tokens: of one at most, with padding."""
        self._consumers = consumers
        self._configs, self._table, self._dtype, self._device = configs, table, dtype, device
        mixed = lora_strategy.MIXED_TOKENS
        self._workspaces = self._allocate_workspaces("decode", mixed)
        self._workspaces |= self._allocate_workspaces("mixed", mixed)
        self._workspaces |= self._allocate_workspaces("prefill", max_tokens)
        most = max_tokens if max_tokens > mixed else 0
        self._down = {
            width: allocate_workspace(most, dtype, device, _DOWN_SPLIT, width)
            for width in RANK_BLOCKS
        }

    def _allocate_workspaces(self, phase: Phase, rows: int) -> dict[tuple[Phase, int], Workspace]:
        """Allocate a phase's workspaces, by phase and `max_split`."""
        return {
            (phase, split): allocate_workspace(most, self._dtype, self._device, split)
            for split, most in self._configs.workspaces(phase, rows).items()
        }

    def eager(self, token_slots: np.ndarray) -> DeviceLora | None:
        """Routed LoRA of a step outside graphs. token_slots: int64 `[tokens]`, -1 = the base. None
        where no token has an adapter."""
        reach = self._table.reach(token_slots)
        if reach is Reach.NONE:
            return None
        slots = to_device(token_slots.astype(np.int32), self._device)
        table = self._table
        lora = self._allocate(
            slots,
            reach,
            outputs=table.changes_outputs(token_slots),
            model_sites=table.changes_model(token_slots),
            own=table.own_segments(token_slots),
        )
        lora.route(self._table.device_table)
        block = self._table.rank_block(token_slots) if _can_shrink(lora) else None
        return lora if block is None else self._shrinking(lora, block)

    def captured(self, slots: torch.Tensor, reach: Reach, *, decodes: bool) -> DeviceLora:
        """LoRA of a graph, which routes it. slots: int32 `[tokens]`, filled before each replay.
        reach: the most that its adapters change in layers. What they change outside is no graph's.
        decodes: every token is a decode."""
        outputs = reach is Reach.OUTPUTS
        return self._allocate(slots, reach, decodes=decodes, captured=True, outputs=outputs)

    def like(self, lora: DeviceLora, slots: torch.Tensor) -> DeviceLora:
        """Routed LoRA of other rows, whose adapters are among those of a batch. slots: int32
        `[rows]`."""
        found = self._allocate(slots, lora.reach, outputs=lora.vectors is not None)
        found.route(self._table.device_table)
        return found

    def to_warm(self, tokens: int) -> list[DeviceLora]:
        """LoRA of so many tokens in each regime that a step outside graphs can have, the plain one
        first. All tokens have slot 0, whose adapter may change the embedding and the head."""
        slots = torch.zeros(tokens, dtype=torch.int32, device=self._device)
        plain, scaled = (
            self._allocate(slots, Reach.OUTPUTS, outputs=each, model_sites=True)
            for each in (False, True)
        )
        for lora in (plain, scaled):
            lora.route(self._table.device_table)
        if not _can_shrink(plain):
            return [plain, scaled]
        return [plain, scaled, *(self._shrinking(plain, block) for block in RANK_BLOCKS)]

    def _allocate(
        self,
        slots: torch.Tensor,
        reach: Reach,
        *,
        decodes: bool = False,
        captured: bool = False,
        outputs: bool = False,
        model_sites: bool = False,
        own: tuple[OwnSegment, ...] = (),
    ) -> DeviceLora:
        """Choose kernels and workspaces for a batch with adapters. outputs: adapters may change the
        base's own products, which no kernel with LoRA in it gives away.
        """
        tokens, configs = len(slots), self._configs
        phase = lora_strategy.phase_of(tokens, decodes=decodes)
        workspace = self._workspaces[phase, configs.max_split(phase, tokens)]
        segments = self._segments(tokens, phase)
        sites = self._table.device_table.num_sites
        kernel = None
        vectors = self._table.vector_table if outputs else None
        if self._consumers.fused and not outputs:
            kernel = fused_kernel(configs, tokens, sites, self._dtype, self._device)
        regime = Regime.FUSED
        if kernel is None:
            regime = lora_strategy.regime_of(tokens, decodes=decodes, captured=captured)
        strategies = self._consumers.strategies(regime, tokens, norms=reach is Reach.NORMS)
        context = (slots, segments, workspace, phase, strategies, reach)
        return DeviceLora(*context, vectors, model_sites, own, kernel)

    def _segments(self, tokens: int, phase: Phase) -> Segments:
        known, size = self._table.device_table.num_slots, self._configs.tile_rows(phase, tokens)
        shared = self._consumers.share_tiles and lora_strategy.shares_tiles(tokens)
        return allocate_segments(tokens, size, known, self._device, shared=shared)

    def _shrinking(self, lora: DeviceLora, block: int) -> DeviceLora:
        """Return the same batch for adapters whose ranks fit `block`."""
        regime, norms = Regime.SHRINKING_PREFILL, lora.reach is Reach.NORMS
        strategies = self._consumers.strategies(regime, len(lora.slots), norms=norms)
        return replace(lora, strategies=strategies, down=self._down[block])


def _can_shrink(lora: DeviceLora) -> bool:
    """Whether the batch's regime is SHRINKING_PREFILL if its adapters' ranks fit a block."""
    return lora.phase == "prefill"
