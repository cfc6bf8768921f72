"""Ways to spoil a good adapter folder. Each works on any base: it changes what it finds there."""

import json
import os
import pickle
import socket
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from loraplex.adapters.base import BaseSpec
from tests.adapter_folders import (
    Dtype,
    adapter_config,
    lora_tensors,
    raw_safetensors,
    safetensors_bytes,
    write_config,
)

WEIGHTS = "adapter_model.safetensors"
PREFIX = "base_model.model."
Q = f"{PREFIX}model.layers.0.self_attn.q_proj"
FIRST = f"{Q}.lora_A.weight"
FIRST_B = f"{Q}.lora_B.weight"
UNPICKLED = Path("/tmp/loraplex-was-unpickled")

Spoil = Callable[[Path], None]
Tensors = dict[str, "np.ndarray[Any, np.dtype[np.float32]]"]


class Exploding:
    """Unpickling it would make a folder: nothing may."""

    def __reduce__(self) -> tuple[object, ...]:
        return (os.mkdir, (str(UNPICKLED),))


def write_good(folder: Path, base: BaseSpec) -> Path:
    """The folder that is spoiled."""
    folder.mkdir(parents=True)
    write_config(folder, adapter_config(base, 8, ["q_proj", "v_proj"]))
    (folder / WEIGHTS).write_bytes(safetensors_bytes(lora_tensors(base)))
    return folder


def config(**changes: Any) -> Spoil:
    def spoil(folder: Path) -> None:
        path = folder / "adapter_config.json"
        write_config(folder, json.loads(path.read_text()) | changes)

    return spoil


def file(name: str, data: bytes | str) -> Spoil:
    def spoil(folder: Path) -> None:
        (folder / name).write_bytes(data.encode() if isinstance(data, str) else data)

    return spoil


def read_tensors(folder: Path) -> Tensors:
    """Of a good folder: float32 throughout."""
    data = (folder / WEIGHTS).read_bytes()
    start = 8 + struct.unpack("<Q", data[:8])[0]
    found: Tensors = {}
    for name, entry in json.loads(data[8:start]).items():
        if name != "__metadata__":
            begin, end = (start + offset for offset in entry["data_offsets"])
            array = np.frombuffer(data[begin:end], np.float32)
            found[name] = array.reshape(entry["shape"]).copy()
    return found


def tensors(change: Callable[[Tensors], Tensors]) -> Spoil:
    def spoil(folder: Path) -> None:
        (folder / WEIGHTS).write_bytes(safetensors_bytes(change(read_tensors(folder))))

    return spoil


def header(change: Callable[[dict[str, Any]], dict[str, Any]], extra: bytes = b"") -> Spoil:
    def spoil(folder: Path) -> None:
        data = (folder / WEIGHTS).read_bytes()
        size = struct.unpack("<Q", data[:8])[0]
        changed = change(json.loads(data[8 : 8 + size]))
        (folder / WEIGHTS).write_bytes(
            raw_safetensors(json.dumps(changed).encode(), data[8 + size :] + extra)
        )

    return spoil


def weights_bytes(change: Callable[[bytes], bytes]) -> Spoil:
    def spoil(folder: Path) -> None:
        (folder / WEIGHTS).write_bytes(change((folder / WEIGHTS).read_bytes()))

    return spoil


def value(number: float) -> Spoil:
    def change(found: Tensors) -> Tensors:
        found[FIRST][1, 1] = number
        return found

    return tensors(change)


def renamed(old: str, new: str) -> Spoil:
    return tensors(lambda found: {new if name == old else name: t for name, t in found.items()})


def extra(name: str, *shape: int) -> Spoil:
    return tensors(lambda found: found | {name: np.ones(shape, np.float32)})


def without(*parts: str) -> Spoil:
    return tensors(
        lambda found: {n: t for n, t in found.items() if not any(part in n for part in parts)}
    )


def fifo(name: str) -> Spoil:
    def spoil(folder: Path) -> None:
        (folder / name).unlink(missing_ok=True)
        os.mkfifo(folder / name)

    return spoil


def directory(name: str) -> Spoil:
    def spoil(folder: Path) -> None:
        (folder / name).unlink(missing_ok=True)
        (folder / name).mkdir()

    return spoil


def link(name: str, target: str) -> Spoil:
    def spoil(folder: Path) -> None:
        (folder / name).unlink(missing_ok=True)
        (folder / name).symlink_to(target)

    return spoil


def pickled(*names: str) -> Spoil:
    def spoil(folder: Path) -> None:
        (folder / WEIGHTS).unlink()
        for name in names:
            (folder / name).write_bytes(pickle.dumps(Exploding()))

    return spoil


def both(*spoils: Spoil) -> Spoil:
    def spoil(folder: Path) -> None:
        for one in spoils:
            one(folder)

    return spoil


def entry(**changes: Any) -> Spoil:
    """Changes what the header says of the first tensor. A value may be a function of the old."""

    def change(found: dict[str, Any]) -> dict[str, Any]:
        for key, value in changes.items():
            found[FIRST][key] = value(found[FIRST].get(key)) if callable(value) else value
        return found

    return header(change)


def header_text(text: str | bytes) -> Spoil:
    """The whole header, right or wrong, with no data behind it."""
    encoded = text.encode() if isinstance(text, str) else text
    return weights_bytes(lambda data: raw_safetensors(encoded, b""))


def stored_as(dtype: Dtype, spoil: Callable[[Tensors], Tensors]) -> Spoil:
    def write(folder: Path) -> None:
        (folder / WEIGHTS).write_bytes(safetensors_bytes(spoil(read_tensors(folder)), dtype))

    return write


def sparse(name: str, nbytes: int) -> Spoil:
    def spoil(folder: Path) -> None:
        with (folder / name).open("ab") as made:
            made.truncate(nbytes)

    return spoil


def unix_socket(name: str) -> Spoil:
    def spoil(folder: Path) -> None:
        (folder / name).unlink()
        # The path of a socket has at most 108 bytes: bound through the folder's descriptor.
        directory = os.open(folder, os.O_RDONLY)
        try:
            with socket.socket(socket.AF_UNIX) as made:
                made.bind(f"/proc/self/fd/{directory}/{name}")
        finally:
            os.close(directory)

    return spoil


def moved(old: str, new: str) -> Spoil:
    def spoil(folder: Path) -> None:
        (folder / old).rename(folder / new)

    return spoil
