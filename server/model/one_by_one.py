"""Steps of plain torch whose tokens are computed one by one.

A library divides its sums by the shape of what it gets. A token alone has one shape, so its bits do
not depend on the tokens beside it, on the step that it comes in, or on the slice that it is of.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch

from loraplex.server.model.decoder import Decoder, Wanted
from loraplex.server.model.graphs.parts import Built
from loraplex.server.model.ops.ops import StepLayout
from loraplex.server.model.ops.ops_torch import TorchOps
from loraplex.server.model.routed_experts import ChosenExperts


class OneByOne:
    """Computes the forward pass of steps, and logits, token after token."""

    def __init__(
        self, decoder: Decoder[Any, Any, Any], chosen_experts: ChosenExperts | None
    ) -> None:
        """Compute by a decoder. chosen_experts: where its operations note them."""
        self._decoder, self._chosen_experts = decoder, chosen_experts

    @classmethod
    def of(cls, built: Built) -> "OneByOne | None":
        """None where kernels compute a token alike in any step."""
        if not isinstance(built.decoder.ops, TorchOps):
            return None
        return cls(built.decoder, built.chosen_experts)

    def forward(
        self,
        token_ids: torch.Tensor,
        layout: StepLayout,
        token_slots: np.ndarray,
        wanted: np.ndarray,
        meanwhile: Callable[[], None] | None = None,
    ) -> torch.Tensor:
        """Compute normed hidden states of the tokens wanted, int64 `[n]`, ascending. The parameters
        are as of `Decoder.forward`, but slots, int64 `[tokens]`."""
        ops, found = self._decoder.ops, []
        is_wanted = np.zeros(len(token_ids), dtype=np.int64)
        is_wanted[wanted] = 1
        for at in range(len(token_ids)):
            one, own = slice(at, at + 1), layout.of(np.array([at]))
            if self._chosen_experts is not None:
                self._chosen_experts.first = at
            lora = ops.lora(token_slots[one])
            rows = torch.zeros(int(is_wanted[at]), dtype=torch.int64, device=token_ids.device)
            plan = ops.plan(own)
            of_wanted = Wanted(rows, lora, partial(ops.plan, own))
            normed = self._decoder.forward(token_ids[one], plan, lora, of_wanted, meanwhile)
            if is_wanted[at]:
                found.append(normed)
        return torch.cat(found) if found else normed

    def logits(self, normed: torch.Tensor, slots: np.ndarray, width: int | None) -> torch.Tensor:
        """Compute logits of rows `[n, hidden]`, as `Decoder.logits` does. slots: int64 `[n]`."""
        ops, found = self._decoder.ops, []
        for at in range(len(normed)):
            lora = ops.lora(slots[at : at + 1])
            found.append(self._decoder.logits(normed[at : at + 1], lora, width=width))
        return torch.cat(found)
