"""Which bytes are read of tensors that lie in files."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import pytest
import torch
import torch.utils._pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from loraplex.server.model.weight_source import WeightSource


class _Mapped(NamedTuple):
    name: str
    tensor: torch.Tensor  # which keeps its address


class BytesRead(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """of_each: bool `[bytes]` by the tensor's name. A view reads nothing, an indexed tensor what is
    taken, and every other operation all of its view."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.of_each: dict[str, torch.Tensor] = {}
        self._mapped: dict[int, _Mapped] = {}

    def share(self, name: str) -> float:
        """Of the tensor's bytes."""
        return float(self.of_each[name].float().mean())

    def mapped(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        self._mapped[tensor.untyped_storage().data_ptr()] = _Mapped(name, tensor)
        self.of_each.setdefault(name, torch.zeros(tensor.nbytes, dtype=torch.bool))
        return tensor

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        for tensor in pytree.tree_leaves(args):
            if isinstance(tensor, torch.Tensor) and not _is_view(found, tensor):
                read = self._bytes_of(tensor)
                if read is not None:
                    read[args[1] if func is torch.ops.aten.index.Tensor else ...] = True
        return found

    def _bytes_of(self, view: torch.Tensor) -> torch.Tensor | None:
        """Those of `of_each` that the view shows, `[*view.shape, item]`."""
        mapped = self._mapped.get(view.untyped_storage().data_ptr())
        if mapped is None:
            return None
        item = view.itemsize
        shape, strides = (*view.shape, item), (*(n * item for n in view.stride()), 1)
        begin = view.data_ptr() - mapped.tensor.data_ptr()
        return self.of_each[mapped.name].as_strided(shape, strides, begin)


def _is_view(found: Any, tensor: torch.Tensor) -> bool:
    """Whether an operation has found nothing but views of the tensor."""
    memory = tensor.untyped_storage().data_ptr()
    leaves = pytree.tree_leaves(found)
    return bool(leaves) and all(
        isinstance(leaf, torch.Tensor) and leaf.untyped_storage().data_ptr() == memory
        for leaf in leaves
    )


@contextmanager
def bytes_read(monkeypatch: pytest.MonkeyPatch) -> Iterator[BytesRead]:
    """Of the tensors that a WeightSource maps."""
    mapped = WeightSource.mapped
    with BytesRead() as counter, monkeypatch.context() as patch:
        patch.setattr(
            WeightSource, "mapped", lambda self, name: counter.mapped(name, mapped(self, name))
        )
        yield counter
