"""Which kernels steps need that no start asks for: `python -m tests.server.model.late_kernels fa3`.

As on an H100 or H200, or (`fa2`) on an A100, or on an H100 with windows in all layers but the first
(`windows`), with experts (`experts`), with states (`states`) or with latents (`latents`). Tensors
are of the CPU: kernels are asked for, and none is compiled or launched, so that steps compute
nothing of use. Prints how many the start asks for, then each case with those that it asks for in
addition.
"""

import os

os.environ["TRITON_INTERPRET"] = "0"  # before Triton is imported

import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import triton
from peft import LoraConfig

from loraplex.server.kernels.launch.configs import read_configs
from loraplex.server.protocol import SamplingParams
from tests.kernels.compile_all import compile_for
from tests.server.model import fake_flashinfer
from tests.server.model.driver import Driver, Stream, generate
from tests.server.model.gpu_pair import replace_graphs
from tests.server.model.hub_models import add_adapter, make_model, save_model
from tests.server.model.slabs import pack

ALL = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
BASE, LAYERS, ODD, HEAD, EMBEDDING, NORMS = -1, 0, 1, 2, 3, 4
ADAPTERS = {
    LAYERS: LoraConfig(r=16, target_modules=list(ALL)),
    ODD: LoraConfig(r=5, target_modules=list(ALL)),
    HEAD: LoraConfig(r=8, target_modules=["lm_head"]),
    EMBEDDING: LoraConfig(r=8, target_modules=["embed_tokens", "q_proj"]),
    NORMS: LoraConfig(r=8, target_modules=["o_proj"], modules_to_save=["input_layernorm"]),
}
GREEDY = SamplingParams(temperature=0.0)
RANDOM = SamplingParams(temperature=0.8, top_p=0.9)
PENALISED = SamplingParams(temperature=0.8, repetition_penalty=1.2, logprobs=2)
SCORED = SamplingParams(temperature=0.0, logprobs=1, prompt_logprobs=1)
# Sequences, whose slots are taken in turn, tokens of each prompt, and what is asked for.
CASES: tuple[tuple[int, tuple[int, ...], int, SamplingParams], ...] = (
    *((count, (BASE,), 7, GREEDY) for count in (1, 4, 40, 200)),
    *((count, (LAYERS, ODD), 7, GREEDY) for count in (1, 4, 40, 200, 300)),
    *((count, (LAYERS, HEAD), 7, GREEDY) for count in (1, 3, 5, 40, 300)),
    *((count, (LAYERS, EMBEDDING), 7, GREEDY) for count in (1, 5, 40, 300)),
    *((1, (LAYERS,), tokens, GREEDY) for tokens in (100, 200)),
    *((count, (BASE, NORMS), 7, GREEDY) for count in (2, 4, 40)),
    *((3, (BASE, LAYERS, ODD), 7, wanted) for wanted in (RANDOM, PENALISED, SCORED)),
    *((80, slots, 100, GREEDY) for slots in ((BASE,), (LAYERS,), (LAYERS, ODD))),
    (80, (BASE, LAYERS, ODD, HEAD, EMBEDDING), 100, SCORED),
)
# An architecture, processors, FlashInfer's backend and a model.
GPUS = {
    "fa3": ("sm90", 132, "fa3", "llama3"),
    "fa2": ("sm80", 108, "fa2", "llama3"),
    "windows": ("sm90", 132, "fa3", "qwen2-window"),
    "experts": ("sm90", 132, "fa3", "mixtral"),
    "states": ("sm90", 132, "fa3", "qwen3.5"),
    "latents": ("sm90", 132, "fa3", "youtu"),
    "rounded weights": ("sm90", 132, "fa3", "ernie-moe"),
    "shared": ("sm90", 132, "fa3", "gemma4-inputs"),
}
asked: set[str] = set()


def note(*, key: str, fn: Any, **_: object) -> bool:
    """For Triton: true says that a kernel need not be compiled."""
    asked.add(f"{fn.name} {key}")
    return True


def zeroed(make: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Nobody writes what kernels should have written."""
    return lambda *shape, **options: make(*shape, **options).zero_()


def started(folder: Path, gpu: str, patch: pytest.MonkeyPatch) -> Driver:
    """On what stands for a GPU, with all adapters in their slots. gpu: of GPUS."""
    arch, processors, backend, variant = GPUS[gpu]
    fake_flashinfer.install(patch)
    from loraplex.server.model.graphs import fast_path, warm_up
    from loraplex.server.model.graphs.token_graphs import DecodeGraphs, TokenGraphs
    from loraplex.server.model.ops.attention import attention_cuda
    from loraplex.server.model.ops.cuda import ops_cuda

    warm_sizes, warm_decodes = warm_up.warm_sizes, warm_up.warm_decodes
    rehearsals = [(kind, kind.rehearse) for kind in (DecodeGraphs, TokenGraphs)]
    replace_graphs(patch)
    patch.setattr(warm_up, "warm_sizes", warm_sizes)
    patch.setattr(warm_up, "warm_decodes", warm_decodes)
    for kind, rehearse in rehearsals:
        patch.setattr(kind, "rehearse", rehearse)
    for module in (attention_cuda, fast_path):
        patch.setattr(module, "prompt_backend", lambda _: backend)
    configs = read_configs(arch, processors, programmatic_launch=arch == "sm90")
    patch.setattr(ops_cuda, "load_configs", lambda *_, **__: configs)
    # Nor need what is no kernel of ours be computed.
    patch.setattr(fake_flashinfer, "_attend", lambda q, *_: torch.zeros_like(q))
    patch.setattr(torch, "mm", lambda x, w, *, out: out.zero_())
    for owner, name in ((torch, "empty"), (torch, "empty_like"), (torch.Tensor, "new_empty")):
        patch.setattr(owner, name, zeroed(getattr(owner, name)))
    sizes: dict[str, Any] = {
        "hidden_size": 256,
        "intermediate_size": 384,
        "head_dim": 64,
        "num_hidden_layers": 2,
    }
    if gpu == "states":
        sizes["layer_types"] = ["linear_attention", "full_attention"]
    if gpu == "latents":
        del sizes["head_dim"]
        sizes |= {
            "q_lora_rank": 128,
            "kv_lora_rank": 64,
            "qk_nope_head_dim": 48,
            "qk_rope_head_dim": 32,
            "v_head_dim": 64,
        }
    if gpu == "shared":
        sizes |= {
            "num_hidden_layers": 4,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
            "num_kv_shared_layers": 2,
            "global_head_dim": 128,
        }
    sizes["max_position_embeddings"] = 4096
    save_model(make_model(variant, **sizes), folder)
    memory: dict[str, Any] = {
        "kv_memory": 512 << 20,
        "adapter_memory": 64 << 20,
        "host_arena_bytes": 32 << 20,
    }
    limits: dict[str, Any] = {"page_size": 16, "max_running": 512, "max_step_tokens": 8192}
    if gpu == "states":
        limits["max_draft"] = 4
    driver = Driver(folder, dtype="bfloat16", **memory, **limits)
    first = 0
    for slot, adapter in ADAPTERS.items():
        model = add_adapter(make_model(variant, **sizes), "one", adapter, slot)
        layout, slab = pack(model, "one", dtype="bfloat16")
        assert driver.load(slot, layout, slab, first).error is None
        first += sum(layout.runs)
    return driver


def serve(
    driver: Driver, count: int, slots: Sequence[int], prompt: int, sampling: SamplingParams
) -> None:
    streams = [
        Stream(driver, row, [3] * prompt, slot=slots[row % len(slots)], sampling=sampling, seed=row)
        for row in range(count)
    ]
    generate(driver, streams, 3, prompt)
    for stream in streams:
        stream.free()


def main() -> int:
    gpu = sys.argv[1]
    compile_for(int(GPUS[gpu][0].removeprefix("sm")))
    triton.knobs.runtime.jit_cache_hook = note
    with pytest.MonkeyPatch.context() as patch, tempfile.TemporaryDirectory() as folder:
        driver = started(Path(folder), gpu, patch)
        print("start", len(asked))
        for case in CASES:
            known = set(asked)
            serve(driver, *case)
            print("late", *case[:3], *sorted(asked - known))
        driver.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
