"""A stored adapter that no slab file holds: packed as it is brought into an arena."""

from collections.abc import Callable, Sequence
from contextlib import ExitStack

from loraplex.adapters.base import BaseSpec
from loraplex.adapters.content_check import ContentCheck
from loraplex.adapters.errors import AdapterError
from loraplex.adapters.manifest import SlabLayout
from loraplex.adapters.peft.lora_tensors import LoraTensors
from loraplex.adapters.safetensors.file import WeightsFile
from loraplex.adapters.slab.memory import SlabMemory
from loraplex.adapters.slab.pack import DamagedError, pack_weights


class Unpacked:
    """A `SlabSource`. The content stays where it is until it is closed."""

    def __init__(
        self,
        weights: WeightsFile,
        adapter: LoraTensors,
        base: BaseSpec,
        layout: SlabLayout,
        check: Callable[[], ContentCheck],
        damaged: Callable[[], AdapterError],
        held: ExitStack,
    ) -> None:
        """check: a new one for each reading. damaged: called when one does not hold. held: closed
        with this."""
        self.layout = layout
        self._weights = weights
        self._adapter = adapter
        self._base = base
        self._check = check
        self._damaged = damaged
        self._held = held

    @property
    def on_disk(self) -> bool:
        return False

    def copy_runs(self, arena: memoryview, first_extents: Sequence[int]) -> None:
        memory = SlabMemory(self.layout, arena, first_extents)
        try:
            pack_weights(
                self._weights, self._adapter, self._base, self.layout, memory, self._check()
            )
        except DamagedError:
            raise self._damaged() from None

    def close(self) -> None:
        self._held.close()
