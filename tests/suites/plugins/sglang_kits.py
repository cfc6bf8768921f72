"""Each mixin of SGLang's kits that has tests, as a test case of a server."""

import importlib
from pathlib import Path
from unittest import TestCase

from server_lines import url_of

MODEL = "meta-llama/Llama-3.1-8B-Instruct"


def _cases() -> dict[str, type[TestCase]]:
    cases = {}
    for path in sorted(Path("sglang/test/kits").glob("*_kit*.py")):
        module = importlib.import_module(f"sglang.test.kits.{path.stem}")
        for name, kit in vars(module).items():
            own = isinstance(kit, type) and kit.__module__ == module.__name__
            if own and any(method.startswith("test_") for method in dir(kit)):
                cases[f"Test{name}"] = type(name, (kit, TestCase), {"setUpClass": _begin})
    return cases


@classmethod  # type: ignore[misc]
def _begin(case: type[TestCase]) -> None:
    url = url_of(MODEL)
    given = {"model": MODEL, "base_url": url, "api_key": "sk-any", "process": None, "lb_url": url}
    for name, value in given.items():
        setattr(case, name, value)
    for kit in case.__mro__[1:]:
        if "setUpClass" in vars(kit) and kit is not TestCase:
            kit.setUpClass.__func__(case)  # type: ignore[attr-defined]


globals().update(_cases())
