"""The plan of a conversion: the new config, and the sources of each new tensor. Pure."""

from typing import Literal

import msgspec

from adapters.errors import AdapterError
from adapters.safetensors.header import TensorInfo

Form = Literal["mlx-lm", "PEFT"]


class Move(msgspec.Struct, frozen=True):
    """One tensor of the result. is_transposed: the two dimensions of `source` are swapped."""

    name: str
    source: TensorInfo
    is_transposed: bool = False

    @property
    def shape(self) -> tuple[int, ...]:
        return self.source.shape[::-1] if self.is_transposed else self.source.shape


class ConversionPlan(msgspec.Struct, frozen=True):
    """config: the bytes of `adapter_config.json`. notes: what a reader should know besides."""

    form: Form
    config: bytes
    moves: tuple[Move, ...]
    notes: tuple[str, ...] = ()


class Conversion(msgspec.Struct, frozen=True):
    """What was done. weights: the file of `source` that was read. copied: files that came along.

    scales: what serving multiplies the products with. notes: what a reader should know besides.
    """

    source: str
    out: str
    form: Form
    weights: str
    tensors: int
    scales: tuple[float, ...]
    copied: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    def lines(self) -> list[str]:
        return [
            f"{self.source} ({self.form}, {self.weights}) was converted to {self.out}",
            f"  tensors  {self.tensors}, compared value by value",
            f"  scale    {', '.join(f'{scale:g}' for scale in self.scales)}",
            *(f"  copied   {name}" for name in self.copied),
            *(f"  note     {note}" for note in self.notes),
        ]


def refusal(message: str) -> AdapterError:
    """For what cannot be converted: one sentence that says why, and what to do."""
    return AdapterError("invalid", message)
