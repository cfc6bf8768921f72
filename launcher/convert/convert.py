"""One folder to an adapter that can be served: read, planned, written, compared, judged."""

import json
import os
import shutil
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from loraplex.adapters.base import BaseSpec
from loraplex.adapters.common.disk import sync_files, sync_path
from loraplex.adapters.common.strict_json import StrictJsonError, decode_object
from loraplex.adapters.errors import AdapterError
from loraplex.adapters.judge import Judged, judge_folder
from loraplex.adapters.peft.config import CONFIG_FILE, MAX_CONFIG_BYTES
from loraplex.adapters.peft.files import SIDE_FILES, is_unsafe
from loraplex.adapters.peft.validate import WEIGHTS_FILE, AdapterLimits
from loraplex.adapters.safetensors.file import WeightsFile, open_weights
from loraplex.adapters.safetensors.floats import Raw
from loraplex.adapters.safetensors.header import DTYPE_BYTES, TensorInfo
from loraplex.launcher.convert.formats import (
    ADAPTER_FILES,
    Listing,
    MlxOptions,
    beside,
    check_factors,
    check_kind,
    choose_weights,
    form_of,
    is_mlx_config,
    plan_mlx,
    refuse_ready,
)
from loraplex.launcher.convert.methods import MethodOptions, convert_method, is_other_method
from loraplex.launcher.convert.pickles import PickleLimits, read_pickle
from loraplex.launcher.convert.plan import Conversion, ConversionPlan, Move, WrittenAdapter, refusal

_RAW_FILE = "raw.safetensors"
_RESULT = "adapter"
_OTHER_FILES = ("generation_config.json", "special_tokens_map.json")
_MAX_COPIED_BYTES = max(SIDE_FILES.values())


class ConversionOptions(msgspec.Struct, frozen=True):
    """Options of all formats. weights: the file to take, where a folder has several."""

    weights: str | None = None
    mlx: MlxOptions = MlxOptions()
    method: MethodOptions = MethodOptions()
    pickles: PickleLimits = PickleLimits()


def convert_folder(
    source: Path,
    out: Path,
    base: BaseSpec | None,
    limits: AdapterLimits,
    options: ConversionOptions,
) -> tuple[Judged, Conversion]:
    """Make `out` of `source`, whole or not at all, and say what was done.

    out: not there, or an empty folder. base: None = what depends on the base is not checked. Raises
    AdapterError, OSError.
    """
    listing = _listing(source)
    weights = choose_weights(listing, options.weights)
    text, config = _config(source) if CONFIG_FILE in listing.files else (b"", {})
    with _workplace(out) as folder:
        result = folder / _RESULT
        result.mkdir()
        file = _readable(source / weights, folder, options.pickles)
        if is_other_method(config):
            _refuse_mlx_options(options.mlx)
            written = convert_method(config, file, options.method, result)
        else:
            written = _rewritten(config, text, file, result, weights, base, options)
        copied = _copy_tokenizer(source, result, listing)
        judged = judge_folder(result, base, _limits(limits, options.method))
        publish(result, out)
    others = beside(listing, weights)
    notes = written.notes if others is None else (*written.notes, others)
    conversion = Conversion(
        source=str(source),
        out=str(out),
        form=written.form,
        weights=weights,
        tensors=written.tensors,
        scales=tuple(sorted({module.scale for module in judged.tensors.modules})),
        copied=copied,
        notes=notes,
        fit=written.fit,
    )
    return judged, conversion


def _limits(limits: AdapterLimits, method: MethodOptions) -> AdapterLimits:
    """A rank that the user names may be more than workers serve by default."""
    most = max(limits.max_lora_rank, method.max_rank)
    return msgspec.structs.replace(limits, max_lora_rank=most)


def _listing(folder: Path) -> Listing:
    if not folder.is_dir():
        what = "is a file; name its folder" if folder.exists() else "is no folder of this machine"
        raise AdapterError("not_found", f"{folder} {what}")
    with os.scandir(folder) as entries:
        found = [(entry.name, entry.is_file(), entry.is_dir()) for entry in entries]
    folders = [name for name, _, is_folder in found if is_folder and _holds_adapter(folder / name)]
    files = [name for name, is_file, _ in found if is_file]
    return Listing(files, folders, str(folder))


def _holds_adapter(folder: Path) -> bool:
    return any((folder / name).is_file() for name in (CONFIG_FILE, *ADAPTER_FILES))


def _config(folder: Path) -> tuple[bytes, dict[str, Any]]:
    """`adapter_config.json`, as it is and as an object."""
    with (folder / CONFIG_FILE).open("rb") as file:
        text = file.read(MAX_CONFIG_BYTES + 1)
    if len(text) > MAX_CONFIG_BYTES:
        raise refusal(f"{CONFIG_FILE} has more than {MAX_CONFIG_BYTES} bytes")
    try:
        config = decode_object(text)
    except StrictJsonError as error:
        raise refusal(f"{CONFIG_FILE} is {error}") from None
    if is_mlx_config(config):
        check_kind(config)
    return text, config


def _readable(source: Path, folder: Path, limits: PickleLimits) -> Path:
    """A safetensors file: the source, or what was read from it if it is a pickle."""
    if not is_unsafe(source.name):
        return source
    raw = folder / _RAW_FILE
    read_pickle(source, raw, limits)
    return raw


def _rewritten(
    config: Mapping[str, Any],
    text: bytes,
    file: Path,
    result: Path,
    weights: str,
    base: BaseSpec | None,
    options: ConversionOptions,
) -> WrittenAdapter:
    """LoRA of mlx-lm or PEFT, with the same values. text: of `config`. weights: the file's name."""
    with open_weights(file) as opened:
        plan = _plan(config, text, weights, opened.tensors(), base, options)
        _write_result(plan, opened, result)
    return WrittenAdapter(plan.form, len(plan.moves), plan.notes)


def _plan(
    config: Mapping[str, Any],
    text: bytes,
    weights: str,
    tensors: Sequence[TensorInfo],
    base: BaseSpec | None,
    options: ConversionOptions,
) -> ConversionPlan:
    form = form_of([tensor.name for tensor in tensors])
    if not text:
        raise refusal(f"there is no {CONFIG_FILE}, which says how the tensors are used")
    refuse_ready(weights, form, config)
    if options.method.is_asked_for:
        raise refusal("--rank, --max-error and --initial are for other methods of PEFT than LoRA")
    if form == "mlx-lm":
        notes = check_factors(config, tensors, base)
        plan = plan_mlx(config, tensors, options.mlx)
        return msgspec.structs.replace(plan, notes=plan.notes + notes)
    _refuse_mlx_options(options.mlx)
    return ConversionPlan(form, text, tuple(Move(tensor.name, tensor) for tensor in tensors))


def _refuse_mlx_options(options: MlxOptions) -> None:
    if options.scale is not None or options.base_name is not None:
        raise refusal("--scale and --base-name are for mlx-lm's format; this is PEFT's")


def _copy_tokenizer(source: Path, target: Path, listing: Listing) -> tuple[str, ...]:
    """Copy the other files that serving reads; returns their names."""
    names = sorted({*SIDE_FILES, *_OTHER_FILES} & set(listing.files))
    for name in names:
        with (source / name).open("rb") as file:
            data = file.read(_MAX_COPIED_BYTES + 1)
        if len(data) > _MAX_COPIED_BYTES:
            raise refusal(f"{name} has more than {_MAX_COPIED_BYTES} bytes")
        (target / name).write_bytes(data)
    return tuple(names)


@contextmanager
def _workplace(out: Path) -> Iterator[Path]:
    """A hidden folder beside `out`, which is gone afterwards, whatever happens."""
    folder = Path(tempfile.mkdtemp(prefix=f".{out.name}.", dir=out.parent))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _write_result(plan: ConversionPlan, weights: WeightsFile, folder: Path) -> None:
    """The config and the weights, compared with the source value by value. Raises AdapterError."""
    (folder / CONFIG_FILE).write_bytes(plan.config)
    target = folder / WEIGHTS_FILE
    with target.open("xb") as out:
        header = _header(plan.moves)
        out.write(len(header).to_bytes(8, "little") + header)
        for move in plan.moves:
            for piece in _pieces(weights, move):
                out.write(piece)
    _compare(plan.moves, weights, target)


def publish(folder: Path, out: Path) -> None:
    """Rename the finished folder to `out`, which is not there or empty. Raises OSError."""
    sync_files(folder)
    sync_path(folder)
    folder.rename(out)
    sync_path(out.parent)


def _header(moves: Iterable[Move]) -> bytes:
    entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
    position = 0
    for move in moves:
        end = position + move.source.nbytes
        entries[move.name] = {
            "dtype": move.source.dtype,
            "shape": move.shape,
            "data_offsets": (position, end),
        }
        position = end
    text = json.dumps(entries).encode()
    return text + b" " * (-len(text) % 8)


def _pieces(weights: WeightsFile, move: Move) -> Iterator[memoryview]:
    """The bytes of one new tensor."""
    if not move.is_transposed:
        for piece in weights.pieces(move.source.start, move.source.end):
            yield piece.data
        return
    rows, columns = move.source.shape
    values = weights.read(move.source).reshape(rows, columns, -1)
    yield np.ascontiguousarray(values.transpose(1, 0, 2)).data.cast("B")


def _compare(moves: Iterable[Move], weights: WeightsFile, target: Path) -> None:
    """Compare each value of the file, bit by bit, with its source. Raises AdapterError."""
    with open_weights(target) as written:
        found = {tensor.name: tensor for tensor in written.tensors()}
        for move in moves:
            new, old = found.pop(move.name), move.source
            same = new.shape == move.shape and new.dtype == old.dtype
            if same and move.is_transposed:
                a, b = (
                    _bits(file.read(t), t.dtype) for file, t in ((written, new), (weights, old))
                )
                same = np.array_equal(a.reshape(new.shape).T, b.reshape(old.shape))
            elif same:
                pairs = zip(
                    written.pieces(new.start, new.end),
                    weights.pieces(old.start, old.end),
                    strict=True,
                )
                same = all(np.array_equal(a, b) for a, b in pairs)
            if not same:
                raise AdapterError("unavailable", f"{move.name} was not written as it was read")


def _bits(raw: Raw, dtype: str) -> np.ndarray[tuple[int, ...], np.dtype[np.unsignedinteger]]:
    return raw.view(f"u{DTYPE_BYTES[dtype]}")
