"""The plan of a conversion: the new config, and the sources of each new tensor. Pure."""

from typing import Literal

import msgspec

from loraplex.adapters.errors import AdapterError
from loraplex.adapters.safetensors.header import TensorInfo

Form = Literal["mlx-lm", "PEFT"]


class Move(msgspec.Struct, frozen=True):
    """One tensor of the result. is_transposed: the two dimensions of `source` are swapped."""

    name: str
    source: TensorInfo
    is_transposed: bool = False

    @property
    def shape(self) -> tuple[int, ...]:
        return self.source.shape[::-1] if self.is_transposed else self.source.shape


class ConversionLoss(msgspec.Struct, frozen=True):
    """How near computed LoRA comes to its source. ranks: of the modules.

    Errors are relative, in the Frobenius norm of what is added to the weights: of the module that
    loses most, and of all modules together.
    """

    ranks: tuple[int, ...]
    worst_error: float
    worst_module: str
    overall_error: float


class ConversionPlan(msgspec.Struct, frozen=True):
    """form: of the source, for people. config: `adapter_config.json`. notes: what else to know."""

    form: str
    config: bytes
    moves: tuple[Move, ...]
    notes: tuple[str, ...] = ()


class WrittenAdapter(msgspec.Struct, frozen=True):
    """A finished config and its weights. form: of the source, for people. tensors: how many. notes:
    what a reader should know besides. fit: None = the tensors are the source's own."""

    form: str
    tensors: int
    notes: tuple[str, ...] = ()
    fit: ConversionLoss | None = None


class Conversion(msgspec.Struct, frozen=True):
    """A conversion that was done. weights: the file that was read. copied: files that came along.

    scales: what serving multiplies the products with. notes: what a reader should know besides.
    fit: as of WrittenAdapter.
    """

    source: str
    out: str
    form: str
    weights: str
    tensors: int
    scales: tuple[float, ...]
    copied: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    fit: ConversionLoss | None = None

    def lines(self) -> list[str]:
        way = "compared value by value" if self.fit is None else "computed"
        return [
            f"{self.source} ({self.form}, {self.weights}) was converted to {self.out}",
            f"  tensors  {self.tensors}, {way}",
            f"  scale    {', '.join(f'{scale:g}' for scale in self.scales)}",
            *self._fit_lines(),
            *(f"  copied   {name}" for name in self.copied),
            *(f"  note     {note}" for note in self.notes),
        ]

    def _fit_lines(self) -> list[str]:
        if self.fit is None:
            return []
        worst = f"{self.fit.worst_error:.2g} ({self.fit.worst_module})"
        return [f"  error    at most {worst}, {self.fit.overall_error:.2g} over all modules"]


def refusal(message: str) -> AdapterError:
    """The error for what cannot be converted: one sentence with the reason and the way out."""
    return AdapterError("invalid", message)
