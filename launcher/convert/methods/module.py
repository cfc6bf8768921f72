"""One adapted module: its tensors by their last names, its config's values, its base."""

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from loraplex.adapters.errors import AdapterError
from loraplex.adapters.peft.targeting import Targeting
from loraplex.adapters.safetensors.file import Weights
from loraplex.adapters.safetensors.floats import read_floats
from loraplex.adapters.safetensors.header import FLOAT_DTYPES, TensorInfo
from loraplex.adapters.violations import shown
from loraplex.launcher.convert.methods.base_modules import BaseModules
from loraplex.launcher.convert.methods.delta import MAX_VALUES, Matrix
from loraplex.launcher.convert.plan import refusal

_INTS = {"U8": "<u1", "I8": "<i1", "I16": "<i2", "I32": "<i4", "I64": "<i8"}
_MAX_NUMBER = 1e6


class Values:
    """Of an adapter's config: the methods' own keys. Raises AdapterError for another type."""

    def __init__(self, raw: Mapping[str, Any]) -> None:
        self._raw = raw

    def number(self, key: str, default: float) -> float:
        value = self._raw.get(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise refusal(f"{key}: expected a number, got {shown(value)}")
        if not -_MAX_NUMBER < value < _MAX_NUMBER:
            raise refusal(f"{key}: expected a number within 1e6, got {shown(value)}")
        return value

    def whole(self, key: str, default: int, least: int = 1, most: int = 1 << 16) -> int:
        value = self._raw.get(key, default)
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
            raise refusal(f"{key}: expected a whole number from {least} on, got {shown(value)}")
        return value

    def flag(self, key: str, default: bool = False) -> bool:
        value = self._raw.get(key, default)
        if not isinstance(value, bool):
            raise refusal(f"{key}: expected true or false, got {shown(value)}")
        return value

    def word(self, key: str) -> str:
        """Empty where the value is no text."""
        value = self._raw.get(key)
        return value if isinstance(value, str) else ""


class Tensors(NamedTuple):
    """infos: by name. weights: the file that has them."""

    infos: Mapping[str, TensorInfo]
    weights: Weights


class Module:
    """path: as the trained model calls it. own: its tensors, by what follows the path. shared:
    those that all modules have in common. initial: its tensors before the training; None = they are
    not at hand.

    rank, scale: what the config says of the module, of LoRA, LoHa and LoKr alone."""

    def __init__(
        self,
        path: str,
        own: Tensors,
        shared: Tensors,
        initial: Tensors | None,
        targeting: Targeting,
        values: Values,
        base: BaseModules,
    ) -> None:
        self.path = path
        self.values = values
        self.base = base
        self.rank = targeting.lora_rank(path)
        self.scale = targeting.config.scale(self.rank, targeting.lora_alpha(path))
        self._own, self._shared, self._initial = own, shared, initial

    @property
    def has_initial(self) -> bool:
        return self._initial is not None

    def has(self, name: str) -> bool:
        return name in self._own.infos

    def has_shared(self, name: str) -> bool:
        return name in self._shared.infos

    def read(self, name: str, *shape: int | None) -> Matrix:
        """A tensor of the module. shape: what its sides must be; None = any length."""
        return self._read(f"{self.path}.{name}", name, self._own, shape)

    def read_shared(self, name: str, *shape: int | None) -> Matrix:
        return self._read(name, name, self._shared, shape)

    def read_initial(self, name: str, *shape: int | None) -> Matrix:
        assert self._initial is not None
        return self._read(f"--initial: {self.path}.{name}", name, self._initial, shape)

    def sides(self, name: str) -> tuple[int, ...]:
        """The shape of a tensor of the module; () = there is none."""
        tensor = self._own.infos.get(name)
        return () if tensor is None else tensor.shape

    def read_indices(self, name: str, below: int) -> npt.NDArray[np.int64]:
        """Whole numbers from 0 on, all less than `below`."""
        tensor = self._own.infos.get(name)
        if tensor is None or tensor.dtype not in _INTS:
            raise self.unfit(f"{name} is missing, or holds no whole numbers")
        values = self._own.weights.read(tensor).view(_INTS[tensor.dtype]).astype(np.int64)
        if values.size and not 0 <= values.min() <= values.max() < below:
            raise self.unfit(f"{name}: an index lies outside of 0 .. {below - 1}")
        return values.reshape(tensor.shape)

    def shape(self) -> tuple[int, int]:
        """(outputs, inputs), of the base."""
        return self.base.shape(self.path)

    def weight(self) -> Matrix:
        return self.base.weight(self.path)

    def check_size(self, *sides: int) -> None:
        """Before a matrix of these sides is made. Raises AdapterError."""
        if math.prod(sides) > MAX_VALUES:
            raise self.unfit(f"a matrix of {list(sides)} is too large to be converted")

    def unfit(self, what: str) -> AdapterError:
        return refusal(f"{self.path}: {what}")

    def _read(
        self, place: str, name: str, tensors: Tensors, shape: tuple[int | None, ...]
    ) -> Matrix:
        tensor = tensors.infos.get(name)
        if tensor is None:
            raise refusal(f"{place}: the tensor is missing")
        if tensor.dtype not in FLOAT_DTYPES:
            raise refusal(f"{place}: expected floating point, got {tensor.dtype}")
        if not _fits(tensor.shape, shape):
            wanted = ", ".join("any" if side is None else str(side) for side in shape)
            raise refusal(f"{place}: expected the shape [{wanted}], got {list(tensor.shape)}")
        self.check_size(*tensor.shape)
        values = read_floats(tensors.weights.read(tensor), tensor.dtype).astype(np.float64)
        if not np.isfinite(values).all():
            raise refusal(f"{place}: a value is not finite")
        return values.reshape(tensor.shape)


def _fits(found: Sequence[int], wanted: Sequence[int | None]) -> bool:
    return len(found) == len(wanted) and all(
        want in (None, side) for want, side in zip(wanted, found, strict=True)
    )
