"""Known models' real widths, few layers and tokens of the vocabulary, on a GPU in bfloat16.

The error against float32 is held to that of transformers in bfloat16, on the same GPU.
"""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from loraplex.launcher.bench.engine.offline import SHIPPED
from loraplex.launcher.known_models import served_families
from loraplex.server.model.checkpoint.checkpoint import read_config
from loraplex.server.model.checkpoint.model_files import CONFIG_FILE
from loraplex.server.model.families.registry import read_model
from loraplex.server.model.ops.kernel_limits import unsupported
from loraplex.server.protocol import SamplingParams
from tests.kernels.batches import on_gpu
from tests.server.model.driver import EVERY_LOGPROB, Driver, Stream, generate
from tests.server.model.quantised.checkpoints import matrices

pytestmark = [*on_gpu, pytest.mark.filterwarnings("ignore")]
LAYERS, VOCAB, STEPS, WINDOW = 3, 2048, 8, 32
KINDS = ["sliding_attention", "full_attention", "sliding_attention"]
MIXED = ["linear_attention", "full_attention", "linear_attention"]
# A known model or a shape -> what its few layers are.
OF_FEW: dict[str, dict[str, Any]] = {
    # transformers reads the base of the rotation here alone.
    "dbrx": {"rope_parameters": {"rope_type": "default", "rope_theta": 500000.0}},
    "deepseek_v3": {"first_k_dense_replace": 1, "n_routed_experts": 32},
    "bamba": {"attn_layer_indices": [1]},
    "gemma-4-e4b": {
        "num_hidden_layers": 5,
        "layer_types": [*KINDS, *KINDS[:2]],
        "num_kv_shared_layers": 2,
        "vocab_size_per_layer_input": VOCAB,
    },
    "granitemoehybrid": {"layer_types": MIXED},
    "nemotron-3-nano-30b-a3b": {"layers_block_type": ["moe", "full_attention", "linear_attention"]},
    "olmo_hybrid": {"layer_types": MIXED},
    "nemotron_h": {"layers_block_type": ["linear_attention", "full_attention", "mlp"]},
}
LENGTHS = (1, 7, 40, 100, 200, 300)
# Their text part is another family's.
SAME_TEXT = {
    *(
        "gemma3",
        "gemma4",
        "gemma4_unified",
        "idefics3",
        "mistral3",
        "qwen2_5_vl",
        "qwen3_5",
        "qwen3_5_moe",
        "qwen3_vl",
    ),
    "smolvlm",
}
NAMES = [
    name
    for name, known in served_families().items()
    if known.config
    and name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    and name not in SAME_TEXT
    and read_model(known.config).is_causal  # `test_gpu_encoders.py` has the others
]
# Of a served family, with parts that its known model has not.
SHAPES = ["gemma-4-26b-a4b", "gemma-4-e4b", "nemotron-3-nano-30b-a3b"]
# Most error, in errors of transformers: what a sum in another order may change.
SLACK = 1.15


def config_of(name: str) -> dict[str, Any]:
    """A family's known model, or a shape that ships with the project."""
    if name not in SHAPES:
        return served_families()[name].config
    config: dict[str, Any] = json.loads((SHIPPED / name / CONFIG_FILE).read_text())
    return config


def made(name: str) -> PreTrainedModel:
    """In bfloat16, with windows that contexts leave."""
    known = dict(config_of(name))
    known.pop("quantization_config", None)
    changes: dict[str, Any] = {"num_hidden_layers": LAYERS, "vocab_size": VOCAB}
    if known.get("sliding_window") is not None:
        changes["sliding_window"] = WINDOW
        if hasattr(CONFIG_MAPPING[known["model_type"]](), "layer_types"):
            changes["layer_types"] = KINDS
    elif known.get("layer_types"):
        changes["layer_types"] = known["layer_types"][:LAYERS]
    if known.get("full_attention_interval"):
        changes["layer_types"] = MIXED
    changes |= OF_FEW.get(name, {})
    if known.get("attention_types"):
        changes["attention_types"] = [[["global", "local", "global"], 1]]
    changes |= {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
    config = AutoConfig.for_model(**{**known, **changes, "initializer_range": 0.03})
    torch.manual_seed(1)
    with torch.device("cuda"):
        made_of: Any = AutoModelForCausalLM
        model: PreTrainedModel = made_of.from_config(
            config, attn_implementation="eager", experts_implementation="eager"
        )
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            if "norm" in parameter_name:
                parameter.add_(torch.randn_like(parameter) * 0.1)
    model.train(False)
    return cast(model, torch.bfloat16)


def cast(model: PreTrainedModel, dtype: torch.dtype) -> PreTrainedModel:
    """Parameters alone: transformers keeps the rotation's frequencies in float32."""
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)
    model.config.dtype = dtype
    return model


def prompt(row: int) -> list[int]:
    generator = torch.Generator().manual_seed(row)
    return torch.randint(3, VOCAB, (LENGTHS[row],), generator=generator).tolist()


def forced(row: int) -> int:
    return 3 + row


def by_transformers(model: PreTrainedModel) -> torch.Tensor:
    """Log-probabilities `[sequences * STEPS, vocabulary]`."""
    found = []
    with torch.inference_mode():
        for row, length in enumerate(LENGTHS):
            ids = torch.tensor([prompt(row) + [forced(row)] * (STEPS - 1)], device="cuda")
            logits = model(ids).logits[0, length - 1 :]
            found.append(logits.float().log_softmax(-1).cpu())
    return torch.cat(found)


def by_the_gpu_path(folder: Path, **options: Any) -> torch.Tensor:
    memory: dict[str, Any] = {"kv_memory": 256 << 20, "adapter_memory": 16 << 20, "page_size": 16}
    options |= {"device": "cuda", "dtype": "bfloat16", "max_context": 1024}
    driver = Driver(folder, **memory, **options)
    device = torch.cuda.get_device_capability()
    why = unsupported(read_config(folder), "bfloat16", device)
    assert (driver.executor._graphs is None) == (why is not None), why
    streams = [
        Stream(
            driver,
            row,
            prompt(row),
            sampling=SamplingParams(
                temperature=0.0, logit_bias={forced(row): 1e4}, logprobs=EVERY_LOGPROB
            ),
        )
        for row in range(len(LENGTHS))
    ]
    generate(driver, streams, STEPS, 64)
    driver.close()
    rows = [found.top for stream in streams for found in stream.logprobs]
    return torch.tensor([[value for _, value in sorted(row)] for row in rows])


def round_to_fp8(model: PreTrainedModel) -> None:
    """The model, in float32, becomes one whose products have FP8 weights and inputs."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if ".experts." in name:
                parameter.copy_(by_token(parameter))
        for _, module in matrices(model):
            module.weight.copy_(by_token(module.weight))
            module.register_forward_pre_hook(lambda _module, args: (by_token(args[0]), *args[1:]))


def by_token(x: torch.Tensor) -> torch.Tensor:
    """Each row of `x` `[..., features]` in FP8 with its own scale, in the dtype of `x`."""
    scale = x.float().abs().amax(-1, keepdim=True) / torch.finfo(torch.float8_e4m3fn).max
    return ((x.float() / scale).to(torch.float8_e4m3fn).float() * scale).to(x.dtype)


@pytest.mark.parametrize("name", NAMES + SHAPES)
def test_the_error_is_that_of_transformers(name: str, tmp_path: Path) -> None:
    assert_near(made(name), tmp_path)


@pytest.mark.parametrize("name", ["llama", "qwen3", "qwen3_moe", "gemma3_text"])
def test_the_error_of_fp8_is_that_of_transformers_with_fp8(name: str, tmp_path: Path) -> None:
    assert_near(made(name), tmp_path, round_to_fp8, quantize="fp8")


def assert_near(
    model: PreTrainedModel,
    folder: Path,
    change: Callable[[PreTrainedModel], None] = lambda _model: None,
    **options: Any,
) -> None:
    """change: what transformers' model, in float32, becomes. options: of `by_the_gpu_path`."""
    model.save_pretrained(folder)
    change(cast(model, torch.float32))
    exact = by_transformers(model)
    rough = by_transformers(cast(model, torch.bfloat16))
    del model
    torch.cuda.empty_cache()
    found = by_the_gpu_path(folder, **options)
    shutil.rmtree(folder)  # of all models together they would be more than many disks hold
    error, theirs = (float((x - exact).square().mean().sqrt()) for x in (found, rough))
    print(f"error {error:.5f}, of transformers {theirs:.5f}, of {exact.std():.3f}")
    assert error <= SLACK * theirs
