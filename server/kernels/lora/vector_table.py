"""The device table (adapter slot, site) -> the numbers that an adapter has for each output."""

import numpy as np
import torch

from loraplex.server.kernels.lora.table import POINTER_ALIGNMENT


class VectorTable:
    """Table of adapters' factors and addends for outputs. One address for each (slot, site), slots
    outermost: of float32 `[2, out_features]`, by which a row of the base's product is
    multiplied, and what is then added. 0 = the adapter has none.

    `write` and `clear` change the host's copy, and `upload` copies, as in `LoraTable`.
    """

    def __init__(self, num_sites: int, num_slots: int, device: torch.device | str) -> None:
        self.num_sites = num_sites
        self.device = torch.device(device)
        shape = (num_slots, num_sites)
        self.words = torch.zeros(shape, dtype=torch.int64, device=self.device)
        on_host = self.device.type == "cpu"
        self._host = self.words if on_host else torch.zeros(shape, dtype=torch.int64).pin_memory()
        self._addresses = self._host.numpy()

    def write(self, slot: int, sites: np.ndarray, addresses: np.ndarray) -> None:
        """Write the addresses of all the slot's sites; sites that are not named have none.

        Raises ValueError for an address that is not aligned.
        """
        for address in addresses[(addresses <= 0) | (addresses % POINTER_ALIGNMENT != 0)][:1]:
            raise ValueError(f"{address} is no positive multiple of {POINTER_ALIGNMENT}")
        self._addresses[slot] = 0
        self._addresses[slot, sites] = addresses

    def upload(self, slot: int) -> None:
        """Copy the slot's addresses to the device, asynchronously on the current stream."""
        if self._host is not self.words:
            self.words[slot].copy_(self._host[slot], non_blocking=True)
