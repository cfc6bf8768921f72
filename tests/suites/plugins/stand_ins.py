"""Stand-ins for a rival's own packages, which its tests import beside what they send by HTTP."""

import importlib.abc
import importlib.machinery
import json
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any


class Anything:
    """Stands in for any object of a rival. It is empty, false, and may be called or subclassed."""

    def __init__(self, *_: Any, **__: Any) -> None: ...

    def __call__(self, *args: Any, **_: Any) -> Any:
        only = args[0] if len(args) == 1 else None
        return only if callable(only) and not isinstance(only, type) else Anything()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return Anything()

    def __mro_entries__(self, _: Any) -> tuple[type, ...]:
        return (object,)

    def __enter__(self) -> Any:
        return Anything()

    def __exit__(self, *_: Any) -> None: ...

    def __bool__(self) -> bool:
        return False

    def __iter__(self) -> Any:
        return iter(())

    def __getitem__(self, _: Any) -> Any:
        return Anything()

    def __or__(self, _: Any) -> Any:
        return Any

    __ror__ = __or__

    def __truediv__(self, _: Any) -> Any:
        return Anything()

    def model_validate(self, value: Any) -> Any:
        return json.loads(json.dumps(value), object_hook=lambda found: SimpleNamespace(**found))

    def model_validate_json(self, text: str) -> Any:
        return self.model_validate(json.loads(text))


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def __init__(self, names: tuple[str, ...], real: str, known: dict[str, Any]) -> None:
        self._names, self._real, self._known = names, real, known

    def find_spec(self, name: str, *_: Any) -> Any:
        if not _is_below(name, self._names) or _is_below(name, (self._real,)):
            return None
        spec = importlib.machinery.ModuleSpec(name, self, is_package=True)
        spec.submodule_search_locations = [str(Path.cwd() / name.replace(".", "/"))]
        return spec

    def create_module(self, spec: Any) -> ModuleType:
        module = ModuleType(spec.name)
        module.__dict__.update(self._known, __getattr__=_attribute)
        return module

    def exec_module(self, module: ModuleType) -> None: ...


def _is_below(name: str, roots: tuple[str, ...]) -> bool:
    return any(name == root or name.startswith(root + ".") for root in roots)


def _attribute(name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(name)
    return Anything()


def install(*names: str, real: str = "", **known: Any) -> None:
    """Modules of those names, and below them, hold what is known, and `Anything` by other names.
    real: what is below that name is imported as it is."""
    sys.meta_path.insert(0, _Finder(names, real, known))
