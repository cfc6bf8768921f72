"""Judges the files of one adapter together: its manifest and tensors, or every reason why not. A
folder that is none is searched for checkpoints of a run, inside or next to it."""

import hashlib
import os
import stat
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from functools import partial
from itertools import chain, islice
from pathlib import Path
from typing import NamedTuple

import msgspec

from loraplex.adapters.base import BaseSpec
from loraplex.adapters.classes import HEAD_OF_CLASSES
from loraplex.adapters.common.disk import entries_of
from loraplex.adapters.common.recent import Recent
from loraplex.adapters.content_check import (
    Kind,
    Leaf,
    LeafFound,
    LeafPart,
    Run,
    Seal,
    content_digest,
    fingerprint_in,
    leaves_of,
    read_leaves,
    seal_of,
)
from loraplex.adapters.errors import AdapterError, Findings
from loraplex.adapters.manifest import DIGEST_FORM, AdapterManifest, AdapterText, SlabDtype
from loraplex.adapters.peft.config import CONFIG_FILE, parse_config, trained_for
from loraplex.adapters.peft.files import (
    CLASSES_FILE,
    GENERATION_FILE,
    TOKENIZER_FILES,
    check_bytes,
    is_checkpoint,
    is_relevant,
    is_unsafe,
    read_classes,
    read_index,
    read_tokenizer_files,
    small_files,
    weight_files,
)
from loraplex.adapters.peft.inferred_base import infer_base
from loraplex.adapters.peft.lora_tensors import LoraTensors, OwnBias, OwnNorm, OwnTable, PlacedLora
from loraplex.adapters.peft.targeting import Targeting
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
from loraplex.adapters.safetensors.floats import FloatDigest, Raw, fits, is_finite
from loraplex.adapters.safetensors.header import FLOAT_DTYPES, TensorInfo
from loraplex.adapters.slab.layout import room_problem

MAX_ENTRIES = 10_000


def adapters_near(folder: Path, *, may_look_beside: bool = True) -> list[str]:
    """Names adapters in a folder, else checkpoints next to it as `../checkpoint-…`. Links are not
    followed. Folders that cannot be read hold none."""
    found = _adapters_in(folder, lambda name: True)
    if found or not may_look_beside:
        return found
    return [f"../{name}" for name in _adapters_in(folder.parent, is_checkpoint)]


def _adapters_in(folder: Path, counts: Callable[[str], bool]) -> list[str]:
    try:
        with os.scandir(folder) as entries:
            folders = [
                entry.name
                for entry in islice(entries, MAX_ENTRIES)
                if counts(entry.name) and entry.is_dir(follow_symlinks=False)
            ]
    except OSError:
        return []
    return [name for name in folders if _is_adapter(folder / name)]


def _is_adapter(folder: Path) -> bool:
    try:
        with os.scandir(folder) as entries:
            files = {entry.name for entry in islice(entries, MAX_ENTRIES) if entry.is_file()}
    except OSError:
        return False
    return CONFIG_FILE in files and bool(weight_files(files))


class Judged(NamedTuple):
    """An adapter that can be served. seal: of the weights file as it lay in the folder. shape:
    adapters with the same one have the same tensors at the same places; b"" = it is not known.
    """

    manifest: AdapterManifest
    tensors: LoraTensors
    seal: Seal
    shape: bytes


class KnownTensors(NamedTuple):
    """Tensors of adapters with one shape, and how they are read. facts: see `_facts`."""

    tensors: tuple[TensorInfo, ...]
    adapter: LoraTensors
    leaves: tuple[Leaf, ...]
    facts: AdapterManifest


# Placed tensors by the shape of adapters, for one base and one set of limits.
KnownShapes = Recent[bytes, KnownTensors]


def judge_folder(
    folder: Path,
    base: BaseSpec | None = None,
    limits: AdapterLimits | None = None,
    run: Run = map,
    known: KnownShapes | None = None,
    hashed: Sequence[bytes] | None = None,
) -> Judged:
    """An adapter folder, judged in full.

    base: None = only what does not depend on the base model is checked. run: `map`, or that of an
    executor, whose threads then share the work. known: shapes that were judged before. hashed: the
    digests of the weights file's leaves, where the caller has made them of what it wrote. Raises
    AdapterError with every violation found.
    """
    limits = limits or AdapterLimits()
    known = Recent(1) if known is None else known
    findings = Findings()
    listing, unreadable = _listing(folder, findings)
    names = small_files(listing, limits, findings, str(folder), partial(adapters_near, folder))
    small = {name: (folder / name).read_bytes() for name in names if name not in unreadable}
    with ExitStack() as opened:
        index = read_index(small, listing, findings)
        weights = tensors = adapter = None
        if unreadable.isdisjoint(weight_files(listing)):
            weights = _open(opened, folder, listing, index, findings)
        shape = _shape(weights, small)
        placed = known.get(shape)
        leaves: tuple[Leaf, ...] | None = None
        if placed is not None:
            tensors, adapter, leaves, _ = placed
        elif weights is not None:
            tensors = _header(weights, findings)
        base = base or infer_base(trained_for(small.get(CONFIG_FILE, b"")), tensors or ())
        targeting, text = check_small(small, base, limits, findings, is_known=placed is not None)
        found: list[LeafFound] = []
        if weights is not None and tensors is not None:
            if adapter is None:
                adapter = place_tensors(targeting, tensors, base, limits, findings)
            identity = weights.identity()
            if adapter is not None:
                text = _whole_text(adapter, text, small.get(CLASSES_FILE), base, findings)
            reading = _Reading(weights, adapter, base, limits.room)
            leaves = leaves or reading.plan(tensors)
            wanted = hashed is None and not findings
            found = read_leaves(weights, leaves, run, _unfit, with_digests=wanted)
            reading.add_findings(tensors, found, findings)
        findings.raise_if_any()
        if adapter is None or weights is None or tensors is None or leaves is None:
            raise AssertionError("files that cannot be read left no violation")
        if placed is None:
            _check_room(adapter, base, limits)
        digests = hashed or [leaf.digest for leaf in found]
        digest = content_digest(adapter.config, text, weights.nbytes, digests)
    if placed is None:
        placed = KnownTensors(tensors, adapter, leaves, _facts(adapter, base))
    known.put(shape, placed)
    manifest = _manifest(placed.facts, digest, text)
    return Judged(manifest, adapter, Seal(identity, fingerprint_in(found)), shape)


def check_small(
    small: Mapping[str, bytes],
    base: BaseSpec,
    limits: AdapterLimits,
    findings: Findings,
    *,
    is_known: bool = False,
) -> tuple[Targeting | None, AdapterText]:
    """Checks targets and the files about text, before the weights come.

    small: name -> bytes of the files other than the weights. is_known: the config need not be
    checked again.
    """
    data = None if is_known else small.get(CONFIG_FILE)
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
    Raises AdapterError."""
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


def seal_stored(
    weights: Weights, adapter: LoraTensors, manifest: AdapterManifest, run: Run = map
) -> Seal | None:
    """The seal of weights that were judged before; None: their digest is another now."""
    identity = weights.identity()
    in_order = sorted(adapter.tensors, key=lambda tensor: tensor.start)
    if any(tensor.end > weights.nbytes for tensor in in_order[-1:]):
        return None
    fingerprint, leaves = seal_of(weights, in_order, run)
    digest = content_digest(adapter.config, manifest.text, weights.nbytes, leaves)
    is_intact = digest == (manifest.content_digest or manifest.digest)
    return Seal(identity, fingerprint) if is_intact else None


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


def _shape(weights: Weights | None, small: Mapping[str, bytes]) -> bytes:
    """sha256 over the config and the header of the weights; b"" where one of them is not there."""
    with suppress(AdapterError):
        if weights is not None and CONFIG_FILE in small:
            parts = (small[CONFIG_FILE], weights.header(), str(weights.nbytes).encode())
            digests = [hashlib.sha256(part).digest() for part in parts]
            return hashlib.sha256(b"".join(digests)).digest()
    return b""


def _header(weights: Weights, findings: Findings) -> tuple[TensorInfo, ...] | None:
    with findings.gathered():
        return weights.tensors()
    return None


class _Reading:
    """Tells what is read of a weights file, and checks the values as they are read.

    adapter: None when the config cannot say what the tensors are. room: its dtype must hold all
    values.
    """

    def __init__(
        self, weights: Weights, adapter: LoraTensors | None, base: BaseSpec, room: SlabRoom | None
    ) -> None:
        self._weights = weights
        self._base = base
        self._slab: SlabDtype = "float32" if room is None else room.dtype
        copies = adapter.base_copies if adapter and not base.is_inferred else ()
        self._copies = {tensor.name: module for module, tensor in copies}
        self._sealed = {tensor.name for tensor in (adapter.tensors if adapter else ())}

    def plan(self, tensors: Sequence[TensorInfo]) -> tuple[Leaf, ...]:
        """The leaves, with the tensors whose values matter."""
        kinds = ((tensor, self._kind(tensor)) for tensor in tensors)
        counting = ((tensor, kind) for tensor, kind in kinds if kind is not None)
        return leaves_of(self._weights.nbytes, counting)

    def _kind(self, tensor: TensorInfo) -> Kind | None:
        is_sealed, is_float = tensor.name in self._sealed, tensor.dtype in FLOAT_DTYPES
        if tensor.name in self._copies or not (is_sealed or (is_float and may_be_lora(tensor))):
            return None
        slab: SlabDtype = "float32" if is_of_outputs(tensor) else self._slab
        return Kind(tensor.dtype, slab if is_float else None, is_sealed)

    def add_findings(
        self, tensors: Sequence[TensorInfo], leaves: Sequence[LeafFound], findings: Findings
    ) -> None:
        """Adds what is wrong with the values."""
        bad: dict[str, bool] = {}
        for name, finite in chain.from_iterable(leaf.bad for leaf in leaves):
            bad[name] = finite and bad.get(name, True)
        if not bad and not self._copies:
            return
        for tensor in tensors:
            if tensor.name in self._copies:
                self._check_copy(tensor, findings)
            elif tensor.name in bad:
                self._add(tensor, findings, finite=bad[tensor.name])

    def _add(self, tensor: TensorInfo, findings: Findings, *, finite: bool) -> None:
        if not finite:
            message = f"{tensor.name} has values that are NaN, infinite, or too large for float32"
            findings.add("not_finite", tensor.name, message)
        else:
            message = f"{tensor.name} has values too large for {self._slab}"
            findings.add("overflow", tensor.name, message)

    def _check_copy(self, tensor: TensorInfo, findings: Findings) -> None:
        values = FloatDigest()
        for piece in self._weights.pieces(tensor.start, tensor.end):
            values.update(piece, tensor.dtype)
        if values.hexdigest() != self._base.embedding_digests.get(self._copies[tensor.name]):
            message = (
                f"{tensor.name}: differs from the base model's weights; save the adapter with "
                "save_embedding_layers=False"
            )
            findings.add("base_weights_changed", tensor.name, message)


def _unfit(part: LeafPart, position: int, piece: Raw) -> Iterator[tuple[str, bool]]:
    """Yields tensors with values that do not fit, and whether those are finite."""
    dtype, slab, _ = part.kind
    if slab is None or fits(piece, dtype, slab):
        return
    for tensor in part.tensors:
        begin, end = max(0, tensor.start - position), tensor.end - position
        own = piece[begin:end]
        if not fits(own, dtype, slab):
            yield tensor.name, is_finite(own, dtype)


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


def _whole_text(
    adapter: LoraTensors,
    text: AdapterText,
    classes_file: bytes | None,
    base: BaseSpec,
    findings: Findings,
) -> AdapterText:
    """The text with the classes of a score head. Checks what the text says against the tables."""
    _check_tokens(adapter, text, base, findings)
    if adapter.head is None or findings:
        return text
    return text._replace(classes=read_classes(classes_file, adapter.head, base, findings))


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


def _facts(adapter: LoraTensors, base: BaseSpec) -> AdapterManifest:
    """The manifest without a digest and without what the files about text say."""
    tensors = adapter.tensors
    return AdapterManifest(
        digest="",
        base=adapter.config.base_model_name_or_path,
        targets=tuple(sorted(_changed(adapter))),
        ranks=tuple(sorted({module.lora_rank for module in adapter.modules})),
        nbytes=sum(tensor.nbytes for tensor in tensors),
        dtype="+".join(sorted({tensor.dtype for tensor in tensors})),
        coverage=adapter.coverage,
        invocation_tokens=adapter.config.alora_invocation_tokens,
        table_size=adapter.table_size(base.vocab_size),
        is_lora_alone=adapter.is_lora_alone,
        form=DIGEST_FORM,
    )


def _manifest(facts: AdapterManifest, digest: str, text: AdapterText) -> AdapterManifest:
    template = text.template
    return msgspec.structs.replace(
        facts,
        digest=digest,
        chat_template=template.source if template else None,
        named_templates=(template.named or None) if template else None,
        special_tokens=template.special_tokens if template else None,
        end_token_ids=text.end_token_ids,
        classes=text.classes,
        added_tokens=text.added_tokens,
    )
