"""Chooses the files that make an adapter, by name and size, before any is fetched. Pure."""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence

from loraplex.adapters.base import BaseSpec
from loraplex.adapters.classes import OwnClasses, activation_said, labels_said, pad_said
from loraplex.adapters.common.strict_json import StrictJsonError, decode_object
from loraplex.adapters.errors import AdapterError
from loraplex.adapters.peft.config import CONFIG_FILE, MAX_CONFIG_BYTES
from loraplex.adapters.peft.lora_tensors import OwnScores
from loraplex.adapters.peft.tokenizer_files import TOKENIZER_FILES
from loraplex.adapters.peft.validate import AdapterLimits
from loraplex.adapters.safetensors.header import WEIGHTS_FILE
from loraplex.adapters.safetensors.weights_index import (
    INDEX_FILES,
    MAX_INDEX_BYTES,
    MAX_SHARDS,
    check_shards,
    is_shard,
    parse_index,
)
from loraplex.adapters.violations import Findings, invalid

MAX_NAMED = 4
_STEP = re.compile(r"checkpoint-(?P<step>[0-9]{1,12})")
CLASSES_FILE = "config.json"
MAX_CLASSES_BYTES = 1 << 20
# The weights in mlx-lm's format, which is not read.
MLX_FILE = "adapters.safetensors"
# Largest accepted size of each file that may stand beside config and weights.
SIDE_FILES: dict[str, int] = {**TOKENIZER_FILES, CLASSES_FILE: MAX_CLASSES_BYTES}
_CONVERT = "`loraplex adapter convert FOLDER --out OUT` makes a safetensors adapter of it"
_UNSAFE_SUFFIXES = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle")


def is_unsafe(name: str) -> bool:
    """Whether the name is that of a pickle: refused when it stands in for weights, never opened."""
    return name.lower().endswith(_UNSAFE_SUFFIXES)


def is_relevant(name: str) -> bool:
    """Whether it says something of the adapter, be it only why it is refused."""
    known = (CONFIG_FILE, WEIGHTS_FILE, MLX_FILE, *INDEX_FILES)
    return name in known or name in SIDE_FILES or is_shard(name) or is_unsafe(name)


def weight_files(names: Iterable[str]) -> tuple[str, ...]:
    """Lists the files that hold the weights; several count only with an index. PEFT reads the one
    file; transformers, too, where there is one."""
    there = set(names)
    if WEIGHTS_FILE in there:
        return (WEIGHTS_FILE,)
    return tuple(sorted(filter(is_shard, there))) if there.intersection(INDEX_FILES) else ()


def index_file(names: Iterable[str]) -> str | None:
    """The index that counts; None where the weights are one file, or none."""
    there = set(names)
    if WEIGHTS_FILE in there or not weight_files(there):
        return None
    return next(filter(there.__contains__, INDEX_FILES))


def small_files(
    listing: Mapping[str, int],
    limits: AdapterLimits,
    findings: Findings,
    place: str = "",
    nearby: Callable[[], Sequence[str]] = tuple,
) -> tuple[str, ...]:
    """The files to look at before the weights: those that are there and not too large.

    listing: name -> bytes. place: the folder or repository, as messages may name it. nearby: names
    of folders in it that are adapters, asked for where it is none itself. What is missing or too
    large is added to `findings`. Raises AdapterError `too_large` when the files together exceed the
    limit, and `invalid` for an adapter in mlx-lm's format.
    """
    if CONFIG_FILE not in listing:
        meant = did_you_mean(place, nearby())
        findings.add("missing_file", CONFIG_FILE, f"there is no {CONFIG_FILE}{meant}")
    _check_weight_files(listing, findings)
    index = index_file(listing)
    allowed = {CONFIG_FILE: MAX_CONFIG_BYTES, **SIDE_FILES}
    allowed |= {} if index is None else {index: MAX_INDEX_BYTES}
    small: list[str] = []
    for name, most in allowed.items():
        if listing.get(name, 0) > most:
            message = f"{name} has {listing[name]} bytes; at most {most} are read"
            findings.add("file_too_large", name, message)
        elif name in listing:
            small.append(name)
    check_bytes(fetched_bytes(listing), limits)
    return tuple(small)


def read_index(
    small: Mapping[str, bytes], listing: Mapping[str, int], findings: Findings
) -> dict[str, str] | None:
    """Tensor -> the file that holds it. None: the weights are in one file, or the index is wrong.
    small: name -> bytes of the files other than the weights."""
    name, before = index_file(listing), len(findings)
    if name is None or name not in small:
        return None
    index = parse_index(small[name], name, findings)
    if index is not None:
        check_shards(index, weight_files(listing), findings)
    return index if len(findings) == before else None


def _check_weight_files(listing: Mapping[str, int], findings: Findings) -> None:
    found = weight_files(listing)
    if len(found) > MAX_SHARDS:
        message = f"the weights are in {len(found)} files; at most {MAX_SHARDS} are read"
        findings.add("too_many_files", found[-1], message)
    if found:
        return
    unsafe = sorted(filter(is_unsafe, listing))
    if INDEX_FILES[0] in listing:
        message = "the weights are in several files, of which none is there beside the index"
        findings.add("missing_file", WEIGHTS_FILE, message)
    elif any(map(is_shard, listing)):
        message = f"the weights are in several files, without an index, {INDEX_FILES[0]}"
        findings.add("missing_file", INDEX_FILES[0], message)
    elif unsafe:
        message = f"the weights are a pickle, which is never opened; {_CONVERT}"
        findings.add("unsafe_format", unsafe[0], message)
    elif MLX_FILE in listing:
        message = f"the weights are in mlx-lm's format, which is not served; {_CONVERT}"
        # Its config has none of PEFT's keys: to list them would hide the one reason.
        raise invalid("missing_file", MLX_FILE, message)
    else:
        findings.add("missing_file", WEIGHTS_FILE, f"there is no {WEIGHTS_FILE}")


def check_bytes(total: int, limits: AdapterLimits) -> None:
    """Checks the bytes of all files together. Raises AdapterError `too_large`."""
    if total > limits.max_bytes:
        message = f"the adapter has {total} bytes; at most {limits.max_bytes} are accepted"
        raise AdapterError("too_large", message)


def fetched_bytes(listing: Mapping[str, int]) -> int:
    fetched = {CONFIG_FILE, *SIDE_FILES, index_file(listing), *weight_files(listing)}
    return sum(size for name, size in listing.items() if name in fetched)


def read_classes(
    data: bytes | None, head: OwnScores, base: BaseSpec, findings: Findings
) -> OwnClasses:
    """Reads label names from the model's `config.json`."""
    count, of_tokens = head.labels.shape[0], head.of_tokens
    if data is None:
        return OwnClasses(count, of_tokens=of_tokens)

    def refuse(words: str) -> None:
        findings.add("bad_value", CLASSES_FILE, f"{CLASSES_FILE}: {words}")

    try:
        config = decode_object(data)
    except StrictJsonError as error:
        findings.add("bad_config", CLASSES_FILE, f"{CLASSES_FILE} is {error}")
        return OwnClasses(count, of_tokens=of_tokens)
    labels = labels_said(config, refuse)
    if labels and len(labels) != count:
        words = f"id2label names {len(labels)} labels; {head.labels.name} has {count}"
        findings.add("labels_mismatch", CLASSES_FILE, f"{CLASSES_FILE}: {words}")
    vocab_size = None if base.is_inferred else base.vocab_size
    said = activation_said(config, refuse), pad_said(config, vocab_size)
    return OwnClasses(count, labels, *said, of_tokens)


def is_checkpoint(name: str) -> bool:
    """Whether a trainer names a checkpoint so."""
    return _STEP.fullmatch(name) is not None


def newest_first(names: Iterable[str]) -> list[str]:
    """Sorts checkpoints by falling step, then all others by name."""
    return sorted(names, key=lambda name: (-_step(name), name))


def did_you_mean(place: str, names: Sequence[str]) -> str:
    """Ends a refusal of `place` with the adapters in it. names: of their folders."""
    meant = [_joined(place.rstrip("/"), name) for name in newest_first(names)[:MAX_NAMED]]
    if not meant:
        return ""
    more = len(names) - len(meant)
    rest = f" (and {more} more)" if more else ""
    return f"; did you mean {' or '.join(meant)}{rest}?"


def _joined(place: str, name: str) -> str:
    beside = name.removeprefix("../")
    if beside == name:
        return f"{place}/{name}"
    start = max(place.rfind("/"), place.rfind(":")) + 1
    return f"{place[:start]}{beside}"


def _step(name: str) -> int:
    found = _STEP.fullmatch(name.rpartition("/")[2])
    return int(found["step"]) if found else -1
