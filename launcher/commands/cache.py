"""`loraplex cache export|import`: compiled kernels as a file, so that a new machine compiles none.

A bundle is a tar file: first what it was made with and of (`Manifest`), then Triton's cache of one
architecture with the timed ways of products, and FlashInfer's compiled modules.
"""

import argparse
import gzip
import hashlib
import importlib.util
import io
import json
import os
import platform
import re
import sys
import tarfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec

from loraplex.adapters.common.extras import installed
from loraplex.adapters.errors import CommandError
from loraplex.server.kernels.launch.sources import sources_digest
from loraplex.server.worker.process.device import cuda_devices, torch_build

ABOUT = """\
Kernels are compiled at a worker's first start, which takes most of a minute. A bundle has what one
machine compiled, for others with the same GPUs and the same versions.

  loraplex cache export kernels.tar.gz     where a worker has started
  loraplex cache import kernels.tar.gz     before a worker starts, or in an image's build

A bundle is code that runs in the worker: import your own alone.
"""
_MANIFEST = "manifest.json"
_MOST_MANIFEST = 64 << 20
# Of Triton's cache `triton/KEY/FILE`, of FlashInfer `flashinfer/NAME/NAME.so`.
_NAME = re.compile(r"(triton|flashinfer)(/[A-Za-z0-9_][A-Za-z0-9_.-]*){2}")
_GROUP = "__grp__"


class BuiltWith(msgspec.Struct, frozen=True):
    """Facts that compiled kernels depend on. kernels: digest of the project's own sources. gpu:
    such as sm_90. None = not installed."""

    gpu: str
    machine: str
    python: str
    kernels: str
    torch: str | None
    cuda: str | None
    triton: str | None
    flashinfer: str | None


class Manifest(msgspec.Struct, frozen=True):
    """files: SHA-256 of each, by name. digest: of all of them with their names."""

    made: BuiltWith
    files: dict[str, str]
    digest: str


class BundleError(CommandError):
    """The bundle cannot be made or used; str() says why."""


def add_commands(actions: "argparse._SubParsersAction[Any]") -> None:
    for name, text in (("export", "write a bundle"), ("import", "use a bundle")):
        parser = actions.add_parser(name, help=f"{text} of compiled kernels", description=ABOUT)
        parser.add_argument("file", metavar="FILE", help="such as kernels.tar.gz")
        parser.add_argument(
            "--gpu", metavar="SM", help="such as sm_90, where no GPU shows [this machine's]"
        )
        parser.set_defaults(action=name)


def run(arguments: argparse.Namespace) -> int:
    """Carry out a command. Returns the exit code. Raises BundleError."""
    made = _made(arguments.gpu or _gpu())
    act = write if arguments.action == "export" else use
    try:
        found = act(Path(arguments.file), made)
    except OSError as error:
        raise BundleError(f"{arguments.file}: {error}") from error
    kinds = [name.partition("/")[0] for name in found.files]
    counts = (kinds.count("triton"), kinds.count("flashinfer"))
    what = "{} files of Triton, {} modules of FlashInfer".format(*counts)
    sys.stdout.write(f"{arguments.file}: {what}, for {made.gpu}; digest {found.digest[:16]}\n")
    return 0


def write(file: Path, made: BuiltWith) -> Manifest:
    """Write what this machine has compiled for a GPU. Raises BundleError, OSError."""
    contents = {**dict(_of_triton(made.gpu)), **dict(_of_flashinfer())}
    if not contents:
        raise BundleError(f"no kernels have been compiled for {made.gpu} here: start a worker once")
    files = _hashes(contents)
    manifest = Manifest(made, files, _digest(files))
    unfinished = file.with_name(f"{file.name}.part")
    with (
        unfinished.open("wb") as target,
        gzip.GzipFile("", fileobj=target, mode="wb", compresslevel=1, mtime=0) as packed,
        tarfile.open(fileobj=packed, mode="w", format=tarfile.PAX_FORMAT) as bundle,
    ):
        for name, data in ((_MANIFEST, msgspec.json.encode(manifest)), *sorted(contents.items())):
            entry = tarfile.TarInfo(name)
            entry.size = len(data)
            bundle.addfile(entry, io.BytesIO(data))
    unfinished.replace(file)
    return manifest


def use(file: Path, made: BuiltWith) -> Manifest:
    """Put a bundle's kernels where Triton and FlashInfer look for them. Nothing is put there before
    all of it is checked. Raises BundleError, OSError."""
    manifest, contents = read(file)
    check(manifest.made, made)
    places = {"triton": _triton_folder()}
    if any(name.startswith("flashinfer/") for name in contents):
        places["flashinfer"] = Path(_flashinfer().FLASHINFER_AOT_DIR)
    # What names the files of a kernel comes behind them: until then the kernel is not there.
    for name in sorted(contents, key=lambda name: _GROUP in name):
        kind, key, leaf = _parts(name)
        folder, data = places[kind] / key, contents[name]
        if leaf.startswith(_GROUP):
            data = _with_paths(data, folder)
        folder.mkdir(parents=True, exist_ok=True)
        unfinished = folder / f"{leaf}.part"
        unfinished.write_bytes(data)
        unfinished.replace(folder / leaf)
    return manifest


def read(file: Path) -> tuple[Manifest, dict[str, bytes]]:
    """Read a whole bundle. Raises BundleError, OSError."""
    contents: dict[str, bytes] = {}
    manifest: Manifest | None = None
    try:
        with tarfile.open(file, mode="r:gz") as bundle:
            for entry in bundle:
                source = bundle.extractfile(entry) if entry.isfile() else None
                if source is None:
                    raise BundleError(f"{file}: {entry.name} is no file")
                if manifest is None:
                    found = source.read(_MOST_MANIFEST) if entry.name == _MANIFEST else b""
                    manifest = msgspec.json.decode(found, type=Manifest)
                    continue
                if entry.name not in manifest.files or not _NAME.fullmatch(entry.name):
                    raise BundleError(f"{file}: {entry.name} does not belong to a bundle")
                contents[entry.name] = source.read()
    except (tarfile.TarError, EOFError, gzip.BadGzipFile, msgspec.MsgspecError) as error:
        raise BundleError(f"{file}: no bundle, or a part of one ({error})") from error
    files = _hashes(contents)
    if manifest is None or files != manifest.files or _digest(files) != manifest.digest:
        raise BundleError(f"{file}: the bundle is damaged: it has other bytes than it says")
    return manifest, contents


def check(bundle: BuiltWith, here: BuiltWith) -> None:
    """Check that kernels of a bundle fit this machine. Raises BundleError with all that differs."""
    differing = [
        f"{name} {getattr(bundle, name)} (here {getattr(here, name)})"
        for name in BuiltWith.__struct_fields__
        if getattr(bundle, name) != getattr(here, name)
    ]
    if differing:
        raise BundleError(f"the bundle is for other machines: {', '.join(differing)}")


def _gpu() -> str:
    found = {device.capability for device in cuda_devices()}
    if len(found) != 1:
        several = f"shows GPUs of {len(found)} kinds" if found else "shows no GPU"
        raise BundleError(f"this machine {several}: say --gpu sm_90, or what it is")
    ((major, minor),) = found
    return f"sm_{major}{minor}"


def _made(gpu: str) -> BuiltWith:
    if not re.fullmatch(r"sm_[0-9]{2,3}", gpu):
        raise BundleError(f"--gpu: expected a name such as sm_90, got {gpu!r}")
    build = torch_build()
    return BuiltWith(
        gpu=gpu,
        machine=platform.machine(),
        python=f"{sys.version_info.major}.{sys.version_info.minor}",
        kernels=sources_digest(),
        torch=build.version if build else None,
        cuda=build.cuda if build else None,
        triton=installed("triton"),
        flashinfer=installed("flashinfer-python"),
    )


def _hashes(contents: Mapping[str, bytes]) -> dict[str, str]:
    """SHA-256 of each file, in order of names."""
    return {name: hashlib.sha256(data).hexdigest() for name, data in sorted(contents.items())}


def _digest(files: dict[str, str]) -> str:
    lines = "".join(f"{name} {digest}\n" for name, digest in sorted(files.items()))
    return hashlib.sha256(lines.encode()).hexdigest()


def _parts(name: str) -> tuple[str, str, str]:
    kind, key, leaf = name.split("/")
    return kind, key, leaf


def _triton_folder() -> Path:
    from triton import knobs

    return Path(knobs.cache.dir)


def _of_triton(gpu: str) -> Iterator[tuple[str, bytes]]:
    """Triton's compiled kernels for a GPU, and what it has compiled to launch any."""
    for folder in sorted(_triton_folder().glob("*/")):
        files = [path for path in sorted(folder.iterdir()) if path.is_file()]
        if not _is_for_others(files, gpu):
            for path in files:
                name = f"triton/{folder.name}/{path.name}"
                if _NAME.fullmatch(name) and path.name != "lock":
                    yield name, _without_paths(path)


def _is_for_others(files: list[Path], gpu: str) -> bool:
    """Whether a kernel's files say that they are for other GPUs."""
    for path in files:
        if path.suffix == ".json" and not path.name.startswith(_GROUP):
            target = json.loads(path.read_bytes()).get("target") or {}
            return target.get("backend") != "cuda" or f"sm_{target.get('arch')}" != gpu
    return False


def _without_paths(path: Path) -> bytes:
    """The content of a file of Triton's cache; where it names files of its folder, these alone."""
    data = path.read_bytes()
    if not path.name.startswith(_GROUP):
        return data
    children = json.loads(data)["child_paths"]
    return json.dumps({"child_paths": dict.fromkeys(sorted(children), "")}).encode()


def _with_paths(data: bytes, folder: Path) -> bytes:
    """The same with the files' places here."""
    children = json.loads(data)["child_paths"]
    paths = {leaf: str(folder / os.path.basename(leaf)) for leaf in children}
    return json.dumps({"child_paths": paths}).encode()


def _flashinfer() -> Any:
    """FlashInfer's folders; None = it is not installed."""
    if importlib.util.find_spec("flashinfer") is None:
        return None
    from flashinfer.jit import env

    return env


def _of_flashinfer() -> Iterator[tuple[str, bytes]]:
    """FlashInfer's modules that were compiled here. Where they are put by `use` it takes them
    as they are, without a compiler."""
    env = _flashinfer()
    for folder in sorted(Path(env.FLASHINFER_JIT_DIR).glob("*/")) if env else ():
        path = folder / f"{folder.name}.so"
        if path.is_file():
            yield f"flashinfer/{folder.name}/{path.name}", path.read_bytes()
