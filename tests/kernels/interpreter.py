"""Triton's interpreter, faster, or done without."""

import os
import subprocess
import sys
from pathlib import Path
from types import FunctionType
from typing import Any

import numpy as np
from triton.runtime import interpreter

ROOT = Path(__file__).parents[2]
_module: Any = interpreter
_replace, _launch = _module._patch_lang, _module.GridExecutor.__call__
_replaced = set[int]()


def hasten() -> None:
    """A launch puts the interpreter's functions into Triton's language, and every call of a device
    function within it does so again, a third of the time in all. Now it is once a launch and
    module. Another quarter went into a search for integers that overflow, of which it told nobody;
    now they are an error.
    """
    _module._patch_lang = _replace_once
    _module.GridExecutor.__call__ = _launch_anew
    _module.interpreter_semantic.binary_op_sanitize_overflow_impl = _refuse_overflow


def _replace_once(function: FunctionType) -> Any:
    module = id(function.__globals__)
    if module in _replaced:
        return None  # of a device function's call, which never restores
    _replaced.add(module)
    return _replace(function)


def _launch_anew(self: Any, *args: Any, **options: Any) -> Any:
    _replaced.clear()
    return _launch(self, *args, **options)


def _refuse_overflow(lhs: Any, rhs: Any, operation: Any) -> None:
    kind, name = lhs.type.scalar, operation.__name__
    if kind.int_bitwidth >= 64:
        return
    left, right = (np.asarray(operand.handle.data).astype(np.int64) for operand in (lhs, rhs))
    exact = {"add": np.add, "sub": np.subtract, "mul": np.multiply}[name](left, right)
    inside = kind.get_int_min_value() <= exact.min() and exact.max() <= kind.get_int_max_value()
    assert inside, f"{kind} overflows: {name}"


def run_uninterpreted(module: str, cache: Path, *arguments: str) -> str:
    """What a module prints in a process of its own, whose kernels are compiled, into `cache`."""
    environment = {**os.environ, "TRITON_CACHE_DIR": str(cache), "TRITON_INTERPRET": "0"}
    command = [sys.executable, "-m", module, *arguments]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout
