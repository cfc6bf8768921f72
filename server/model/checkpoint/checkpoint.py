"""A base model's Hub-format folder: its configuration, shards, digest, and the tensors that it must
hold and may hold. No torch.

Only safetensors are read; `.bin` and `.pt` files are never opened. weights.py loads tensors. Savers
put the text part of a larger model under prefixes of their own, and a decoder without a head under
none; here all get the names that a model for text would have.
"""

import hashlib
import json
import math
import operator
import os
import re
from collections import Counter
from collections.abc import Callable, Collection, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from loraplex.adapters.errors import CommandError
from loraplex.adapters.peft.tensor_names import is_of_images
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
from loraplex.server.model.checkpoint.stored_forms import as_stored, expected_tensors, stored_forms
from loraplex.server.model.families.registry import read_model
from loraplex.server.model.quantisation.forms import FLOATS, UINT8, TensorForm
from loraplex.server.model.spec.linear_spec import MXFP4_TENSORS
from loraplex.server.model.spec.model_spec import ModelSpec

GENERATION_FILE = "generation_config.json"

_MAX_JSON_BYTES = 64 << 20
_MAX_HEADER_BYTES = 100 << 20  # the format's own limit
# Two fine-tunes of one model share config and header, so the digest also samples every tensor.
_SAMPLES_PER_TENSOR = 4
_SAMPLE_BYTES = 64
# Says where a copy came from, not what it computes.
_VOLATILE_KEYS = ("_name_or_path", "transformers_version")

_OF_BODY = (
    r"(?:layers|embed_tokens|norm|final_layernorm|embedding_norm|embed_tokens_per_layer|"
    r"per_layer_model_projection|per_layer_projection_norm)\..+"
)
_BODY = re.compile(
    r"(?:model\.language_model\.|language_model\.model\.|language_model\.|model\.text_model\.|"
    rf"model\.)(?P<rest>{_OF_BODY})"
)
_BARE = re.compile(_OF_BODY)
_HEAD = re.compile(r"(?:language_model\.)?(?P<head>lm_head\..+)")

_MAX_LISTED = 8
_LAYER = re.compile(r"model\.layers\.(?P<layer>[0-9]{1,6})\.(?P<rest>.+)")
# What a checkpoint carries along and transformers leaves out when it loads the model.
_LEFT_OUT = {
    # Derived from the configuration.
    "rotary tables": re.compile(r".*\.rotary_emb\.(inv_freq|cos_cached|sin_cached)"),
    "attention masks": re.compile(r".*\.(masked_bias|(attn|attention)\.bias|causal_mask)"),
    # TRL's, for training by reinforcement.
    "value head": re.compile(r"v_head\..+"),
    "multi-token prediction": re.compile(r"(model\.)?mtp(_[a-z_]+)?\..+"),
}
# Of keys, values, queries and weights of attention in FP8: they may be there.
_SCALES = re.compile(
    r"model\.layers\.[0-9]+\.self_attn\.(([kvq]|prob)_scale|(k|v)_proj\.(output|[kv])_scale)"
)
# A part of a larger model whose text part is served.
_IMAGES = "the part for images"
_PREDICTION = "multi-token prediction"
# What only a layer beyond the last has, whose work is to predict further tokens.
_OF_PREDICTION = re.compile(
    r"(eh_proj|enorm|hnorm|shared_head|embed_tokens|input_proj|token_layernorm|hidden_layernorm|"
    r"final_layernorm|mtp[a-z_]*)\..+"
)
_QUANTISED = re.compile(
    r".*\.(qweight|qzeros|weight_packed|weight_scale|weight_scale_inv|absmax|quant_map|SCB)"
)


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


def model_shards(folder: Path, model: ModelSpec) -> tuple[ModelFile, ...]:
    """Read the headers of a model's shards, with the names of `ModelSpec.tensors`. Raises
    CheckpointError, also where two tensors would have one name.
    """
    shards = read_shards(folder)
    if not model.is_text_part and model.writes and not model.stored_names:
        return shards

    def name_of(stored: str) -> str:
        if model.is_text_part:  # whose towers may have brought LoRA of their own
            return plain_name(stored).replace(".base_layer.", ".")
        return f"model.{stored}" if not model.writes and _BARE.fullmatch(stored) else stored

    return renamed(shards, name_of, model)


def plain_name(stored: str) -> str:
    """The name of a tensor in a checkpoint of the text part alone; of other parts its own."""
    found = _BODY.fullmatch(stored)
    if found is not None:
        return f"model.{found['rest']}"
    found = _HEAD.fullmatch(stored)
    return stored if found is None else found["head"]


def check_folder(folder: Path, *, with_tensors: bool = True) -> ModelSpec:
    """The configuration of a model's folder, once it fits the weights' headers.

    Raises CheckpointError with what matters most first.
    """
    model = read_config(folder)
    if with_tensors:
        check_tensors(folder, model_shards(folder, model), model)
    return model


def check_tensors(folder: Path, shards: Sequence[ModelFile], model: ModelSpec) -> tuple[str, ...]:
    """Names of stored tensors that are left out, since they change no token.

    Raises CheckpointError with everything that is missing, unexpected or of another shape.
    """
    stored = stored_tensors(shards)
    _refuse_quantised(folder, stored, model)
    expected = _expected(as_stored(model, stored), stored)
    # Of a head that is tied, or that nobody asks.
    ignored = {model.head.tensor} if model.head.tied else set()
    ignored |= set(filter(_SCALES.fullmatch, stored))
    ignored |= set(filter(re.compile(model.unread).fullmatch, stored))
    others = [name for name in stored if name not in expected and name not in ignored]
    beyond = _predicting_layers(others, model)
    left_out = tuple(
        name
        for name in others
        if _kind(name, beyond) is not None or (model.is_text_part and is_of_images(name))
    )
    unfit = {
        "missing": [
            name for name, tensor in expected.items() if name not in stored and not tensor.optional
        ],
        "unexpected": [name for name in others if name not in left_out],
        "wrong": [
            f"{name} (expected {_shown(tensor)}, got {stored[name].dtype}"
            f" {list(stored[name].shape)})"
            for name, tensor in expected.items()
            if name in stored and not tensor.fits(stored[name])
        ],
    }
    problems = [f"{len(n)} {kind}: {_listed(n)}" for kind, n in unfit.items() if n]
    if problems:
        raise CheckpointError(f"{folder}: tensors do not fit config.json: {'; '.join(problems)}")
    return left_out


def _refuse_quantised(folder: Path, stored: Mapping[str, TensorInfo], model: ModelSpec) -> None:
    if model.quantisation is not None:
        return
    quantised = next(filter(_QUANTISED.fullmatch, stored), None)
    if quantised is not None:
        raise CheckpointError(
            f"{folder}: the weights are quantised ({quantised}), and config.json does not say how"
            " (quantization_config)"
        )


def _expected(model: ModelSpec, stored: Mapping[str, TensorInfo]) -> dict[str, TensorForm]:
    expected = expected_tensors(model, stored_forms(model, stored))
    expected[tables(stored, model)[0]] = expected.pop(model.embedding.tensor)
    for name, tensor in expected.items():
        if name.endswith(MXFP4_TENSORS):
            expected[name] = tensor._replace(dtypes=UINT8)
    return expected


def _shown(tensor: TensorForm) -> str:
    shapes = " or ".join(str(list(shape)) for shape in tensor.shapes)
    if tensor.dtypes == FLOATS:
        return shapes
    return f"{' or '.join(sorted(tensor.dtypes))} {shapes}".rstrip()


def kinds(left_out: Collection[str]) -> tuple[int, str]:
    """How many, and what they are, for people."""
    counts = Counter(
        _IMAGES if is_of_images(name) else _kind(name, frozenset()) or _PREDICTION
        for name in left_out
    )
    return len(left_out), ", ".join(f"{kind} ({count})" for kind, count in counts.items())


def _kind(name: str, beyond: Collection[int]) -> str | None:
    """The kind of a tensor that is left out; None for any other tensor."""
    found = _LAYER.fullmatch(name)
    if found is not None and int(found["layer"]) in beyond:
        return _PREDICTION
    return next((kind for kind, names in _LEFT_OUT.items() if names.fullmatch(name)), None)


def _predicting_layers(names: Sequence[str], model: ModelSpec) -> frozenset[int]:
    """Layers beyond the last that predict further tokens, as config.json or their tensors say.

    Others are those of a model whose config.json leaves layers out.
    """
    layers = [found for found in map(_LAYER.fullmatch, names) if found is not None]
    beyond = {int(found["layer"]) for found in layers if _OF_PREDICTION.fullmatch(found["rest"])}
    declared = range(model.num_layers, model.num_layers + model.extra_layers)
    return frozenset(layer for layer in beyond if layer >= model.num_layers).union(declared)


def _listed(names: Sequence[str]) -> str:
    more = ", …" if len(names) > _MAX_LISTED else ""
    return f"{', '.join(names[:_MAX_LISTED])}{more}"
