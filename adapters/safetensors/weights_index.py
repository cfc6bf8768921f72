"""Weights in several files: what their index must say, and the one file that they stand for. Pure.

transformers and others write `adapter_model-00001-of-00002.safetensors` and so on, with an index
that says which file holds which tensor. Joined, they are byte for byte the file that safetensors
would have written of the same tensors. So an adapter's digest does not depend on its shards.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import msgspec

from loraplex.adapters.common.strict_json import StrictJsonError, decode_object
from loraplex.adapters.safetensors.header import MAX_TENSORS, PREFIX_BYTES, TensorInfo
from loraplex.adapters.violations import Findings, shown

# transformers gives the index of an adapter the name that a model's has.
INDEX_FILES = ("adapter_model.safetensors.index.json", "model.safetensors.index.json")
MAX_INDEX_BYTES = 8 << 20
MAX_SHARDS = 64
_SHARD = re.compile(r"adapter_model-[0-9]{5}-of-[0-9]{5}\.safetensors")
# The order in which safetensors writes tensors: by dtype, then by name.
_DTYPES = (
    *("U64", "I64", "F64", "C64", "F32", "U32", "I32", "BF16", "F16", "U16", "I16"),
    *("F8_E8M0", "F8_E4M3", "F8_E5M2", "I8", "U8", "BOOL"),
)


def is_shard(name: str) -> bool:
    return _SHARD.fullmatch(name) is not None


def parse_index(data: bytes, name: str, findings: Findings) -> dict[str, str] | None:
    """Tensor -> its file, by the bytes of the index `name`; None when it is bad."""
    try:
        weight_map = decode_object(data).get("weight_map")
    except StrictJsonError as error:
        findings.add("bad_index", name, f"{name} is {error}")
        return None
    if not isinstance(weight_map, dict) or not 0 < len(weight_map) <= MAX_TENSORS:
        message = f"{name}: expected a weight_map of 1 to {MAX_TENSORS} tensors"
        findings.add("bad_index", name, message)
        return None
    for tensor, file in weight_map.items():
        if not isinstance(file, str) or not is_shard(file):
            expected = "expected names such as adapter_model-00001-of-00002.safetensors"
            message = f"{name}: {shown(tensor)} is said to be in {shown(file)}; {expected}"
            findings.add("bad_index", name, message)
            return None
    return weight_map


def check_shards(index: Mapping[str, str], there: Iterable[str], findings: Findings) -> None:
    """Whether exactly the files that the index names are there."""
    named, found = set(index.values()), set(there)
    for file in sorted(named - found):
        findings.add("missing_file", file, f"the index names {file}, which is not there")
    for file in sorted(found - named):
        findings.add("index_mismatch", file, f"{file} is there, and the index does not name it")


class FileSpan(NamedTuple):
    """Bytes `start` to `end` of the joined file lie in `file` from `source` on."""

    start: int
    end: int
    file: str
    source: int


def join_shards(
    index: Mapping[str, str], shards: Mapping[str, tuple[TensorInfo, ...]], findings: Findings
) -> tuple[bytes, tuple[FileSpan, ...]]:
    """The beginning of the joined file, up to its tensors' bytes; and where those lie. Worth
    nothing unless `findings` is still empty afterwards."""
    held: dict[str, tuple[TensorInfo, str]] = {}
    for file, tensors in shards.items():
        for tensor in tensors:
            if tensor.name in held:
                message = f"{tensor.name}: in {held[tensor.name][1]} and in {file}"
                findings.add("duplicate_tensor", tensor.name, message)
            held[tensor.name] = (tensor, file)
            if index.get(tensor.name, file) != file or tensor.name not in index:
                listed = index.get(tensor.name, "no file")
                message = f"{tensor.name} is in {file}; the index says {listed}"
                findings.add("index_mismatch", tensor.name, message)
    for name in index.keys() - held.keys():
        message = f"{shown(name)}: in no file; the index says {index[name]}"
        findings.add("index_mismatch", name, message)
    if len(held) > MAX_TENSORS:
        message = f"{len(held)} tensors; at most {MAX_TENSORS} are accepted"
        findings.add("too_many_tensors", INDEX_FILES[0], message)
    return _joined(sorted(held.values(), key=lambda each: _place(each[0])))


def _place(tensor: TensorInfo) -> tuple[int, str]:
    return _DTYPES.index(tensor.dtype), tensor.name


def _joined(
    tensors: Sequence[tuple[TensorInfo, str]],
) -> tuple[bytes, tuple[FileSpan, ...]]:
    entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
    position = 0
    for tensor, _ in tensors:
        offsets = (position, position + tensor.nbytes)
        entries[tensor.name] = {
            "dtype": tensor.dtype,
            "shape": tensor.shape,
            "data_offsets": offsets,
        }
        position = offsets[1]
    header = msgspec.json.encode(entries)
    header += b" " * (-len(header) % PREFIX_BYTES)
    beginning = len(header).to_bytes(PREFIX_BYTES, "little") + header
    segments = []
    start = len(beginning)
    for tensor, file in tensors:
        segments.append(FileSpan(start, start + tensor.nbytes, file, tensor.start))
        start += tensor.nbytes
    return beginning, tuple(segments)
