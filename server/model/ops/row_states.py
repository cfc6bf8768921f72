"""States of every row on the device, beside its pages."""

import torch

from loraplex.server.model.spec.model_spec import ModelSpec


class RowStates:
    """A state for each row, and for the scratch row, in each layer that has states.

    A sequence's state begins with its first token: who computes that takes zeros for what lies
    there, which an earlier sequence of the row has left. So nothing is cleared between sequences.
    """

    def __init__(
        self, model: ModelSpec, rows: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        """Allocate the states of so many rows. dtype: of the model."""
        self._layers = {
            layer: tuple(
                torch.zeros(
                    (rows + 1, *form.shape),
                    dtype=torch.float32 if form.wide else dtype,
                    device=device,
                )
                for form in forms
            )
            for layer, forms in model.states.items()
        }

    def __bool__(self) -> bool:
        return bool(self._layers)

    def of(self, layer: int) -> tuple[torch.Tensor, ...]:
        """The tensors of one layer, `[rows + 1, ...]` of each `StateForm`."""
        return self._layers[layer]
