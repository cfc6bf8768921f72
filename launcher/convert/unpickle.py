"""Reads a pickle on stdin and writes a safetensors file on stdout.

`python -m loraplex.launcher.convert.unpickle ORDER` starts it.
Runs confined, and trusts nothing in what it reads; its parent trusts nothing that comes out of it.
Exit code 0: stdout is whole. `REFUSED`, `UNCONFINED`: stderr says why.
"""

import io
import json
import os
import sys
import warnings
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import msgspec

from loraplex.adapters.safetensors.header import MAX_TENSORS
from loraplex.launcher.convert import confinement
from loraplex.launcher.convert.confinement import Layer
from loraplex.launcher.convert.state_dict import StateDictError, find_tensors, refused_global

if TYPE_CHECKING:
    import torch

REFUSED = 3
UNCONFINED = 4
_MIB = 1 << 20


class UnpickleOrder(msgspec.Struct, frozen=True):
    """memory_bytes, cpu_s: beyond what the program itself has used when the file is opened.

    wall_s: from its start; the parent holds it. tensor_bytes: of all tensors together.
    is_confined: False = what the kernel does not grant is done without.
    """

    memory_bytes: int
    cpu_s: int
    wall_s: int
    tensor_bytes: int
    is_confined: bool = True


def main(text: str) -> None:
    order = msgspec.json.decode(text, type=UnpickleOrder)
    warnings.simplefilter("ignore")
    faults: dict[Layer, str] = {}
    _note(faults, "namespaces", confinement.enter_namespaces())
    _warm_up()
    # Opened before: to make a file object of a descriptor asks what the descriptor is.
    source, target = io.FileIO(0), io.FileIO(1, "wb")
    confinement.bound(order.memory_bytes, order.cpu_s)
    _note(faults, "landlock", confinement.close_files())
    _note(faults, "seccomp", confinement.close_kernel())
    lacking = confinement.missing(faults)
    if lacking is not None and order.is_confined:
        _end(UNCONFINED, lacking)
    try:
        tensors = find_tensors(_load(source), _is_tensor)
        _write(tensors, target, order.tensor_bytes)
    except StateDictError as error:
        _end(REFUSED, str(error))
    except MemoryError:
        _end(REFUSED, _too_much_memory(order))
    except Exception as error:  # any error that a hostile file causes in torch's reader
        _end(REFUSED, _words(error, order))
    _end(0, "")


def _note(faults: dict[Layer, str], layer: Layer, fault: str | None) -> None:
    if fault is not None:
        faults[layer] = fault


def _warm_up() -> None:
    """Both forms of pickle are read once, since nothing can be imported afterwards."""
    import torch

    torch.set_num_threads(1)
    for is_zip in (True, False):
        file = io.BytesIO()
        torch.save({"a": torch.ones(2, 2).t()}, file, _use_new_zipfile_serialization=is_zip)
        file.seek(0)
        loaded = torch.load(file, map_location="cpu", weights_only=True)
        bytes(_raw(loaded["a"]))


def _load(file: io.FileIO) -> object:
    import torch

    return torch.load(file, map_location="cpu", weights_only=True)


def _is_tensor(value: object) -> bool:
    import torch

    return isinstance(value, torch.Tensor)


def _write(tensors: Mapping[str, "torch.Tensor"], target: io.FileIO, most_bytes: int) -> None:
    if len(tensors) > MAX_TENSORS:
        raise StateDictError(f"it holds {len(tensors)} tensors; at most {MAX_TENSORS} are read")
    header: dict[str, Any] = {}
    position = 0
    for name, tensor in tensors.items():
        end = position + tensor.numel() * tensor.element_size()
        if end > most_bytes:
            raise StateDictError(f"its tensors take more than {most_bytes} bytes")
        entry = {"dtype": _dtype(name, tensor), "shape": list(tensor.shape)}
        header[name] = entry | {"data_offsets": [position, end]}
        position = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with io.BufferedWriter(target) as out:
        out.write(len(text).to_bytes(8, "little") + text)
        for tensor in tensors.values():
            out.write(_raw(tensor))


def _dtype(name: str, tensor: "torch.Tensor") -> str:
    """As safetensors spells it."""
    import torch

    plain = tensor.layout == torch.strided and tensor.device.type == "cpu"
    names = {
        torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16",
        torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2",
        torch.int64: "I64", torch.int32: "I32", torch.int16: "I16", torch.int8: "I8",
        torch.uint8: "U8", torch.bool: "BOOL",
    }  # fmt: skip
    if not plain or tensor.is_quantized or tensor.dtype not in names:
        kind = f"{tensor.dtype}, {tensor.layout}, on {tensor.device}"
        raise StateDictError(f"{name[:200]!a} is no plain tensor of numbers: {kind}")
    return names[tensor.dtype]


def _raw(tensor: "torch.Tensor") -> memoryview:
    """Its bytes in row-major order. On big-endian machines there is no torch."""
    import torch

    flat = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    return flat.numpy().data


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


def _end(code: int, why: str) -> None:
    """Without the interpreter's own end, which wants calls that are gone."""
    os.write(2, why.encode("ascii", "backslashreplace"))
    os._exit(code)


if __name__ == "__main__":
    main(sys.argv[1])
