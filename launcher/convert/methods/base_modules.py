"""Linear modules of a base model's folder: shapes, weights and biases in floating point."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np

from loraplex.adapters.peft.tensor_names import meant_by_any
from loraplex.adapters.safetensors.file import open_weights
from loraplex.adapters.safetensors.floats import read_floats
from loraplex.adapters.safetensors.header import FLOAT_DTYPES, TensorInfo
from loraplex.launcher.convert.methods.delta import MAX_VALUES, Matrix
from loraplex.launcher.convert.plan import refusal
from loraplex.server.model.checkpoint.checkpoint import StoredTensor, read_config
from loraplex.server.model.checkpoint.text_part import model_shards


class BaseModules:
    """folder: None = no base was named, so that whatever asks for one is refused.

    Raises AdapterError; CheckpointError for a folder that is no base model.
    """

    def __init__(self, folder: Path | None) -> None:
        self._folder = folder
        self._stored: dict[str, tuple[Path, StoredTensor]] | None = None

    @property
    def is_known(self) -> bool:
        return self._folder is not None

    def paths(self) -> Iterator[str]:
        """The base's own names of its modules with a matrix."""
        for name, (_, tensor) in self._tensors("").items():
            if name.endswith(".weight") and len(tensor.shape) == 2:
                yield name.removesuffix(".weight")

    def shape(self, path: str) -> tuple[int, int]:
        """(outputs, inputs). path: of the module, as the adapter spells it."""
        _, tensor = self._find(path)
        return tensor.shape[0], tensor.shape[1]

    def weight(self, path: str) -> Matrix:
        """`[outputs, inputs]`."""
        file, tensor = self._find(path)
        return _read(file, tensor)

    def bias(self, path: str) -> Matrix | None:
        """`[outputs]`; None = the module has none."""
        found = self._tensors(path).get(f"{_own(path)}.bias")
        return None if found is None else _read(*found)

    def _find(self, path: str) -> tuple[Path, StoredTensor]:
        found = self._tensors(path).get(f"{_own(path)}.weight")
        if found is None or len(found[1].shape) != 2 or found[1].dtype not in FLOAT_DTYPES:
            raise refusal(f"{path}: the base has no linear module of that name")
        if np.prod(found[1].shape) > MAX_VALUES:
            raise refusal(f"{path}: a module of more than {MAX_VALUES} values is not converted")
        return found

    def _tensors(self, path: str) -> dict[str, tuple[Path, StoredTensor]]:
        if self._stored is None:
            if self._folder is None:
                raise refusal(f"{path}: its base is needed: --base MODEL names it")
            model = read_config(self._folder)
            if model.quantisation is not None:
                raise refusal(
                    f"{self._folder}: its weights are quantised; --base must name the same model "
                    "in floating point"
                )
            stored = {
                name: (shard.path, tensor)
                for shard in model_shards(self._folder, model)
                for name, tensor in shard.tensors.items()
            }
            if model.head.tied and model.embedding.tensor in stored:
                stored.setdefault(model.head.tensor, stored[model.embedding.tensor])
            self._stored = stored
        return self._stored


def _own(path: str) -> str:
    return meant_by_any(path) or path


def _read(file: Path, tensor: StoredTensor) -> Matrix:
    info = TensorInfo(tensor.name, tensor.dtype, tensor.shape, tensor.begin, tensor.end)
    with open_weights(file) as weights:
        values = read_floats(weights.read(info), tensor.dtype)
    return values.astype(np.float64).reshape(tensor.shape)
