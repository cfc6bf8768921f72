"""`loraplex info`: this machine's abilities, with reasons for those that it lacks. Imports neither
torch nor a kernel."""

import os
import platform

import msgspec

from loraplex.adapters.common import extras
from loraplex.adapters.helpers.helper import start_problem
from loraplex.launcher.known_models import served_families
from loraplex.router.helper_check import HELPERS
from loraplex.server.worker.process.device import choose_device, cuda_devices, torch_build

LIBRARIES = ("torch", "triton", "flashinfer-python", "tokenizers", "huggingface-hub")
_FLASHINFER_SINCE = (8, 0)
_FP8_SINCE = (8, 9)


class GpuFacts(msgspec.Struct, frozen=True):
    name: str
    capability: str
    memory_gib: float
    bfloat16: bool
    float8: bool


class Ability(msgspec.Struct, frozen=True):
    """One thing that loraplex can do, or why it cannot here and what to do about it."""

    name: str
    available: bool
    detail: str


class MachineFacts(msgspec.Struct, frozen=True):
    """The report. families: by `model_type`, the names that people know their models by."""

    loraplex: str
    python: str
    system: str
    cpus: int
    memory_gib: float
    libraries: dict[str, str | None]
    torch_cuda: str | None
    gpus: tuple[GpuFacts, ...]
    device: str
    dtype: str
    abilities: tuple[Ability, ...]
    families: dict[str, str]


def gather() -> MachineFacts:
    devices, build = cuda_devices(), torch_build()
    chosen = choose_device("auto", devices, build)
    libraries = {name: extras.installed(name) for name in LIBRARIES}
    if build is not None:
        libraries["torch"] = build.version
    gpus = tuple(
        GpuFacts(
            name=device.name,
            capability=f"{device.capability[0]}.{device.capability[1]}",
            memory_gib=round(device.memory_bytes / 2**30, 1),
            bfloat16=device.has_bfloat16,
            float8=device.capability >= _FP8_SINCE,
        )
        for device in devices
    )
    on_gpu = chosen.kind == "cuda"
    return MachineFacts(
        loraplex=extras.installed("loraplex") or "(from a checkout)",
        python=platform.python_version(),
        system=f"{platform.system()} {platform.release()} {platform.machine()}",
        cpus=len(os.sched_getaffinity(0)),
        memory_gib=round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        libraries=libraries,
        torch_cuda=build.cuda if build else None,
        gpus=gpus,
        device=chosen.kind,
        dtype=_dtype(on_gpu, chosen.has_bfloat16),
        abilities=(
            _serving(libraries),
            Ability("gpu", on_gpu, chosen.note or _gpu_detail(on_gpu)),
            _attention(on_gpu, libraries, devices[0].capability if devices else (0, 0)),
            _kernels(on_gpu, libraries),
            _bfloat16(on_gpu, chosen.has_bfloat16),
            *(_helper(name, module) for name, module in HELPERS.items()),
        ),
        families={name: known.covers for name, known in served_families().items()},
    )


def _dtype(on_gpu: bool, has_bfloat16: bool) -> str:
    if not on_gpu:
        return "float32"
    return "the checkpoint's (bfloat16 or float16)" if has_bfloat16 else "float16"


def _gpu_detail(on_gpu: bool) -> str:
    if on_gpu:
        return "models run on the GPU"
    return "no NVIDIA driver or device was found; small models run on the CPU"


def _serving(libraries: dict[str, str | None]) -> Ability:
    missing = [name for name in ("torch", "tokenizers") if libraries[name] is None]
    if missing:
        detail = f"{', '.join(missing)} missing: run `{extras.remedy(missing[0], 'serve')}`"
        return Ability("serve", False, detail)
    return Ability("serve", True, "router and worker run on this machine")


def _attention(
    on_gpu: bool, libraries: dict[str, str | None], capability: tuple[int, int]
) -> Ability:
    name = "flashinfer"
    if not on_gpu:
        return Ability(name, False, "attention in plain torch, as computing is on the CPU")
    if capability < _FLASHINFER_SINCE:
        detail = f"needs compute capability 8.0, this GPU has {capability[0]}.{capability[1]}"
        return Ability(name, False, f"{detail}: attention in plain torch")
    if libraries["flashinfer-python"] is None:
        detail = f"not installed: attention in plain torch; run `{extras.remedy('flashinfer')}`"
        return Ability(name, False, detail)
    return Ability(name, True, "attention of prompts by FlashInfer")


def _kernels(on_gpu: bool, libraries: dict[str, str | None]) -> Ability:
    name = "triton"
    if libraries[name] is None:
        detail = f"not installed: LoRA in plain torch; run `{extras.remedy(name)}`"
        return Ability(name, False, detail)
    if not on_gpu:
        return Ability(name, False, "LoRA in plain torch, as computing is on the CPU")
    return Ability(name, True, "LoRA by Triton kernels")


def _helper(name: str, module: str) -> Ability:
    problem = start_problem(module)
    if problem is None:
        return Ability(name, True, f"{module} starts")
    return Ability(name, False, f"{module} cannot be started: {problem}")


def _bfloat16(on_gpu: bool, has_bfloat16: bool) -> Ability:
    if not on_gpu:
        return Ability("bfloat16", False, "not used on the CPU: weights are widened to float32")
    if not has_bfloat16:
        return Ability("bfloat16", False, "needs compute capability 8.0: float16 is used")
    return Ability("bfloat16", True, "weights and adapters in bfloat16")


def to_text(facts: MachineFacts) -> str:
    lines = [
        f"loraplex    {facts.loraplex}",
        f"python      {facts.python} on {facts.system}",
        f"machine     {facts.cpus} CPU cores, {facts.memory_gib} GiB",
    ]
    lines += [f"{name:<11} {text or 'not installed'}" for name, text in _shown(facts)]
    for gpu in facts.gpus:
        lines.append(f"gpu         {gpu.name}, {gpu.memory_gib} GiB, capability {gpu.capability}")
    lines += [f"computes on {facts.device}, in {facts.dtype}", ""]
    for ability in facts.abilities:
        lines.append(f"  [{'x' if ability.available else ' '}] {ability.name}: {ability.detail}")
    lines += ["", "families of models:"]
    lines += [f"  {name:<11} {covers}".rstrip() for name, covers in facts.families.items()]
    return "\n".join(lines) + "\n"


def _shown(facts: MachineFacts) -> list[tuple[str, str | None]]:
    shown = [(name.removesuffix("-python"), text) for name, text in facts.libraries.items()]
    if facts.libraries["torch"] is not None:
        cuda = f"CUDA {facts.torch_cuda}" if facts.torch_cuda else "no CUDA"
        shown[0] = ("torch", f"{facts.libraries['torch']} ({cuda})")
    return [(name.replace("huggingface-hub", "hub"), text) for name, text in shown]
