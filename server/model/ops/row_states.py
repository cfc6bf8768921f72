"""States of every row on the device, beside its pages, and snapshots of states."""

from collections import defaultdict
from collections.abc import Iterable, Iterator
from typing import TypeVar

import torch

from loraplex.server.engine.plan import StateCopy
from loraplex.server.model.ops.state_steps import StateSteps
from loraplex.server.model.spec.model_spec import ModelSpec
from loraplex.server.model.spec.state_spec import StateForm

T = TypeVar("T")


class RowStates:
    """A state for each row, and for the scratch row, in each layer that has states.

    A sequence's state begins with its first token: who computes that takes zeros for what lies
    there, which an earlier sequence of the row has left. So nothing is cleared between sequences.

    States of one form lie together, layer by layer, so that a copy of a row's whole state is one
    operation a form. Copies are in the order of the device's stream.

    A draft's tokens change no state, since they may be wrong. What states took of them is kept: the
    inputs of the latest draft of each row, `depth` tokens at most. The next step replays those that
    were right.
    """

    def __init__(
        self,
        model: ModelSpec,
        rows: int,
        dtype: torch.dtype,
        device: torch.device,
        snapshots: int = 0,
        depth: int = 0,
    ) -> None:
        """Allocate the states of so many rows, and so many snapshots. dtype: of the model. depth:
        tokens of a draft at most."""
        counts = defaultdict[StateForm, int](int)
        places: dict[int, list[tuple[StateForm, int]]] = {}
        for layer, forms in model.states.items():
            places[layer] = []
            for form in forms:
                places[layer].append((form, counts[form]))
                counts[form] += 1

        def made(form: StateForm, slots: int) -> torch.Tensor:
            kind = torch.float32 if form.wide else dtype
            return torch.zeros((counts[form], slots, *form.shape), dtype=kind, device=device)

        self._of_rows = {form: made(form, rows + 1) for form in counts}
        self._kept = {form: made(form, snapshots) for form in counts}
        self._places, self.scratch, self.depth = places, rows, depth
        self._inputs = {
            layer: tuple(
                torch.zeros((rows + 1) * depth, width, dtype=dtype, device=device)
                for width in widths
            )
            for layer, widths in model.state_inputs.items()
        }

    def __bool__(self) -> bool:
        return bool(self._places)

    def of(self, layer: int) -> tuple[torch.Tensor, ...]:
        """The tensors of one layer, `[rows + 1, ...]` of each `StateForm`."""
        return tuple(self._of_rows[form][place] for form, place in self._places[layer])

    def snapshots(self) -> list[torch.Tensor]:
        """Return what is kept in snapshots, `[snapshots, numbers]` of each layer and form."""
        return [of_layer.flatten(1) for kept in self._kept.values() for of_layer in kept]

    def save(self, copies: Iterable[StateCopy]) -> None:
        """Copy whole states of rows into snapshots, one after the other."""
        for copy in copies:
            for form, of_rows in self._of_rows.items():
                self._kept[form][:, copy.snapshot].copy_(of_rows[:, copy.seq_row])

    def restore(self, copies: Iterable[StateCopy]) -> None:
        """Copy snapshots into the states of rows."""
        for copy in copies:
            for form, of_rows in self._of_rows.items():
                of_rows[:, copy.seq_row].copy_(self._kept[form][:, copy.snapshot])

    def inputs(self, layer: int) -> tuple[torch.Tensor, ...]:
        """Kept inputs of one layer's drafts, `[(rows + 1) * depth, features]` of each product."""
        return self._inputs[layer]

    def keep(
        self, layer: int, places: torch.Tensor | None, products: Iterable[torch.Tensor]
    ) -> None:
        """Keep the inputs of the first tokens, as `StateSteps.keep` says."""
        if places is not None:
            for kept, product in zip(self._inputs[layer], products, strict=True):
                kept.index_copy_(0, places, product[: len(places)])

    def walk(self, layer: int, steps: StateSteps[T]) -> Iterator[T]:
        """Tokens that a layer's states take, in turn. The states are saved as a phase says when
        the next one is asked for."""
        for phase in steps.phases:
            yield phase.tokens
            if phase.saves is not None:
                rows, snapshots = phase.saves
                for form, place in self._places[layer]:
                    taken = self._of_rows[form][place].index_select(0, rows)
                    self._kept[form][place].index_copy_(0, snapshots, taken)
        if steps.drafts:
            held = [state[steps.drafted] for state in self.of(layer)]
            yield from steps.drafts
            for state, before in zip(self.of(layer), held, strict=True):
                state[steps.drafted] = before
