"""Triton's interpreter, faster, or done without."""

import contextlib
import functools
import math
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import FunctionType
from typing import Any

import numpy as np
import torch
from triton.language import core, semantic
from triton.runtime import interpreter

ROOT = Path(__file__).parents[2]
COMPILED = ROOT / ".cache" / "triton"
_module: Any = interpreter
_language: Any = core
_Semantic: Any = semantic.TritonSemantic
_replace = _module._patch_lang
_numpy_type_of = _module._get_np_dtype
_block_type = _language.block_type.__init__
_match_operands = _Semantic.binary_op_type_checking_impl
_unwrap = _language._unwrap_if_constexpr
_convert = _module._convert_float
_replaced = set[int]()
_numpy_types = dict[str, Any]()
# Numbers as blocks of a shape and a type: the results of earlier matches.
_constants = dict[tuple[Any, ...], Any]()
_MOST_CONSTANTS = 10_000
# Shapes that hold two, by the ids of both.
_joint = dict[tuple[int, int], tuple[int, ...]]()


def hasten() -> None:
    """A launch puts the interpreter's functions into Triton's language and takes them out again.
    Every call of a device function within it puts them there once more: a third of the time in all.
    Now they are put there once for a module of kernels, and stay. Another quarter went into a
    search for integers that overflow, of which it told nobody; now those are an error. Of what is
    left two fifths described shapes and types anew for every result; now those that are known are
    looked up, as are numbers beside blocks, made blocks of the same shape. The interpreter's FP8
    does not carry when it rounds up to a power of two; torch's does.
    """
    if os.environ.get("TRITON_INTERPRET") != "1":
        return  # the compiler is at work
    _module._convert_float = _convert_by_torch
    _module._patch_lang = _replace_once
    _module._patch_attr = _place
    _module.TensorHandle.__init__ = _init_handle
    _module.interpreter_semantic.binary_op_sanitize_overflow_impl = _refuse_overflow
    _module._get_np_dtype = _numpy_type
    _language.block_type.__init__ = _init_block_type
    _language.tensor.__init__ = _init_tensor
    _language._unwrap_if_constexpr = _unwrap_known
    _Semantic.binary_op_type_checking_impl = _match_known_operands
    _Semantic.broadcast_impl_value = _broadcast_unlike


def _place(owner: Any, name: str, member: Any, _builder: Any, scope: Any) -> None:
    """Puts an interpreter's function in its place: called as the compiler calls it."""
    function = getattr(member, "__wrapped__", member)

    def call(*arguments: Any, **named: Any) -> Any:
        named["_semantic"] = _module.interpreter_semantic
        return function(*arguments, **named)

    scope.set_attr(owner, name, call)


def _init_handle(self: Any, data: Any, dtype: Any, attr: Any = None) -> None:
    self.data, self.dtype, self.attr = data, dtype, {} if attr is None else attr
    if not dtype.is_ptr() and data.itemsize > max(1, dtype.primitive_bitwidth // 8):
        raise ValueError(f"{data.dtype} is wider than {dtype}")


class _Kept:
    """Stands for the end of a launch's replacements, which stay."""

    def restore(self) -> None:
        pass


def _replace_once(function: FunctionType) -> _Kept:
    module = id(function.__globals__)
    if module not in _replaced:
        _replaced.add(module)
        _replace(function)
    return _Kept()


_EXACT: dict[str, Any] = {"add": np.add, "sub": np.subtract, "mul": np.multiply}


def _refuse_overflow(lhs: Any, rhs: Any, operation: Any) -> None:
    kind, name = lhs.type.scalar, operation.__name__
    if kind.int_bitwidth >= 64:
        return
    exact = _EXACT[name](lhs.handle.data, rhs.handle.data, dtype=np.int64)
    least, most = (exact, exact) if exact.size == 1 else (exact.min(), exact.max())
    inside = kind.get_int_min_value() <= least and most <= kind.get_int_max_value()
    assert inside, f"{kind} overflows: {name}"


def _init_block_type(self: Any, element_ty: Any, shape: Any) -> None:
    sizes = tuple([getattr(size, "value", size) for size in shape])
    self.element_ty = element_ty
    self.shape, self.numel, told = _block(sizes)
    self.name = f"<{told}, {element_ty}>"


@functools.cache
def _block(sizes: tuple[int, ...]) -> tuple[Any, int, str]:
    """A block's shape, its elements, and how it is told. Raises what Triton does."""
    block = object.__new__(_language.block_type)
    _block_type(block, _language.int32, list(sizes))
    return block.shape, block.numel, str(block.shape)


def _init_tensor(self: Any, handle: Any, type: Any) -> None:
    self.handle, self.type, self.dtype = handle, type, type.scalar
    self.shape, self.numel = _tensor(tuple(type.shape.values) if type.is_block() else ())


@functools.cache
def _tensor(sizes: tuple[int, ...]) -> tuple[Any, Any]:
    shape = _language.tuple([_language.constexpr(size) for size in sizes])
    return shape, _language.constexpr(math.prod(sizes))


def _convert_by_torch(values: Any, of: Any, to: Any, rounding: Any) -> Any:
    if to != core.float8e4nv or of != core.float32:
        return _convert(values, of, to, rounding)
    return torch.tensor(values).to(torch.float8_e4m3fn).view(torch.uint8).numpy()


# Two operands of one of these types compute in that type.
_PLAIN = frozenset(
    id(dtype) for dtype in (core.float32, core.int32, core.int64, core.uint32, core.int1)
)


def _match_known_operands(self: Any, lhs: Any, rhs: Any, *rules: Any, **named_rules: Any) -> Any:
    left, right = isinstance(lhs, _language.tensor), isinstance(rhs, _language.tensor)
    if left and right and lhs.dtype is rhs.dtype and id(lhs.dtype) in _PLAIN:
        return _broadcast_unlike(self, lhs, rhs)
    if left and right and rules == (True, True) and _is_place(lhs, rhs):
        return _broadcast_unlike(self, lhs, rhs)
    if left is right or named_rules or id((lhs if left else rhs).dtype) not in _PLAIN:
        return _match_operands(self, lhs, rhs, *rules, **named_rules)
    return _match_number(self, lhs, rhs, rules) if left else _number_matches(self, lhs, rhs, rules)


_OFFSETS = frozenset(id(dtype) for dtype in (core.int32, core.int64))


def _is_place(lhs: Any, rhs: Any) -> bool:
    """Says whether one operand is a pointer, and the other an offset."""
    offset = rhs if lhs.dtype.is_ptr() else lhs
    return id(offset.dtype) in _OFFSETS and (rhs if offset is lhs else lhs).dtype.is_ptr()


def _match_number(self: Any, lhs: Any, number: Any, rules: Any) -> Any:
    key = _key(lhs, number, rules)
    if key in _constants:
        return lhs, _constants[key]
    matched, constant = _match_operands(self, lhs, number, *rules)
    if matched is lhs:
        _keep(key, constant)
    return matched, constant


def _number_matches(self: Any, number: Any, rhs: Any, rules: Any) -> Any:
    key = _key(rhs, number, rules)
    if key in _constants:
        return _constants[key], rhs
    constant, matched = _match_operands(self, number, rhs, *rules)
    if matched is rhs:
        _keep(key, constant)
    return constant, matched


def _key(tensor: Any, number: Any, rules: Any) -> tuple[Any, ...]:
    """Tells numbers in blocks from each other. 0.0 and -0.0 are equal."""
    return id(tensor.dtype), id(tensor.shape), type(number), number, str(number), rules


def _keep(key: tuple[Any, ...], constant: Any) -> None:
    constant.handle.data.flags.writeable = False
    if len(_constants) > _MOST_CONSTANTS:
        _constants.clear()
    _constants[key] = constant


def _broadcast_unlike(self: Any, lhs: Any, rhs: Any) -> Any:
    if lhs.shape is rhs.shape:
        return lhs, rhs
    key = id(lhs.shape), id(rhs.shape)
    if key not in _joint:
        _joint[key] = np.broadcast_shapes(_sizes(lhs), _sizes(rhs))
    return _stretched(self, lhs, _joint[key]), _stretched(self, rhs, _joint[key])


def _sizes(tensor: Any) -> tuple[int, ...]:
    return tuple(size.value for size in tensor.shape)


def _stretched(self: Any, tensor: Any, sizes: tuple[int, ...]) -> Any:
    if tensor.shape is _tensor(sizes)[0]:
        return tensor
    data = tensor.handle.data
    data = np.full(sizes, data, data.dtype) if data.size == 1 else np.broadcast_to(data, sizes)
    handle = _module.TensorHandle(data, tensor.handle.dtype.scalar)
    return self.tensor(handle, _language.block_type(tensor.dtype, sizes))


_BARE = {bool, core.dtype, core.tensor, float, int, str, type(None)}


def _unwrap_known(value: Any) -> Any:
    kind = type(value)
    if kind in _BARE:
        return value
    return value.value if kind is _language.constexpr else _unwrap(value)


def _numpy_type(of: Any) -> Any:
    if of.scalar.name not in _numpy_types:
        _numpy_types[of.scalar.name] = _numpy_type_of(of)
    return _numpy_types[of.scalar.name]


def run_uninterpreted(module: str, *arguments: str) -> str:
    """What a module prints in a process of its own, whose kernels are compiled. Triton compiles a
    kernel again where its source, its options, the target or Triton itself has changed."""
    environment = {**os.environ, "TRITON_CACHE_DIR": str(COMPILED), "TRITON_INTERPRET": "0"}
    command = [sys.executable, "-m", module, *arguments]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


@contextlib.contextmanager
def exact_products() -> Iterator[None]:
    """Round products from float64 for a while. numpy's sums in float32 depend on a row's place in
    its tile; a GPU's do not."""

    def create_dot(_: Any, a: Any, b: Any, d: Any, *precision: Any) -> Any:
        product = np.matmul(a.data, b.data, dtype=np.float64).astype(d.data.dtype)
        return _module.TensorHandle(product + d.data, d.dtype.scalar)

    kept, _module.InterpreterBuilder.create_dot = _module.InterpreterBuilder.create_dot, create_dot
    try:
        yield
    finally:
        _module.InterpreterBuilder.create_dot = kept
