"""`loraplex cache`: a second machine compiles nothing, and takes nothing that is not for it."""

import gzip
import io
import json
import os
import subprocess
import sys
import tarfile
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from loraplex.launcher.commands import cache
from loraplex.launcher.commands.cache import BuiltWith, BundleError, Manifest

ROOT = Path(__file__).parents[2]
# Compiles some kernels for a GPU that is not there, and says how many came from the cache.
COMPILES = """
import torch, triton
from tests.kernels.compile_all import compile_for
compile_for(90)
hits = []
triton.knobs.compilation.listener = lambda *, cache_hit, **_: hits.append(cache_hit)
from loraplex.server.kernels.pointwise.add_norm import rms_norm
from loraplex.server.kernels.launch.compile_ahead import compiled_together
x = torch.zeros(4, 256, dtype=torch.bfloat16)
with compiled_together():
    for early in (False, True):
        rms_norm(x, (x[0].clone(), 1e-5), programmatic_launch=early)
print(hits.count(False), hits.count(True))
"""
MADE = BuiltWith("sm_90", "x86_64", "3.11", "k", "2.11", "13.0", "3.6", None)


def python(folder: Path, *words: str) -> str:
    environ = {**os.environ, "TRITON_CACHE_DIR": str(folder), "TRITON_INTERPRET": "0"}
    command = [sys.executable, *words]
    done = subprocess.run(
        command, cwd=ROOT, env=environ, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip().splitlines()[-1]


@pytest.mark.exhaustive
def test_a_second_machine_compiles_nothing(tmp_path: Path) -> None:
    first, second, file = tmp_path / "first", tmp_path / "second", str(tmp_path / "kernels.tar.gz")
    compiled, hits = map(int, python(first, "-c", COMPILES).split())
    assert (compiled > 0, hits) == (True, 0)
    said = python(first, "-m", "loraplex", "cache", "export", file, "--gpu", "sm_90")
    assert python(second, "-m", "loraplex", "cache", "import", file, "--gpu", "sm_90") == said
    for path in first.rglob("*"):
        if path.is_file():
            path.unlink()  # nothing there is read by the second
    assert python(second, "-c", COMPILES) == f"0 {compiled}"


class Machine:
    """Caches in folders, and what bundles made here depend on."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.triton, self.modules, self.aot = folder / "triton", folder / "jit", folder / "aot"
        self.file = folder / "kernels.tar.gz"
        env = SimpleNamespace(FLASHINFER_JIT_DIR=self.modules, FLASHINFER_AOT_DIR=self.aot)
        monkeypatch.setattr(cache, "_triton_folder", lambda: self.triton)
        monkeypatch.setattr(cache, "_flashinfer", lambda: env)
        self.kernel("K90", 90)
        self.kernel("K80", 80)
        self.put(self.triton / "STUB" / "launcher.so", b"any GPU")
        self.put(self.triton / "STUB" / "lock", b"")
        self.put(self.triton / "WAYS" / "ways_of_products", b"{}")
        self.put(self.modules / "prefill" / "prefill.so", b"module")
        self.put(self.modules / "prefill" / "build.ninja", b"paths")
        self.put(self.modules / "tmp" / "a.lock", b"")

    def put(self, path: Path, data: bytes) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)

    def kernel(self, key: str, arch: int) -> None:
        facts = {"target": {"backend": "cuda", "arch": arch}}
        group = {"child_paths": {"f.cubin": str(self.triton / key / "f.cubin")}}
        self.put(self.triton / key / "f.json", json.dumps(facts).encode())
        self.put(self.triton / key / "f.cubin", bytes([arch]))
        self.put(self.triton / key / "__grp__f.json", json.dumps(group).encode())


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    return Machine(tmp_path, monkeypatch)


def test_what_a_bundle_has_and_where_it_goes(machine: Machine, tmp_path: Path) -> None:
    manifest = cache.write(machine.file, MADE)
    assert sorted(manifest.files) == [
        "flashinfer/prefill/prefill.so",
        "triton/K90/__grp__f.json",
        "triton/K90/f.cubin",
        "triton/K90/f.json",
        "triton/STUB/launcher.so",
        "triton/WAYS/ways_of_products",
    ]
    again = cache.write(tmp_path / "again", MADE)
    assert again == manifest
    assert (tmp_path / "again").read_bytes() == machine.file.read_bytes()
    machine.triton = tmp_path / "elsewhere"
    assert cache.use(machine.file, MADE) == manifest
    group = json.loads((machine.triton / "K90" / "__grp__f.json").read_bytes())
    assert group == {"child_paths": {"f.cubin": str(machine.triton / "K90" / "f.cubin")}}
    assert (machine.aot / "prefill" / "prefill.so").read_bytes() == b"module"
    assert not list(tmp_path.rglob("*.part"))


@pytest.mark.parametrize("field", BuiltWith.__struct_fields__)
def test_a_bundle_for_others_is_refused_by_name(machine: Machine, field: str) -> None:
    cache.write(machine.file, MADE)
    with pytest.raises(BundleError, match=f"{field} .* \\(here other\\)"):
        cache.use(machine.file, msgspec.structs.replace(MADE, **{field: "other"}))
    assert not machine.aot.exists()


def rewritten(file: Path, change: Callable[[dict[str, bytes]], Any]) -> None:
    """The same bundle with other contents."""
    with tarfile.open(file) as bundle:
        contents = {entry.name: bundle.extractfile(entry).read() for entry in bundle}  # type: ignore[union-attr]
    change(contents)
    with tarfile.open(file, "w:gz") as bundle:
        for name, data in contents.items():
            entry = tarfile.TarInfo(name)
            entry.size = len(data)
            bundle.addfile(entry, io.BytesIO(data))


def escape(contents: dict[str, bytes]) -> None:
    """A file outside, and a manifest that lists it."""
    contents["triton/../outside"] = b"x"
    manifest = msgspec.json.decode(contents["manifest.json"], type=Manifest)
    manifest.files["triton/../outside"] = "x"
    contents["manifest.json"] = msgspec.json.encode(manifest)


BAD: dict[str, Callable[[dict[str, bytes]], Any]] = {
    "other bytes": lambda contents: contents.update({"triton/K90/f.cubin": b"other"}),
    "a file less": lambda contents: contents.pop("triton/K90/f.cubin"),
    "a file more": lambda contents: contents.update({"triton/K90/g.cubin": b"more"}),
    "outside": escape,
    "no manifest": lambda contents: contents.pop("manifest.json"),
    "another manifest": lambda contents: contents.update({"manifest.json": b"{}"}),
}


@pytest.mark.parametrize("bad", BAD)
def test_a_damaged_bundle_is_refused(machine: Machine, bad: str) -> None:
    cache.write(machine.file, MADE)
    rewritten(machine.file, BAD[bad])
    with pytest.raises(BundleError):
        cache.use(machine.file, MADE)
    assert not machine.aot.exists()


@pytest.mark.parametrize("content", [b"", b"text", gzip.compress(b"text", mtime=0), None])
def test_what_is_no_bundle(machine: Machine, content: bytes | None) -> None:
    cache.write(machine.file, MADE)
    whole = machine.file.read_bytes()
    machine.file.write_bytes(whole[: len(whole) // 2] if content is None else content)
    with pytest.raises(BundleError):
        cache.use(machine.file, MADE)


def test_a_machine_without_kernels_or_gpus(machine: Machine) -> None:
    with pytest.raises(BundleError, match="expected a name such as sm_90"):
        cache._made("h100")
    machine.triton, machine.modules = machine.triton / "none", machine.modules
    (machine.modules / "prefill" / "prefill.so").unlink()
    with pytest.raises(BundleError, match="start a worker once"):
        cache.write(machine.file, MADE)
