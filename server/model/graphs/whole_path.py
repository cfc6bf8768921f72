"""The GPU's operations of models whose tokens see all others, at start: compiled and warm.

Texts are few and whole, and no token is drawn, so nothing is captured.
"""

from dataclasses import replace

import torch

from loraplex.server.model.graphs.fast_path import compile_together, summed_sites
from loraplex.server.model.graphs.parts import Built, Parts
from loraplex.server.model.graphs.start_phases import StartPhases
from loraplex.server.model.graphs.warm_up import run_texts
from loraplex.server.model.linear.rounded import row_form
from loraplex.server.model.ops.attention.whole_cuda import WholeAttention
from loraplex.server.model.ops.cuda.ops_cuda import CudaOps
from loraplex.server.model.ops.sizes import row_sizes
from loraplex.server.model.sampling.draws_torch import TorchDraws


def build_whole(parts: Parts, phases: StartPhases) -> Built:
    """Build the decoder on a device that has all that the kernels need. The parameters are those of
    `gpu_path.build`.
    """
    limits, model = parts.limits, parts.model
    linears, biases = parts.weights.linears, parts.weights.biases
    attention = WholeAttention(model, parts.cache.dtype, parts.rows.device, biases)
    reach = (limits.max_context, limits.max_step_tokens)
    context = (model, parts.cache, parts.table, attention, reach)
    ops = CudaOps(*context, summed_sites(parts), row_form(linears), states=parts.states)
    few = replace(parts.weights, layers=parts.weights.layers[: model.kinds_within])
    phases.begin("compiling kernels")
    of_each_kind = parts.decoder(ops, few)
    compile_together(lambda: run_texts(of_each_kind, ops, parts.rows, limits))
    phases.begin("loading kernels")
    run_texts(parts.decoder(ops), ops, parts.rows, limits)
    torch.cuda.synchronize()
    sizes = row_sizes(limits.max_rows, limits.max_step_tokens)
    ops.products.load(sizes, [*{linear.kind: linear for linear in parts.weights.linears}.values()])
    draws = TorchDraws(parts.rows, parts.parameters)
    return Built(
        parts.decoder(ops), draws, None, None, sizes, "the project's kernels of whole texts"
    )
