"""Reads a pickle on stdin and writes a safetensors file: `python -m … ORDER TARGET`.

torch reads plain weights alone and calls nothing that a pickle names. Limits of the kernel hold
memory, processor time and the file. Exit code 0: the file is whole. `REFUSED`: stderr says why.
"""

import re
import resource
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from itertools import islice
from typing import TYPE_CHECKING, Any

import msgspec

from loraplex.adapters.safetensors.header import MAX_HEADER_BYTES, MAX_TENSORS

if TYPE_CHECKING:
    import torch

REFUSED = 3
_MIB = 1 << 20
_MAX_DEPTH = 4
_MAX_VISITED = 10_000
_PARALLEL_PREFIX = "module."
_GLOBAL = re.compile(r"(?:GLOBAL|global) ([\w.]{1,200})")


class UnpickleOrder(msgspec.Struct, frozen=True):
    """Bounds of one reading.

    memory_bytes, cpu_s: beyond what the program itself has used when it begins to read.
    wall_s: from its start; the parent holds it. tensor_bytes: of all tensors together.
    """

    memory_bytes: int
    cpu_s: int
    wall_s: int
    tensor_bytes: int


class StateDictError(ValueError):
    """A saved value is no plain set of tensors. str(): why, in words."""


def find_tensors(saved: object, is_tensor: Callable[[object], bool]) -> Mapping[str, Any]:
    """Name -> tensor, out of a state dict or of what holds exactly one with LoRA's tensors.

    `module.`, which torch's parallel wrappers put before all names, is taken off.
    """
    if isinstance(saved, Mapping) and any(map(is_tensor, saved.values())):
        found = saved
    else:
        candidates = [d for d in _mappings(saved, 0, [0]) if _is_lora(d, is_tensor)]
        if not candidates:
            raise StateDictError(f"it holds no state dict of LoRA tensors but {_kind(saved)}")
        if len(candidates) > 1:
            raise StateDictError(f"it holds {len(candidates)} state dicts of LoRA tensors")
        found = candidates[0]
    for name, value in found.items():
        if not isinstance(name, str):
            raise StateDictError(f"a key of the state dict is no text but {_kind(name)}")
        if not is_tensor(value):
            raise StateDictError(f"{name[:200]!a} is no tensor but {_kind(value)}")
    return _without_prefix(found)


def refused_global(message: str) -> str:
    """The name that the unpickler refused to look up; empty if its message names none."""
    found = _GLOBAL.search(message)
    return found[1].strip(".") if found else ""


def main(text: str, target: str) -> None:
    import torch

    order = msgspec.json.decode(text, type=UnpickleOrder)
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    _bound(order)
    try:
        saved = torch.load(sys.stdin.buffer, map_location="cpu", weights_only=True)
        _write(find_tensors(saved, lambda value: isinstance(value, torch.Tensor)), target, order)
    except StateDictError as error:
        _refuse(str(error))
    except MemoryError:
        _refuse(_too_much_memory(order))
    except Exception as error:  # any error that a hostile file causes in torch's reader
        _refuse(_words(error, order))


def _bound(order: UnpickleOrder) -> None:
    with open("/proc/self/statm") as file:
        used_bytes = int(file.read().split()[0]) * resource.getpagesize()
    used = resource.getrusage(resource.RUSAGE_SELF)
    most_s = int(used.ru_utime + used.ru_stime) + 1 + order.cpu_s
    most_bytes = used_bytes + order.memory_bytes
    file_bytes = order.tensor_bytes + MAX_HEADER_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (most_bytes, most_bytes))
    # A signal at the first limit shows the parent why; the second limit ends programs that ignore
    # signals.
    resource.setrlimit(resource.RLIMIT_CPU, (most_s, most_s + 1))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_FSIZE, (file_bytes, file_bytes))


def _write(tensors: Mapping[str, "torch.Tensor"], target: str, order: UnpickleOrder) -> None:
    import torch
    from safetensors.torch import save_file

    if len(tensors) > MAX_TENSORS:
        raise StateDictError(f"it holds {len(tensors)} tensors; at most {MAX_TENSORS} are read")
    for name, tensor in tensors.items():
        is_plain = tensor.layout == torch.strided and tensor.device.type == "cpu"
        if not is_plain or tensor.is_quantized or tensor.is_complex():
            kind = f"{tensor.dtype}, {tensor.layout}, on {tensor.device}"
            raise StateDictError(f"{name[:200]!a} is no plain tensor of numbers: {kind}")
    nbytes = sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
    if nbytes > order.tensor_bytes:
        raise StateDictError(f"its tensors take more than {order.tensor_bytes} bytes")
    # Tensors that share memory are copied, as safetensors asks for.
    save_file(
        {name: tensor.detach().contiguous().clone() for name, tensor in tensors.items()}, target
    )


def _mappings(value: object, depth: int, visited: list[int]) -> Iterator[Mapping[Any, Any]]:
    visited[0] += 1
    if not isinstance(value, Mapping) or depth > _MAX_DEPTH or visited[0] > _MAX_VISITED:
        return
    yield value
    for child in value.values():
        yield from _mappings(child, depth + 1, visited)


def _is_lora(found: Mapping[Any, Any], is_tensor: Callable[[object], bool]) -> bool:
    return (
        bool(found)
        and any(isinstance(name, str) and "lora_" in name for name in found)
        and any(map(is_tensor, found.values()))
    )


def _without_prefix(found: Mapping[str, Any]) -> Mapping[str, Any]:
    while found and all(name.startswith(_PARALLEL_PREFIX) for name in found):
        found = {name.removeprefix(_PARALLEL_PREFIX): each for name, each in found.items()}
    return found


def _kind(value: object) -> str:
    if isinstance(value, Mapping):
        # A key that is no text may take for ever to be spelled.
        keys = [key[:40] for key in islice(value, 8) if isinstance(key, str)]
        return f"a dict with the keys {keys!a}" if keys else "a dict without names"
    return f"a value of type {type(value).__name__}"


def _words(error: Exception, order: UnpickleOrder) -> str:
    text = str(error)
    name = refused_global(text)
    if name:
        return f"it asks for {name}, which is no part of plain weights"
    if "alloc" in text or "not enough memory" in text:
        return _too_much_memory(order)
    if type(error).__name__ == "UnpicklingError":
        return "it holds something else than plain weights"
    if "TorchScript" in text:
        return "it is a TorchScript program and not a set of weights"
    return f"torch cannot read it: {type(error).__name__}"


def _too_much_memory(order: UnpickleOrder) -> str:
    return f"reading it takes more than {order.memory_bytes // _MIB} MiB of memory"


def _refuse(why: str) -> None:
    sys.stderr.buffer.write(why.encode("ascii", "backslashreplace"))
    sys.exit(REFUSED)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
