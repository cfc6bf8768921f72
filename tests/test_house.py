"""Rules of the house that no linter holds."""

import ast
import functools
import re
import subprocess
import sys
import tomllib
from collections.abc import Collection, Iterator
from graphlib import TopologicalSorter
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parents[1]
PACKAGES = ("adapters", "router", "server", "launcher", "deploy", "tools")
MAX_FILE_LINES = 600
MAX_KERNEL_FILE_LINES = 900  # a kernel stands in one file with its launcher
MAX_FUNCTION_LINES = 60


def sources() -> Iterator[Path]:
    for package in PACKAGES:
        yield from sorted((ROOT / package).rglob("*.py"))
    yield from sorted((ROOT / "loraplex").glob("*.py"))


class Function(NamedTuple):
    """Lines of a function: the first of all, the first of its body, the last."""

    name: str
    first: int
    body: int
    last: int


class Source(NamedTuple):
    """Facts of a file that the tests below read. A file is parsed once."""

    lines: int
    functions: list[Function]
    imports: list[ast.Import | ast.ImportFrom]
    classes: list[str]
    packed: list[int]  # lines of calls whose argument is `*(a, b)`


@functools.cache
def read(path: Path) -> Source:
    text = path.read_text()
    nodes = list(ast.walk(ast.parse(text)))
    return Source(
        lines=len(text.splitlines()),
        functions=[
            Function(n.name, n.lineno, n.body[0].lineno, n.end_lineno or n.lineno)
            for n in nodes
            if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef)
        ],
        imports=[n for n in nodes if isinstance(n, ast.Import | ast.ImportFrom)],
        classes=[n.name for n in nodes if isinstance(n, ast.ClassDef)],
        packed=[
            argument.lineno
            for call in nodes
            if isinstance(call, ast.Call)
            for argument in call.args
            if isinstance(argument, ast.Starred) and isinstance(argument.value, ast.Tuple)
        ],
    )


def too_long(path: Path) -> Iterator[str]:
    """The file and its functions, where they have more lines than are allowed."""
    source, is_kernel = read(path), (ROOT / "server/kernels") in path.parents
    if source.lines > (MAX_KERNEL_FILE_LINES if is_kernel else MAX_FILE_LINES):
        yield f"{path.relative_to(ROOT)}: {source.lines}"
    for function in source.functions:
        # Parameters of kernels take a line each, and are many.
        lines = function.last - (function.body if is_kernel else function.first) + 1
        if lines > MAX_FUNCTION_LINES:
            yield f"{path.relative_to(ROOT)} {function.name}: {lines}"


def test_files_and_functions_stay_short() -> None:
    assert [place for path in sources() for place in too_long(path)] == []


def module_of(path: Path) -> str:
    """Name of the module in this file, without the package `loraplex` that all lie in."""
    name = ".".join(path.relative_to(ROOT).with_suffix("").parts)
    return name.removesuffix(".__init__").removeprefix("loraplex.")


def rooms() -> dict[str, str]:
    """Each module's room: its folder, or the module itself where its folder holds rooms."""
    paths = [path.relative_to(ROOT) for path in sources()]
    holders = {folder.parent for folder in {path.parent for path in paths}}
    found = {}
    for path in paths:
        alone = path.parent in holders and path.name != "__init__.py"
        module = module_of(ROOT / path)
        found[module] = module if alone else ".".join(path.parent.parts)
    return found


def imported(path: Path, modules: Collection[str]) -> Iterator[str]:
    for node in read(path).imports:
        if isinstance(node, ast.Import):
            names = [alias.name.removeprefix("loraplex.") for alias in node.names]
            yield from (name for name in names if name in modules)
        elif node.module:
            source = node.module.removeprefix("loraplex.")
            for alias in node.names:
                name = f"{source}.{alias.name}"
                yield from [name] if name in modules else {source} & set(modules)


def test_imports_between_rooms_have_no_circle() -> None:
    room_of = rooms()
    arrows: dict[str, set[str]] = {room: set() for room in room_of.values()}
    for path in sources():
        arrows[room_of[module_of(path)]] |= {room_of[name] for name in imported(path, room_of)}
    for room, others in arrows.items():
        # Every process imports the package itself; it imports its names when first used.
        others -= {room, "loraplex"}
    assert sum(map(len, arrows.values())) > 100
    TopologicalSorter(arrows).prepare()  # raises CycleError with the circle


def test_a_class_name_means_one_thing() -> None:
    places: dict[str, list[str]] = {}
    for path in sources():
        for name in read(path).classes:
            if not name.startswith("_"):
                places.setdefault(name, []).append(str(path.relative_to(ROOT)))
    assert not {name: found for name, found in places.items() if len(found) > 1}


def test_calls_do_not_pack_arguments_in_tuples() -> None:
    """`f(*(a, b))` hides which parameter gets what: keywords say it."""
    packed = {str(path.relative_to(ROOT)): read(path).packed for path in sources()}
    assert not {path: lines for path, lines in packed.items() if lines}


def test_version_is_in_the_changelog() -> None:
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    assert re.search(rf"^## {re.escape(version)}$", (ROOT / "CHANGELOG.md").read_text(), re.M)


def test_server_package_is_empty() -> None:
    """A router imports loraplex.server.protocol, and must get nothing else with it."""
    assert (ROOT / "server/__init__.py").read_text() == ""


TORCH_FREE = """
import sys
for name in ("torch", "triton", "transformers", "peft", "flashinfer"):
    sys.modules[name] = None
import {module}
"""


@pytest.mark.parametrize(
    "module",
    [
        "loraplex.adapters.store.store",
        "loraplex.launcher.__main__",
        "loraplex.router.config",
        "loraplex.router.routes.app",
        "loraplex.server.protocol",
    ],
)
def test_imports_without_torch(module: str) -> None:
    code = TORCH_FREE.format(module=module)
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
