"""The wheel has one package, and lives next to packages and folders with its folders' names."""

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from tests.launcher.fresh_environment import linked
from tests.launcher.test_extras import TIMEOUT_S, clean, serves

ROOT = Path(__file__).parents[2]
OTHERS = ROOT / ".cache/wheels"
FOLDERS = {path.name for path in (ROOT / "loraplex").iterdir() if path.is_symlink()}
ORIGINS = """
from importlib.util import find_spec
import loraplex.adapters.ref, loraplex.router.call, loraplex.server.protocol
for name in ("adapters", "router", "server", "loraplex.adapters"):
    print(find_spec(name).origin)
"""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel of this checkout."""
    folder = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)]
    subprocess.run(command, cwd=ROOT, check=True, timeout=TIMEOUT_S)
    (built,) = folder.glob("*.whl")
    return built


def test_the_wheel_has_one_package(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    assert {name.partition("/")[0] for name in names} == {"loraplex", "loraplex-0.1.0.dist-info"}
    sources = {path.relative_to(ROOT) for name in FOLDERS for path in (ROOT / name).rglob("*.py")}
    assert {f"loraplex/{path}" for path in sources} <= set(names)


@pytest.mark.exhaustive
def test_it_serves_next_to_others_of_its_folders_names(wheel: Path, tmp_path: Path) -> None:
    """`adapters` is a package of others; the user's folder has `server` and `router`."""
    python = linked(tmp_path / "environment", ("serve",))
    (site,) = (tmp_path / "environment").glob("lib/python3*/site-packages")
    (site / "loraplex").unlink()
    (other,) = OTHERS.glob("adapters-*.whl")
    for each in (other, wheel):
        zipfile.ZipFile(each).extractall(site)
    user = tmp_path / "user"
    for name in ("server", "router"):
        (user / name).mkdir(parents=True)
        (user / name / "__init__.py").write_text("raise SystemExit('a module of the user')")
    environ = clean() | {"PYTHONPATH": str(user)}
    done = subprocess.run(
        [python, "-c", ORIGINS], cwd=user, env=environ, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    folders = (site / "adapters", user / "router", user / "server", site / "loraplex/adapters")
    assert done.stdout.split() == [os.fspath(folder / "__init__.py") for folder in folders]
    serves(python, user, ["serve"], "/health/ready", {"PYTHONPATH": str(user)})
