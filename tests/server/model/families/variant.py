"""The form of a row of parity's table, and what rows share."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from peft import LoraConfig

SEVEN = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
YARN_ROPE = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 64,
}


def no_others() -> Mapping[str, LoraConfig]:
    return {}


def on_experts(
    block: str = "mlp", router: str = "gate", up: str = "gate_up_proj"
) -> Mapping[str, LoraConfig]:
    """PEFT wants the same tensors in all adapters of a model, and no name that a module has."""
    names = (f"experts.{up}", "experts.down_proj", f"{router}.weight")
    tensors = [f"{block}.{name}" if block else name for name in names]
    return {
        "sparse": LoraConfig(r=3, lora_alpha=5, target_modules=[], target_parameters=tensors),
        "sparse_and_attention": LoraConfig(
            r=8,
            lora_alpha=3,
            use_rslora=True,
            target_modules=["q_proj", "o_proj"],
            target_parameters=tensors,
            rank_pattern={"experts.down_proj": 2, rf"layers\.0\..*{up}": 1},
            alpha_pattern={rf"layers\.2\..*{up}": 7},
        ),
    }


class Variant(NamedTuple):
    """config, model: transformers' classes. settings: what differs from `hub_models.SIZES`.

    targets: the modules of a layer that adapters may change, the MLP's last behind all others.
    excluded: a pattern of modules that no adapter changes.
    others: adapters of this variant alone, by name, beside those of the zoo.
    is_adapted: False where another row of the same modules has adapters, which then run there.
    is_brief: whether an ordinary run tries its base alone, in chunks.
    beside: further modules, which PEFT does not wrap beside experts of the same names.
    embedding: its name.
    """

    config: Callable[..., Any]
    model: Callable[..., Any]
    settings: Mapping[str, Any] = {}
    targets: tuple[str, ...] = SEVEN
    excluded: str | None = None
    others: Callable[[], Mapping[str, LoraConfig]] = no_others
    is_adapted: bool = True
    is_brief: bool = False
    beside: tuple[str, ...] = ()
    embedding: str = "embed_tokens"


# The other ways to compute experts know no float64.
EXPERTS: dict[str, Any] = {"experts_implementation": "eager", "num_experts_per_tok": 3}


def of(family: Variant, *, is_adapted: bool = True, **settings: Any) -> Variant:
    return family._replace(settings={**family.settings, **settings}, is_adapted=is_adapted)
