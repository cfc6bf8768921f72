"""Finds this machine's devices without importing torch and without a device context."""

import ctypes
import importlib.util
from collections.abc import Mapping
from pathlib import Path
from typing import Literal, NamedTuple

from loraplex.adapters.common import extras
from loraplex.adapters.errors import CommandError
from loraplex.server.config import Device

# Attributes of the CUDA driver API (cuDeviceGetAttribute).
_CAPABILITY_MAJOR, _CAPABILITY_MINOR = 75, 76
_BFLOAT16_SINCE = (8, 0)


class DeviceError(CommandError):
    """The device asked for cannot be used; str() says why and what to do."""


class CudaDevice(NamedTuple):
    name: str
    capability: tuple[int, int]
    memory_bytes: int

    @property
    def has_bfloat16(self) -> bool:
        return self.capability >= _BFLOAT16_SINCE


class TorchBuild(NamedTuple):
    """An installed torch. cuda: the CUDA version it was built for, or None."""

    version: str
    cuda: str | None


def cuda_devices() -> list[CudaDevice]:
    """Devices of the NVIDIA driver; empty where there is no driver or no device."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return []
    count = ctypes.c_int()
    if driver.cuInit(0) != 0 or driver.cuDeviceGetCount(ctypes.byref(count)) != 0:
        return []
    return [_describe(driver, index) for index in range(count.value)]


def _describe(driver: ctypes.CDLL, index: int) -> CudaDevice:
    device, number = ctypes.c_int(), ctypes.c_int()
    name, memory = ctypes.create_string_buffer(256), ctypes.c_size_t()
    driver.cuDeviceGet(ctypes.byref(device), index)
    driver.cuDeviceGetName(name, len(name), device)
    driver.cuDeviceTotalMem_v2(ctypes.byref(memory), device)
    capability = []
    for attribute in (_CAPABILITY_MAJOR, _CAPABILITY_MINOR):
        driver.cuDeviceGetAttribute(ctypes.byref(number), attribute, device)
        capability.append(number.value)
    return CudaDevice(
        name.value.decode(errors="replace"), (capability[0], capability[1]), memory.value
    )


def torch_build() -> TorchBuild | None:
    """The build that torch's file `torch/version.py` names; None = not installed."""
    package = importlib.util.find_spec("torch")
    if package is None or package.origin is None:
        return None
    path = Path(package.origin).parent / "version.py"
    spec = importlib.util.spec_from_file_location("torch_version", path)
    if spec is None or spec.loader is None:
        return None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    facts: Mapping[str, object] = vars(module)
    cuda = facts.get("cuda")
    return TorchBuild(str(facts.get("__version__", "?")), str(cuda) if cuda else None)


class ChosenDevice(NamedTuple):
    """Device that the engine computes on. note: why it is not what one might expect, or None.
    memory_bytes: of a GPU.
    """

    kind: Literal["cpu", "cuda"]
    has_bfloat16: bool
    note: str | None = None
    memory_bytes: int = 0


def choose_device(
    asked: Device, devices: list[CudaDevice], build: TorchBuild | None
) -> ChosenDevice:
    """Choose the device. Raises DeviceError where "cuda" was asked for and cannot be had."""
    problem = _cuda_problem(devices, build)
    if asked == "cpu":
        return ChosenDevice("cpu", True)
    if problem is None:
        return ChosenDevice("cuda", devices[0].has_bfloat16, None, devices[0].memory_bytes)
    if asked == "cuda":
        raise DeviceError(f"device cuda cannot be used: {problem}")
    note = f"computing on the CPU: {problem}" if devices else None
    return ChosenDevice("cpu", True, note)


def _cuda_problem(devices: list[CudaDevice], build: TorchBuild | None) -> str | None:
    if not devices:
        return "no NVIDIA driver or device was found"
    if build is None:
        return f"torch is not installed; run `{extras.remedy('torch', 'gpu')}`"
    if build.cuda is None:
        return (
            f"torch {build.version} was built without CUDA; install a CUDA build "
            "(https://pytorch.org/get-started/locally)"
        )
    return None
