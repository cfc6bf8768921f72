"""Judges the files of one adapter together: its manifest and tensors, or every reason why not."""

import hashlib
import stat
from pathlib import Path
from typing import NamedTuple

import msgspec

from adapters.adapter_files import is_relevant, small_files
from adapters.base import BaseSpec
from adapters.disk import entries_of
from adapters.errors import AdapterError
from adapters.floats import float_digest, is_finite
from adapters.header import TensorInfo
from adapters.inferred_base import infer_base
from adapters.layout import room_problem
from adapters.manifest import AdapterManifest
from adapters.peft_format import CONFIG_FILE, PeftConfig, parse_config
from adapters.tokenizer_files import TOKENIZER_FILES, read_tokenizer_files
from adapters.validate import (
    WEIGHTS_FILE,
    AdapterLimits,
    LoraTensors,
    check_base_name,
    validate,
)
from adapters.violations import Findings, invalid
from adapters.weights import WeightsFile, open_weights

_DIGEST_VERSION = b"loraplex adapter 1"


class Judged(NamedTuple):
    """An adapter that can be served."""

    manifest: AdapterManifest
    tensors: LoraTensors


def check_folder(
    folder: Path, base: BaseSpec | None = None, limits: AdapterLimits | None = None
) -> AdapterManifest:
    """The manifest of an adapter folder, judged in full.

    base: None = only what can be told without the base model is checked.
    Raises AdapterError with every violation found.
    """
    return judge_folder(folder, base, limits or AdapterLimits()).manifest


def judge_folder(folder: Path, base: BaseSpec | None, limits: AdapterLimits) -> Judged:
    """As `check_folder`, with the tensors in place."""
    small_files(_listing(folder), limits)
    findings = Findings()
    config = parse_config((folder / CONFIG_FILE).read_bytes(), findings)
    with open_weights(folder / WEIGHTS_FILE) as weights:
        tensors = _header(weights, findings)
        if base is None:
            base = infer_base(config.base_model_name_or_path if config else "", tensors or ())
        adapter = None
        if config is not None and tensors is not None:
            adapter = validate(config, tensors, base, limits, findings)
        template = read_tokenizer_files(_tokenizer_files(folder), base, findings)
        if adapter is not None:
            _check_values(weights, adapter, base, findings)
        findings.raise_if_any()
        if adapter is None:
            raise AssertionError("a config that cannot be read left no violation")
        _check_room(adapter, base, limits)
        digest = _digest(adapter.config, template, weights)
    return Judged(_manifest(digest, adapter, template), adapter)


def check_config(data: bytes, base: BaseSpec, limits: AdapterLimits) -> None:
    """What the config alone forbids, before weights are fetched. Raises AdapterError."""
    findings = Findings()
    config = parse_config(data, findings)
    if config is not None:
        check_base_name(config, base, limits, findings)
    findings.raise_if_any()


def rejudge(folder: Path, base: BaseSpec, limits: AdapterLimits) -> LoraTensors:
    """Content that was judged in full before: its tensors, under the limits of today.

    Raises AdapterError.
    """
    findings = Findings()
    config = parse_config((folder / CONFIG_FILE).read_bytes(), findings)
    with open_weights(folder / WEIGHTS_FILE) as weights:
        tensors = _header(weights, findings)
        adapter = None
        if config is not None and tensors is not None:
            adapter = validate(config, tensors, base, limits, findings)
    findings.raise_if_any()
    if adapter is None:
        raise AssertionError("a config that cannot be read left no violation")
    _check_room(adapter, base, limits)
    return adapter


def is_intact(folder: Path, adapter: LoraTensors, manifest: AdapterManifest) -> bool:
    """Whether content that was judged before still has the digest it is known by."""
    known = manifest.content_digest or manifest.digest
    with open_weights(folder / WEIGHTS_FILE) as weights:
        return _digest(adapter.config, manifest.chat_template, weights) == known


def _listing(folder: Path) -> dict[str, int]:
    """Name -> bytes of the relevant files. Refuses what is not a regular file before opening it."""
    if not folder.is_dir():
        raise AdapterError("not_found", f"{folder} is not a folder")
    listing: dict[str, int] = {}
    for entry in entries_of(folder):
        if not is_relevant(entry.name):
            continue
        try:
            found = entry.stat()
        except OSError:
            raise invalid("not_a_file", entry.name, f"{entry.name} cannot be read") from None
        if not stat.S_ISREG(found.st_mode):
            raise invalid("not_a_file", entry.name, f"{entry.name} is not a regular file")
        listing[entry.name] = found.st_size
    return listing


def _header(weights: WeightsFile, findings: Findings) -> tuple[TensorInfo, ...] | None:
    try:
        return weights.tensors()
    except AdapterError as error:
        findings.extend(error.violations)
        return None


def _tokenizer_files(folder: Path) -> dict[str, bytes]:
    present = (name for name in TOKENIZER_FILES if (folder / name).is_file())
    return {name: (folder / name).read_bytes() for name in present}


def _check_values(
    weights: WeightsFile, adapter: LoraTensors, base: BaseSpec, findings: Findings
) -> None:
    for module in adapter.modules:
        for tensor in (module.a, module.b):
            if not is_finite(weights.read(tensor), tensor.dtype):
                message = f"{tensor.name} has NaN or infinite values"
                findings.add("not_finite", tensor.name, message)
    for name, tensor in adapter.base_copies:
        if float_digest(weights.pieces(tensor)) != base.embedding_digests.get(name):
            message = (
                f"{tensor.name}: differs from the base model's weights; save the adapter with "
                "save_embedding_layers=False"
            )
            findings.add("base_weights_changed", tensor.name, message)


def _check_room(adapter: LoraTensors, base: BaseSpec, limits: AdapterLimits) -> None:
    problem = None if limits.room is None else room_problem(adapter, base, limits.room)
    if problem is not None:
        raise AdapterError("too_large", problem)


def _digest(config: PeftConfig, template: str | None, weights: WeightsFile) -> str:
    """sha256 over the used config, the chat template and the weights file, each with its length."""
    digest = hashlib.sha256(_DIGEST_VERSION)
    for part in (msgspec.json.encode(config), (template or "").encode()):
        digest.update(len(part).to_bytes(8, "little") + part)
    for chunk in weights.chunks(0, weights.nbytes):
        digest.update(chunk)
    return digest.hexdigest()


def _manifest(digest: str, adapter: LoraTensors, template: str | None) -> AdapterManifest:
    tensors = [tensor for module in adapter.modules for tensor in (module.a, module.b)]
    return AdapterManifest(
        digest=digest,
        base=adapter.config.base_model_name_or_path,
        targets=tuple(sorted({module.module for module in adapter.modules})),
        ranks=tuple(sorted({module.lora_rank for module in adapter.modules})),
        nbytes=sum(tensor.nbytes for tensor in tensors),
        dtype="+".join(sorted({tensor.dtype for tensor in tensors})),
        chat_template=template,
    )
