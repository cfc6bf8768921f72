"""Reads the header of safetensors, of one file or of several with an index. Pure.

Format: 8 bytes little-endian length, that many bytes of JSON, then the tensors' bytes
(https://github.com/huggingface/safetensors#format). Everything is checked before it is believed.

transformers and others write `adapter_model-00001-of-00002.safetensors` and so on, with an index
that says which file holds which tensor. Joined, they are byte for byte the file that safetensors
would have written of the same tensors. So an adapter's digest does not depend on its shards.
"""

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec

from loraplex.adapters.common.strict_json import StrictJsonError, decode_object
from loraplex.adapters.errors import Findings, invalid, shown

PREFIX_BYTES = 8
MAX_HEADER_BYTES = 8 << 20
MAX_TENSORS = 20_000
MAX_DIMS = 8
MAX_NAME_CHARS = 512
_MAX_DIM = 1 << 40
_MAX_OFFSET = (1 << 64) - 1
_MAX_METADATA_KEYS = 4096
WEIGHTS_FILE = "adapter_model.safetensors"
# A Git-LFS pointer's, which is text and no longer than this. As a length it would be absurd.
_POINTER_START = b"version "
_MAX_POINTER_BYTES = 1024

DTYPE_BYTES: dict[str, int] = {
    "BOOL": 1,
    "U8": 1,
    "I8": 1,
    "F8_E4M3": 1,
    "F8_E5M2": 1,
    "F8_E8M0": 1,
    "U16": 2,
    "I16": 2,
    "F16": 2,
    "BF16": 2,
    "U32": 4,
    "I32": 4,
    "F32": 4,
    "U64": 8,
    "I64": 8,
    "F64": 8,
    "C64": 8,
}
# Those that weights may have.
FLOAT_DTYPES = frozenset({"F8_E4M3", "F8_E5M2", "F16", "BF16", "F32", "F64"})

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


class TensorInfo(msgspec.Struct, frozen=True, gc=False):
    """One tensor. dtype: as safetensors spells it. start, end: bytes in the whole file."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    end: int

    @property
    def nbytes(self) -> int:
        return self.end - self.start


def header_size(prefix: bytes, file_bytes: int, file: str = WEIGHTS_FILE) -> int:
    """Length of the JSON that follows the first 8 bytes. Raises AdapterError `invalid`. file: its
    name."""
    if len(prefix) < PREFIX_BYTES:
        raise invalid("truncated", file, f"{file} is shorter than 8 bytes")
    if prefix[:PREFIX_BYTES] == _POINTER_START and file_bytes < _MAX_POINTER_BYTES:
        message = f"{file} is a Git-LFS pointer and not the weights; `git lfs pull` fetches them"
        raise invalid("header_too_large", file, message)
    size = int.from_bytes(prefix[:PREFIX_BYTES], "little")
    if size > MAX_HEADER_BYTES:
        message = f"the safetensors header claims {size} bytes; at most {MAX_HEADER_BYTES} are read"
        raise invalid("header_too_large", file, message)
    if size > file_bytes - PREFIX_BYTES:
        message = f"the safetensors header claims {size} bytes in a file of {file_bytes}"
        raise invalid("truncated", file, message)
    return size


def parse_header(
    header: bytes, file_bytes: int, file: str = WEIGHTS_FILE
) -> tuple[TensorInfo, ...]:
    """The tensors, in the order of their bytes.

    header: the JSON alone. file_bytes: size of the whole file, to which the tensors must add up.
    file: its name.
    Raises AdapterError `invalid` with every violation found; never another exception.
    """
    entries = _entries(header, file)
    findings = Findings()
    _check_metadata(entries.pop("__metadata__", None), findings)
    if len(entries) > MAX_TENSORS:
        message = f"{len(entries)} tensors; at most {MAX_TENSORS} are accepted"
        raise invalid("too_many_tensors", file, message)
    data_start = PREFIX_BYTES + len(header)
    infos = [_tensor(name, entry, data_start, findings) for name, entry in entries.items()]
    findings.raise_if_any()
    tensors = sorted(
        (info for info in infos if info is not None), key=lambda info: (info.start, info.end)
    )
    _check_tiling(tensors, data_start, file_bytes, file, findings)
    findings.raise_if_any()
    return tuple(tensors)


def _entries(header: bytes, file: str) -> dict[str, Any]:
    if not header.startswith(b"{"):
        raise invalid("bad_header", file, "the safetensors header does not start with '{'")
    # Each tensor is one object with two lists; counting bounds the memory that parsing takes.
    most = MAX_TENSORS + 2 + _MAX_METADATA_KEYS
    if header.count(b"{") > most:
        message = f"the safetensors header lists more than {MAX_TENSORS} tensors"
        raise invalid("too_many_tensors", file, message)
    if header.count(b"[") > 2 * most:
        message = f"the safetensors header has more lists than {MAX_TENSORS} tensors have"
        raise invalid("bad_header", file, message)
    try:
        return decode_object(header)
    except StrictJsonError as error:
        code = "duplicate_key" if "duplicate key" in str(error) else "bad_header"
        raise invalid(code, file, f"the safetensors header is {error}") from None


def _check_metadata(metadata: object, findings: Findings) -> None:
    if metadata is None:
        return
    if not isinstance(metadata, dict) or not all(isinstance(v, str) for v in metadata.values()):
        findings.add("bad_metadata", "__metadata__", "__metadata__ must map strings to strings")
    elif len(metadata) > _MAX_METADATA_KEYS:
        message = f"__metadata__ has {len(metadata)} keys; at most {_MAX_METADATA_KEYS}"
        findings.add("bad_metadata", "__metadata__", message)


def _tensor(name: str, entry: object, data_start: int, findings: Findings) -> TensorInfo | None:
    if not (0 < len(name) <= MAX_NAME_CHARS and name.isascii() and name.isprintable()):
        findings.add("bad_tensor_name", shown(name), f"{shown(name)} is not a tensor's name")
        return None
    if not isinstance(entry, dict) or set(entry) != {"dtype", "shape", "data_offsets"}:
        message = f"{name}: expected exactly dtype, shape and data_offsets"
        findings.add("bad_tensor_entry", name, message)
        return None
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or dtype not in DTYPE_BYTES:
        findings.add("unknown_dtype", name, f"{name}: unknown dtype {shown(dtype)}")
        return None
    if not _is_ints(shape) or len(shape) > MAX_DIMS or any(dim > _MAX_DIM for dim in shape):
        findings.add("bad_shape", name, f"{name}: not a shape: {shown(shape)}")
        return None
    if not _is_ints(offsets) or len(offsets) != 2 or not offsets[0] <= offsets[1] <= _MAX_OFFSET:
        findings.add("bad_offsets", name, f"{name}: not a span of bytes: {shown(offsets)}")
        return None
    expected, found = math.prod(shape) * DTYPE_BYTES[dtype], offsets[1] - offsets[0]
    if expected != found:
        message = f"{name}: {dtype} {shape} takes {expected} bytes, its span has {found}"
        findings.add("span_mismatch", name, message)
        return None
    return TensorInfo(name, dtype, tuple(shape), data_start + offsets[0], data_start + offsets[1])


def _is_ints(value: object) -> bool:
    """Whether a value is a list of integers that are not negative (JSON's `true` is not one)."""
    return isinstance(value, list) and all(type(item) is int and item >= 0 for item in value)


def _check_tiling(
    tensors: list[TensorInfo], data_start: int, file_bytes: int, file: str, findings: Findings
) -> None:
    """Checks that tensors cover the data exactly: no gap, no overlap, nothing around them."""
    position = data_start
    for tensor in tensors:
        if tensor.start != position:
            kind = "overlap" if tensor.start < position else "gap"
            message = f"{tensor.name}: starts at byte {tensor.start}, expected {position}"
            findings.add(kind, tensor.name, message)
        position = max(position, tensor.end)
    if position > file_bytes:
        message = f"the tensors end at byte {position} of a file of {file_bytes}"
        findings.add("truncated", file, message)
    elif position < file_bytes:
        message = f"{file_bytes - position} bytes follow the last tensor"
        findings.add("trailing_bytes", file, message)


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
