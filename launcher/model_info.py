"""`loraplex info MODEL`: what a base model is and needs on this machine, or the sentence that a
worker refuses it with. Imports neither torch nor a kernel."""

from collections import Counter

import msgspec

from loraplex.adapters.base import base_modules
from loraplex.launcher.demo import model_path
from loraplex.launcher.model_needs import ModelNeeds, Needs, choose_groups
from loraplex.launcher.options import OptionError
from loraplex.launcher.router_client import json_text
from loraplex.launcher.worker_groups import AskedGroups
from loraplex.server.config import WorkerConfig
from loraplex.server.model.ops.kernel_limits import unsupported
from loraplex.server.model.spec.base_spec import base_spec
from loraplex.server.model.spec.model_spec import ModelSpec
from loraplex.server.model.spec.served_as import served_as
from loraplex.server.protocol import Gift
from loraplex.server.worker.process.device import (
    CudaDevice,
    choose_device,
    cuda_devices,
    torch_build,
)
from loraplex.server.worker.process.model_source import describe_model
from loraplex.server.worker.process.sizing import choose_dtype

# Of a GPU that has what any GPU here may have, where this machine has none.
_USUAL_GPU = (9, 0)
_GIB = 1 << 30


class ModelFacts(msgspec.Struct, frozen=True):
    """A model that can be served. max_context: tokens that it reaches. dtype: of its weights.

    weights: how they are quantised, "" = not. gives: what may be asked of it. windows: tokens ->
    layers that see no more.
    adapters: modules that adapters may change. reference: why plain torch computes it on a GPU, or
    None. shared: number of devices that can share it -> bytes of weights of each. fits: the fewest
    of them that hold it with devices like this machine's; None = none do. groups: what
    `loraplex serve` makes of several GPUs; "" = there are none.
    """

    model: str
    family: str
    gives: tuple[Gift, ...]
    weights: str
    layers: int
    hidden_size: int
    vocab_size: int
    max_context: int
    windows: dict[int, int]
    dtype: str
    adapters: tuple[str, ...]
    reference: str | None
    shared: dict[int, int]
    fits: int | None
    groups: str
    needs: Needs

    def written(self, *, for_programs: bool) -> str:
        if for_programs:
            return json_text(self)
        problem = self.needs.problem
        head = f"{self.model} can be served"
        lines = [head if problem is None else f"{head}, but not here: {problem}"]
        lines += [f"  {name:<11} {text}" for name, text in self._rows()]
        lines.append(f"on this machine ({self.needs.device}, {self.needs.dtype})")
        lines += [f"  {name:<11} {text}" for name, text in self.needs.rows()]
        return "\n".join(lines) + "\n"

    def _rows(self) -> list[tuple[str, str]]:
        seen = (f"{window:,} tokens in {n} layers" for window, n in self.windows.items())
        rows = [
            ("family", self.family),
            ("gives", ", ".join(self.gives)),
            ("weights", self.weights and f"{self.weights}, computed in the dtype"),
            ("layers", f"{self.layers}, of {self.hidden_size:,} features"),
            ("vocabulary", f"{self.vocab_size:,} tokens"),
            ("context", f"{self.max_context:,} tokens"),
            ("windows", ", ".join(seen)),
            ("dtype", self.dtype),
            ("adapters", " ".join(self.adapters)),
            ("on a GPU", self.reference or "the project's kernels"),
            ("--tp", self._shares()),
            ("serve", self.groups),
        ]
        return [row for row in rows if row[1]]

    def _shares(self) -> str:
        each = ", ".join(f"{count}: {n / _GIB:.2f} GiB" for count, n in self.shared.items())
        fits = "none of these fits" if self.fits is None else f"{self.fits} fits"
        return f"weights of each device by their number: {each}; {fits} here"


def _gives(model: ModelSpec) -> tuple[Gift, ...]:
    if model.classes is not None:
        return ("classes",)
    return ("text", "vectors") if model.writes else ("vectors",)


def describe(config: WorkerConfig) -> ModelFacts:
    """Facts about a model. Of a model on the Hub only small files are fetched. Raises ModelError,
    CheckpointError, ConfigError, DeviceError, WorkerStartError."""
    place = str(model_path()) if config.model == "demo" else config.model
    described = describe_model(place, config.revision)
    model = served_as(described, config.quantize, config.activations, config.picture_memory)
    devices = cuda_devices()
    device = choose_device(config.device, devices, torch_build())
    dtype = choose_dtype(config.dtype, device.kind, model.dtype, device.has_bfloat16)
    base = base_spec(model, "", ())
    on_gpu = device.kind == "cuda"
    capability = devices[0].capability if on_gpu else _USUAL_GPU
    needs = ModelNeeds(config, model, device)
    return ModelFacts(
        model=config.model,
        family=model.family,
        gives=_gives(model),
        weights="" if model.quantisation is None else model.quantisation.text,
        layers=model.num_layers,
        hidden_size=model.hidden_size,
        vocab_size=model.vocab_size,
        max_context=model.max_context,
        windows=dict(Counter(window for window in model.windows if window is not None)),
        dtype=model.dtype,
        adapters=tuple(dict.fromkeys(module.name for module in base_modules(base))),
        reference=_reference(model, dtype if on_gpu else "bfloat16", capability),
        shared={count: needs.weights(count) for count in needs.counts},
        fits=next((count for count in needs.counts if needs.fit(count) != "no"), None),
        groups=_groups(needs, devices) if on_gpu and len(devices) > 1 else "",
        needs=needs.of(config.tp),
    )


def _groups(needs: ModelNeeds, gpus: list[CudaDevice]) -> str:
    """The groups of GPUs that a model gets without `--tp` and `--workers`, or why it gets none."""
    try:
        return choose_groups(AskedGroups(), needs, gpus).written()
    except OptionError as error:
        return str(error)


def _reference(model: ModelSpec, dtype: str, capability: tuple[int, int]) -> str | None:
    reason = unsupported(model, dtype, capability)
    return None if reason is None else f"plain torch, which is slower: {reason}"
