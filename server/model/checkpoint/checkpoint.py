"""A base model's Hub-format folder: its configuration, shards, tensor table and digest. No torch.

Only safetensors are read; `.bin` and `.pt` files are never opened. weights.py loads tensors.
"""

import hashlib
import json
import math
import operator
import os
import re
from collections.abc import Callable, Container, Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from loraplex.adapters.errors import CommandError
from loraplex.adapters.safetensors.header import DTYPE_BYTES, TensorInfo
from loraplex.server.model.checkpoint.model_files import (
    CONFIG_FILE,
    INDEX_FILE,
    WEIGHTS_FILE,
    files_of,
    what_it_is,
    without_weights,
)
from loraplex.server.model.checkpoint.sentence_files import pools_vectors
from loraplex.server.model.families.registry import read_model
from loraplex.server.model.spec.model_spec import ModelSpec

GENERATION_FILE = "generation_config.json"

_MAX_JSON_BYTES = 64 << 20
_MAX_HEADER_BYTES = 100 << 20  # the format's own limit
# Two fine-tunes of one model share config and header, so the digest also samples every tensor.
_SAMPLES_PER_TENSOR = 4
_SAMPLE_BYTES = 64
# Says where a copy came from, not what it computes.
_VOLATILE_KEYS = ("_name_or_path", "transformers_version")


class CheckpointError(CommandError):
    """The folder cannot be served as a base model; the message says what to do."""


class UnservedError(CheckpointError):
    """Error of a `config.json` whose model cannot be served. reason: without the folder's name."""

    def __init__(self, path: Path, reason: str) -> None:
        super().__init__(f"{path}: {reason}")
        self.reason = reason


@dataclass(frozen=True, slots=True)
class ModelFile:
    path: Path
    nbytes: int
    header: bytes
    tensors: dict[str, TensorInfo]


def stored_tensors(shards: Iterable[ModelFile]) -> dict[str, TensorInfo]:
    """List all tensors of the shards, by name."""
    return {name: tensor for shard in shards for name, tensor in shard.tensors.items()}


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file of the model. Raises CheckpointError with the file's name."""
    try:
        if path.stat().st_size > _MAX_JSON_BYTES:
            raise CheckpointError(f"{path}: larger than {_MAX_JSON_BYTES} bytes")
        value = json.loads(path.read_text("utf-8"))
    except FileNotFoundError:
        raise CheckpointError(f"{path.parent} {what_it_is(path.parent)}") from None
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: cannot be read as JSON ({error})") from None
    if not isinstance(value, dict):
        raise CheckpointError(f"{path}: expected a JSON object")
    return value


def tables(stored: Container[str], model: ModelSpec) -> tuple[str, ...]:
    """Names of the embedding and the head, the embedding first. Tied they are one table, which is
    stored under its own name, as the head (safetensors' `save_model`), or as both."""
    both = (model.embedding.tensor, model.head.tensor)
    if not model.writes:
        return both[:1]
    if not model.head.tied:
        return both
    return tuple(name for name in both if name in stored) or both[:1]


def read_text(path: Path, limit: int) -> str:
    """A text of at most so many bytes. Raises CheckpointError with the file's name."""
    try:
        if path.stat().st_size > limit:
            raise CheckpointError(f"{path}: larger than {limit} bytes")
        return path.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise CheckpointError(f"{path}: cannot be read ({error})") from None


def read_optional_json(path: Path) -> dict[str, Any]:
    return read_json(path) if path.exists() else {}


def read_config(folder: Path, name: str = CONFIG_FILE) -> ModelSpec:
    """The folder's ModelSpec. Raises CheckpointError listing everything unsupported."""
    config = read_json(folder / name)
    generation = read_optional_json(folder / GENERATION_FILE)
    try:
        return read_model(config, generation, for_vectors=pools_vectors(folder))
    except ValueError as error:
        raise UnservedError(folder / name, str(error)) from None
    except (TypeError, AttributeError, ArithmeticError, KeyError, IndexError) as error:
        reason = f"an entry of another type or size than expected ({error})"
        raise UnservedError(folder / name, reason) from None


def read_shards(folder: Path) -> tuple[ModelFile, ...]:
    """The weight files' headers, in order of name. Raises CheckpointError, also where two files
    hold a tensor of one name."""
    shards = tuple(_read_shard(folder / name) for name in _shard_names(folder))
    holders: dict[str, Path] = {}
    for shard in shards:
        for name in shard.tensors:
            other = holders.setdefault(name, shard.path)
            if other != shard.path:
                raise CheckpointError(f"{shard.path}: {name} lies in {other.name}, too")
    return shards


def renamed(
    shards: Iterable[ModelFile], name_of: Callable[[str], str | None], model: ModelSpec
) -> tuple[ModelFile, ...]:
    """The shards with other names, in which `ModelSpec.stored_names` are then replaced; tensors
    without a name are left out. Raises CheckpointError where two would have one name."""
    seen: dict[str, str] = {}
    found = []
    for shard in shards:
        tensors: dict[str, TensorInfo] = {}
        for stored, tensor in shard.tensors.items():
            name = name_of(stored)
            if name is None:
                continue
            for pattern, replacement in model.stored_names:
                name = re.sub(pattern, replacement, name)
            other = seen.setdefault(name, stored)
            if other != stored:
                raise CheckpointError(f"{shard.path}: {stored} and {other} are the same tensor")
            tensors[name] = tensor
        found.append(replace(shard, tensors=tensors))
    return tuple(found)


def base_digest(folder: Path) -> str:
    """Identity of a base model: sha256 hex over its configuration, and over every shard's name,
    size, header and a sample of every tensor's bytes."""
    config = read_json(folder / CONFIG_FILE)
    for key in _VOLATILE_KEYS:
        config.pop(key, None)
    digest = hashlib.sha256()
    _feed(digest, json.dumps(config, sort_keys=True, separators=(",", ":")).encode())
    for shard in read_shards(folder):
        _feed(digest, f"{shard.path.name}:{shard.nbytes}".encode())
        _feed(digest, shard.header)
        with shard.path.open("rb") as file:
            for name in sorted(shard.tensors):
                _feed(digest, _sample(file.fileno(), shard.tensors[name]))
    return digest.hexdigest()


def _feed(digest: "hashlib._Hash", part: bytes) -> None:
    digest.update(len(part).to_bytes(8, "little"))
    digest.update(part)


def _sample(descriptor: int, tensor: TensorInfo) -> bytes:
    step = max(tensor.nbytes // _SAMPLES_PER_TENSOR, 1)
    offsets = range(tensor.start, tensor.end, step)
    return b"".join(
        os.pread(descriptor, min(_SAMPLE_BYTES, tensor.end - offset), offset)
        for offset in offsets[:_SAMPLES_PER_TENSOR]
    )


def _shard_names(folder: Path) -> list[str]:
    if (folder / INDEX_FILE).exists():
        weight_map = read_json(folder / INDEX_FILE).get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map:
            raise CheckpointError(f"{folder / INDEX_FILE}: weight_map is missing or empty")
        names = sorted({str(name) for name in weight_map.values()})
    elif (folder / WEIGHTS_FILE).exists():
        names = [WEIGHTS_FILE]
    else:
        raise CheckpointError(f"{folder} {without_weights(files_of(folder), str(folder))}")
    outside = [n for n in names if Path(n).name != n or not n.endswith(".safetensors")]
    if outside:
        raise CheckpointError(f"{folder / INDEX_FILE}: not a safetensors file of it: {outside}")
    missing = [n for n in names if not (folder / n).is_file()]
    if missing:
        raise CheckpointError(f"{folder}: shards named by the index are missing: {missing}")
    return names


def _read_shard(path: Path) -> ModelFile:
    nbytes = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if not 2 <= length <= min(_MAX_HEADER_BYTES, nbytes - 8):
            raise CheckpointError(f"{path}: not a safetensors file (header of {length} bytes)")
        header = file.read(length)
    try:
        entries = json.loads(header)
        tensors = {
            str(name): _stored(str(name), entry, 8 + length, nbytes)
            for name, entry in entries.items()
            if name != "__metadata__"
        }
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"{path}: malformed safetensors header ({error})") from None
    return ModelFile(path, nbytes, header, tensors)


def _stored(name: str, entry: dict[str, Any], data: int, nbytes: int) -> TensorInfo:
    begin, end = (operator.index(offset) for offset in entry["data_offsets"])
    if not 0 <= begin <= end <= nbytes - data:
        raise ValueError("a tensor lies outside the file; is the download complete?")
    shape, dtype = tuple(operator.index(n) for n in entry["shape"]), str(entry["dtype"])
    if dtype in DTYPE_BYTES and end - begin != math.prod(shape) * DTYPE_BYTES[dtype]:
        raise ValueError(f"{dtype} {list(shape)} does not take {end - begin} bytes")
    return TensorInfo(name, dtype, shape, data + begin, data + end)
