"""Quantised models with adapters: as transformers and PEFT with the same values in float32."""

from pathlib import Path
from typing import Any

import pytest

from tests.grids import beyond, sparse
from tests.server.model.adapter_zoo import zoo_of
from tests.server.model.driver import Driver
from tests.server.model.families.parity import assert_parity_with
from tests.server.model.families.variants import VARIANTS
from tests.server.model.hub_models import make_model
from tests.server.model.quantised.checkpoints import change_config, save_quantised
from tests.server.model.quantised.formats import FORMATS

pytestmark = [
    pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning"),
    # PEFT compares patterns with modules alone, though they hold for parameters too.
    pytest.mark.filterwarnings("ignore:The following .*_pattern keys:RuntimeWarning"),
]

# A row of parity's table -> what differs from it: widths that every form can hold.
MODELS: dict[str, dict[str, Any]] = {
    "llama3": {},
    "qwen2": {},  # with biases
    "phi3": {},  # whose checkpoint holds q, k and v in one matrix
    "gemma3": {"head_dim": 16},
    "youtu": {  # whose attention is to latents, in floating point of one matrix
        **dict.fromkeys(("q_lora_rank", "kv_lora_rank"), 32),
        **dict.fromkeys(("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"), 16),
    },
    "gpt-neox": {"hidden_size": 64, "rotary_pct": 0.5},  # whose checkpoint holds heads in turn
}
# One format of each layout for each model, and every format for one.
FEW = ["fp8-block", "ct-int8-zeros", "awq", "gptq-order", "nf4-nested"]
ADAPTERS = ("rank3_rslora", "rank24_patterns", "rank64_everything", "missing_layers")
ROWS = [
    *(("llama3", form, ADAPTERS if form in FEW else ADAPTERS[2:3]) for form in FORMATS),
    *beyond(0, [("llama3", form, ADAPTERS) for form in FORMATS if form not in FEW]),
    *sparse([row for row in MODELS if row != "llama3"], FEW, [ADAPTERS]),
]


@pytest.mark.parametrize(("row", "form", "adapters"), ROWS)
def test_with_mixed_adapters(
    row: str, form: str, adapters: tuple[str, ...], tmp_path: Path
) -> None:
    base = make_model(row, **MODELS[row])
    save_quantised(base, tmp_path, FORMATS[form])
    zoo = {n: config for n, config in zoo_of(VARIANTS[row]).items() if n in adapters}
    assert_parity_with(base, zoo, Driver(tmp_path, activations="bf16"))


# A row of parity's table -> widths that every form can hold, and modules that published checkpoints
# list as not quantised.
SKIPPING: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "qwen3.5": (
        {"linear_value_head_dim": 16},
        tuple(f"linear_attn.{name}" for name in ("in_proj_qkv", "in_proj_z", "out_proj")),
    ),
    "lfm2": ({"block_multiple_of": 32}, ("conv.in_proj", "conv.out_proj")),
    "granite-h": ({"mamba_d_state": 16}, ("mamba.in_proj", "mamba.out_proj")),
}
GATES = ("linear_attn.in_proj_b", "linear_attn.in_proj_a")


@pytest.mark.parametrize(
    ("form", "row", "gates_alone"),
    sparse(["ct-int4-group", "fp8-block"], [*SKIPPING], [False, True]),
)
def test_mixers_that_stay_as_they_are(
    form: str, row: str, gates_alone: bool, tmp_path: Path
) -> None:
    widths, modules = SKIPPING[row]
    skipped = GATES if gates_alone else (*modules, *GATES)
    base = make_model(row, **widths)
    save_quantised(base, tmp_path, FORMATS[form], skipped)
    names = [f"re:.*{name}" for name in skipped]
    config = {**FORMATS[form].config, "ignore": names, "modules_to_not_convert": names}
    change_config(tmp_path, quantization_config=config)
    zoo = {n: config for n, config in zoo_of(VARIANTS[row]).items() if n in ADAPTERS}
    assert_parity_with(base, zoo, Driver(tmp_path, activations="bf16"))
