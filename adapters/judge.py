"""Judges the files of one adapter together: its manifest and tensors, or every reason why not."""

import os
import stat
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import NamedTuple

from loraplex.adapters.base import BaseSpec
from loraplex.adapters.classes import HEAD_OF_CLASSES
from loraplex.adapters.common.disk import entries_of
from loraplex.adapters.content_check import ContentDigest, DigestCheck, Fingerprint, Seal
from loraplex.adapters.errors import AdapterError
from loraplex.adapters.manifest import AdapterManifest, AdapterText, SlabDtype
from loraplex.adapters.nearby import adapters_near
from loraplex.adapters.peft.config import CONFIG_FILE, parse_config, trained_for
from loraplex.adapters.peft.files import (
    CLASSES_FILE,
    check_bytes,
    is_relevant,
    is_unsafe,
    read_classes,
    read_index,
    small_files,
    weight_files,
)
from loraplex.adapters.peft.inferred_base import infer_base
from loraplex.adapters.peft.lora_tensors import LoraTensors, OwnBias, OwnNorm, OwnTable, PlacedLora
from loraplex.adapters.peft.targeting import Targeting
from loraplex.adapters.peft.tokenizer_files import (
    GENERATION_FILE,
    TOKENIZER_FILES,
    read_tokenizer_files,
)
from loraplex.adapters.peft.validate import (
    WEIGHTS_FILE,
    AdapterLimits,
    SlabRoom,
    check_base_name,
    check_config,
    is_of_outputs,
    may_be_lora,
    place_tensors,
    validate,
)
from loraplex.adapters.safetensors.file import Weights, open_shards, open_weights
from loraplex.adapters.safetensors.floats import FloatDigest, fits, is_finite
from loraplex.adapters.safetensors.header import FLOAT_DTYPES, TensorInfo
from loraplex.adapters.slab.layout import room_problem
from loraplex.adapters.violations import Findings


class Judged(NamedTuple):
    """An adapter that can be served. seal: of the weights file as it lay in the folder."""

    manifest: AdapterManifest
    tensors: LoraTensors
    seal: Seal


def judge_folder(
    folder: Path, base: BaseSpec | None = None, limits: AdapterLimits | None = None
) -> Judged:
    """An adapter folder, judged in full.

    base: None = only what does not depend on the base model is checked. Raises AdapterError with
    every violation found.
    """
    limits = limits or AdapterLimits()
    findings = Findings()
    listing, unreadable = _listing(folder, findings)
    names = small_files(listing, limits, findings, str(folder), partial(adapters_near, folder))
    small = {name: (folder / name).read_bytes() for name in names if name not in unreadable}
    with ExitStack() as opened:
        index = read_index(small, listing, findings)
        weights = tensors = None
        if unreadable.isdisjoint(weight_files(listing)):
            weights = _open(opened, folder, listing, index, findings)
        if weights is not None:
            tensors = _header(weights, findings)
        base = base or infer_base(trained_for(small.get(CONFIG_FILE, b"")), tensors or ())
        targeting, text = check_small(small, base, limits, findings)
        adapter = None
        if weights is not None and tensors is not None:
            adapter = place_tensors(targeting, tensors, base, limits, findings)
            identity = weights.identity()
            digest = None
            if adapter is not None:
                _check_tokens(adapter, text, base, findings)
            if adapter is not None and adapter.head is not None and not findings:
                classes = read_classes(small.get(CLASSES_FILE), adapter.head, base, findings)
                text = text._replace(classes=classes)
            if adapter is not None and not findings:
                digest = ContentDigest(adapter.config, text)
            reading = _Reading(weights, tensors, adapter, base, digest, limits.room)
            fingerprint = reading.check_values(findings)
        findings.raise_if_any()
        if adapter is None or digest is None:
            raise AssertionError("files that cannot be read left no violation")
        _check_room(adapter, base, limits)
    manifest = _manifest(digest.hexdigest(), adapter, text, base)
    return Judged(manifest, adapter, Seal(identity, fingerprint))


def check_small(
    small: Mapping[str, bytes], base: BaseSpec, limits: AdapterLimits, findings: Findings
) -> tuple[Targeting | None, AdapterText]:
    """Checks targets and the files about text, before the weights come.

    small: name -> bytes of the files other than the weights.
    """
    data = small.get(CONFIG_FILE)
    config = None if data is None else parse_config(data, findings)
    targeting = None
    if config is not None:
        targeting = check_config(config, base, limits, findings)
    elif data is not None:
        check_base_name(trained_for(data), base, limits, findings)
    files = {name: small[name] for name in TOKENIZER_FILES if name in small}
    return targeting, read_tokenizer_files(files, base, findings)


def rejudge(folder: Path, base: BaseSpec, limits: AdapterLimits) -> LoraTensors:
    """Judges content again that was judged in full before: its tensors, under the limits of today.

    Raises AdapterError.
    """
    findings = Findings()
    text = (folder / CONFIG_FILE).read_bytes()
    config = parse_config(text, findings)
    with open_weights(folder / WEIGHTS_FILE) as weights:
        check_bytes(len(text) + weights.nbytes, limits)
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
        return DigestCheck(weights, adapter.config, manifest.text, known).holds()


def _listing(folder: Path, findings: Findings) -> tuple[dict[str, int], set[str]]:
    """Lists the relevant files with their bytes, and names those that must not be opened."""
    if not folder.is_dir():
        raise AdapterError("not_found", f"{folder} is not a folder")
    listing: dict[str, int] = {}
    unreadable: set[str] = set()
    for entry in sorted(entries_of(folder), key=lambda entry: entry.name):
        if not is_relevant(entry.name):
            continue
        # A pickle is never opened, whatever it is.
        size = 0 if is_unsafe(entry.name) else _regular_bytes(entry)
        listing[entry.name] = size or 0
        if size is None:
            unreadable.add(entry.name)
            findings.add("not_a_file", entry.name, f"{entry.name} is not a readable regular file")
    return listing, unreadable


def _regular_bytes(entry: os.DirEntry[str]) -> int | None:
    """The size of a regular file; None when it is something else, or nothing at all."""
    try:
        found = entry.stat()
    except OSError:
        return None
    return found.st_size if stat.S_ISREG(found.st_mode) else None


def _open(
    opened: ExitStack,
    folder: Path,
    listing: Mapping[str, int],
    index: Mapping[str, str] | None,
    findings: Findings,
) -> Weights | None:
    """The weights, in one file or several; None when there are none that can be read."""
    if WEIGHTS_FILE in listing:
        return opened.enter_context(open_weights(folder / WEIGHTS_FILE))
    if index is not None:
        with findings.gathered():
            return opened.enter_context(open_shards(folder, index, WEIGHTS_FILE))
    return None


def _header(weights: Weights, findings: Findings) -> tuple[TensorInfo, ...] | None:
    with findings.gathered():
        return weights.tensors()
    return None


class _Reading:
    """One pass over the weights file: each piece is checked and hashed while it is in a cache.

    adapter: None when the config cannot say what the tensors are. digest: None = the adapter is
    refused already. room: its dtype must hold all values.
    """

    def __init__(
        self,
        weights: Weights,
        tensors: Sequence[TensorInfo],
        adapter: LoraTensors | None,
        base: BaseSpec,
        digest: ContentDigest | None,
        room: SlabRoom | None,
    ) -> None:
        self._weights = weights
        self._tensors = tensors
        self._base = base
        self._digest = digest
        self._slab: SlabDtype = "float32" if room is None else room.dtype
        copies = adapter.base_copies if adapter and not base.is_inferred else ()
        self._copies = {tensor.name: module for module, tensor in copies}
        self._sealed = {tensor.name for tensor in (adapter.tensors if adapter else ())}
        self._fingerprint = Fingerprint()

    def check_values(self, findings: Findings) -> int:
        """Adds what is wrong with the values; the fingerprint of the LoRA tensors."""
        start = self._tensors[0].start if self._tensors else self._weights.nbytes
        if self._digest is not None:
            for piece in self._weights.pieces(0, start):
                self._digest.update(piece)
        for tensor in self._tensors:
            if tensor.name in self._copies:
                self._check_copy(tensor, findings)
            elif self._digest is not None or self._counts(tensor):
                self._check_numbers(tensor, findings)
        return self._fingerprint.value

    def _counts(self, tensor: TensorInfo) -> bool:
        """Whether a tensor's values matter."""
        is_sealed = tensor.name in self._sealed and tensor.dtype in FLOAT_DTYPES
        return is_sealed or may_be_lora(tensor)

    def _check_numbers(self, tensor: TensorInfo, findings: Findings) -> None:
        counts = self._counts(tensor)
        finite = fitting = True
        dtype: SlabDtype = "float32" if is_of_outputs(tensor) else self._slab
        for piece in self._weights.pieces(tensor.start, tensor.end):
            if self._digest is not None:
                self._digest.update(piece)
            if tensor.name in self._sealed:
                self._fingerprint.update(piece)
            if counts and not fits(piece, tensor.dtype, dtype):
                fitting, finite = False, finite and is_finite(piece, tensor.dtype)
        if not finite:
            message = f"{tensor.name} has values that are NaN, infinite, or too large for float32"
            findings.add("not_finite", tensor.name, message)
        elif not fitting:
            message = f"{tensor.name} has values too large for {self._slab}"
            findings.add("overflow", tensor.name, message)

    def _check_copy(self, tensor: TensorInfo, findings: Findings) -> None:
        values = FloatDigest()
        for piece in self._weights.pieces(tensor.start, tensor.end):
            if self._digest is not None:
                self._digest.update(piece)
            values.update(piece, tensor.dtype)
        if values.hexdigest() != self._base.embedding_digests.get(self._copies[tensor.name]):
            message = (
                f"{tensor.name}: differs from the base model's weights; save the adapter with "
                "save_embedding_layers=False"
            )
            findings.add("base_weights_changed", tensor.name, message)


def _check_room(adapter: LoraTensors, base: BaseSpec, limits: AdapterLimits) -> None:
    problem = None if limits.room is None else room_problem(adapter, base, limits.room)
    if problem is not None:
        raise AdapterError("too_large", problem)


def _changed(adapter: LoraTensors) -> set[str]:
    """Short names of the modules for which the adapter has weights."""
    changed: tuple[PlacedLora | OwnBias | OwnTable | OwnNorm, ...]
    changed = (*adapter.modules, *adapter.biases, *adapter.tables, *adapter.norms)
    head = () if adapter.head is None else (HEAD_OF_CLASSES,)
    return {each.module for each in changed}.union(head)


def _check_tokens(
    adapter: LoraTensors, text: AdapterText, base: BaseSpec, findings: Findings
) -> None:
    """Checks that added tokens have rows in the tables, and that ends are known ids."""
    size, added = adapter.table_size(base.vocab_size) or base.vocab_size, text.added_tokens
    if added and added[-1].id >= size:
        message = f"token {added[-1].id} is added, and the tables have {size} rows"
        findings.add("resized_embeddings", "tokenizer.json", message)
    most = max(size, base.vocab_size)
    if text.end_token_ids and text.end_token_ids[-1] >= most:
        message = f"eos_token_id: expected ids from 0 to {most - 1}, got {text.end_token_ids[-1]}"
        findings.add("bad_generation_config", GENERATION_FILE, message)


def _manifest(
    digest: str, adapter: LoraTensors, text: AdapterText, base: BaseSpec
) -> AdapterManifest:
    template = text.template
    tensors = adapter.tensors
    return AdapterManifest(
        digest=digest,
        base=adapter.config.base_model_name_or_path,
        targets=tuple(sorted(_changed(adapter))),
        ranks=tuple(sorted({module.lora_rank for module in adapter.modules})),
        nbytes=sum(tensor.nbytes for tensor in tensors),
        dtype="+".join(sorted({tensor.dtype for tensor in tensors})),
        chat_template=template.source if template else None,
        named_templates=(template.named or None) if template else None,
        special_tokens=template.special_tokens if template else None,
        coverage=adapter.coverage,
        end_token_ids=text.end_token_ids,
        invocation_tokens=adapter.config.alora_invocation_tokens,
        classes=text.classes,
        added_tokens=text.added_tokens,
        table_size=adapter.table_size(base.vocab_size),
        is_lora_alone=adapter.is_lora_alone,
    )
