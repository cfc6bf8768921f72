"""Experts that the tokens of a step go to: noted as layers choose them, read for whoever asks."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from loraplex.server.engine.executor import ExecutorLimits
from loraplex.server.model.ops.transfers import to_device, to_host
from loraplex.server.protocol import RoutingForm


@dataclass(frozen=True, slots=True)
class HostRouted:
    """Experts of slices of one step, on the way to the host. places: of the slices in the step;
    counts: int64 `[n]`, of their tokens. chosen: `[tokens, layers, top_k]`, as of `RoutingForm`."""

    places: Sequence[int]
    counts: np.ndarray
    chosen: torch.Tensor

    def by_place(self) -> dict[int, bytes]:
        """The bytes of each slice, by its place."""
        parts = np.split(self.chosen.numpy(), np.cumsum(self.counts)[:-1])
        return {place: part.tobytes() for place, part in zip(self.places, parts, strict=True)}


class ChosenExperts:
    """Experts that the tokens of the latest step go to, in each layer. What is noted costs a step
    nothing: layers write their choice here in place of elsewhere.

    first: place of the first token of what is computed now.
    """

    def __init__(self, form: RoutingForm, tokens: int, device: torch.device) -> None:
        """Allocate room for steps of so many tokens."""
        self.form, self.first = form, 0
        # A compiled kernel knows that what it writes to begins at 16 bytes.
        shape = (form.layers, -(-tokens // 4) * 4, form.top_k)
        self._chosen = torch.zeros(shape, dtype=torch.int32, device=device)

    def room(self, layer: int, tokens: int) -> torch.Tensor:
        """Where a layer's choice is to be written: int32 `[tokens, top_k]`, contiguous."""
        return self._chosen[layer, self.first : self.first + tokens]

    def note(self, layer: int, chosen: torch.Tensor) -> None:
        """Note what a layer has chosen. chosen: int64 `[tokens, top_k]`."""
        self.room(layer, len(chosen)).copy_(chosen)

    def warm(self) -> None:
        """Load what reads experts: a kernel is loaded at its first launch."""
        first = np.zeros(1, dtype=np.int64)
        self.of(([0], first + 1), first, first, self.form.layers - 1)

    def of(
        self,
        slices: tuple[Sequence[int], np.ndarray],
        tokens: np.ndarray,
        ends: np.ndarray,
        from_layer: int,
    ) -> HostRouted:
        """Read the experts of slices. slices: places and counts, as of HostRouted. tokens: int64
        `[n]`, places of their tokens; ends: the same from layer `from_layer` on."""
        device = self._chosen.device
        of_tokens, of_ends = to_device(np.stack((tokens, ends)), device)
        parts = (
            self._chosen[:from_layer].index_select(1, of_tokens),
            self._chosen[from_layer:].index_select(1, of_ends),
        )
        kind = torch.uint8 if self.form.itemsize == 1 else torch.int16
        return HostRouted(*slices, to_host(torch.cat(parts).transpose(0, 1).to(kind).contiguous()))


def chosen_experts(
    limits: ExecutorLimits, tokens: int, device: torch.device
) -> ChosenExperts | None:
    """Make what notes the choices of steps of so many tokens; None without experts."""
    return None if limits.routing is None else ChosenExperts(limits.routing, tokens, device)
