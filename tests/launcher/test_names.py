"""Nobody else ships a package of our names, and a router's imports need no torch."""

import subprocess
import sys
from pathlib import Path

import pytest

from launcher.names import OUR_PACKAGES, clash

ROOT = Path(__file__).parents[2]


def test_no_other_distribution_ships_our_packages() -> None:
    assert clash() is None


def test_a_clash_says_what_to_uninstall() -> None:
    assert clash({"adapters": ["loraplex"], "numpy": ["numpy"]}) is None
    complaint = clash({"adapters": ["adapters", "loraplex"], "server": ["srv"]})
    assert complaint is not None
    assert "pip uninstall adapters srv" in complaint
    assert "`server`" in complaint


def test_our_packages_are_the_folders() -> None:
    assert {path.parent.name for path in ROOT.glob("*/py.typed")} == set(OUR_PACKAGES)


@pytest.mark.parametrize("module", ["server.protocol", "router.config", "launcher.__main__"])
def test_imports_without_torch(module: str) -> None:
    blocked = "('torch', 'triton', 'transformers', 'peft', 'flashinfer')"
    code = f"import sys; sys.modules.update(dict.fromkeys({blocked})); import {module}"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, timeout=240)
