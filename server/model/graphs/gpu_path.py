"""The ops that serve a model on a device; on a GPU, everything compiled, warm and captured."""

import importlib
import importlib.util
import logging
import threading
from collections.abc import Sequence
from contextlib import suppress

import torch

from loraplex.adapters.common import extras
from loraplex.server.model.graphs.parts import Built, Parts
from loraplex.server.model.graphs.start_phases import StartPhases
from loraplex.server.model.ops.kernel_limits import unsupported
from loraplex.server.model.ops.ops_torch import TorchOps
from loraplex.server.model.routed_experts import chosen_experts
from loraplex.server.model.sampling.sampler import TorchDraws
from loraplex.server.model.spec.model_spec import ModelSpec

log = logging.getLogger(__name__)


def _build_reference(parts: Parts, why: str) -> Built:
    biases = parts.weights.biases
    ops = TorchOps(parts.model, parts.cache, parts.table, parts.states, biases)
    draws, limits = TorchDraws(parts.rows, parts.parameters), parts.limits
    ops.chosen_experts = chosen_experts(limits, limits.max_step_tokens, parts.rows.device)
    told = f"plain torch: {why}"
    return Built(parts.decoder(ops), draws, None, None, (), told, ops.chosen_experts)


def why_not_fast(model: ModelSpec, dtype: torch.dtype, device: torch.device) -> str | None:
    """Why a CUDA device serves this model with the reference ops, or None where it need not."""
    for package in ("flashinfer", "triton"):
        if importlib.util.find_spec(package) is None:
            return f"{package} is not installed ({extras.remedy(package, 'gpu')})"
    try:
        import flashinfer  # noqa: F401
    except ImportError as error:
        return f"FlashInfer cannot be imported ({error})"
    name = str(dtype).removeprefix("torch.")
    return unsupported(model, name, torch.cuda.get_device_capability(device))


def import_beside() -> None:
    """Begin to import what a fast GPU needs, in a thread: that takes as long as some gigabytes of
    weights. What cannot be imported is left to `build`."""

    def import_all() -> None:
        with suppress(Exception):
            importlib.import_module("loraplex.server.model.graphs.fast_path")

    threading.Thread(target=import_all, name="imports", daemon=True).start()


def build(parts: Parts, graph_batches: Sequence[int] | None, phases: StartPhases) -> Built:
    """Build the decoder by the fastest way that the device has. graph_batches: padded batch sizes
    of decode graphs; None = all that the limits need. phases: what takes long is noted there.
    """
    device = parts.cache.pool.device
    if device.type == "cpu":
        return _build_reference(parts, "computing on the CPU")
    reason = why_not_fast(parts.model, parts.cache.dtype, device)
    if reason is not None:
        log.warning("serving with plain torch, which is slower: %s", reason)
        return _build_reference(parts, reason)
    # Not at the top: neither FlashInfer nor Triton is needed on a CPU.
    from loraplex.server.model.graphs.fast_path import build_fast

    return build_fast(parts, graph_batches, phases)
