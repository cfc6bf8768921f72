"""The methods that are converted: the formula of each, its tensors and its config's keys. Pure."""

from collections.abc import Callable, Mapping
from typing import NamedTuple

from loraplex.adapters.peft.fields import HARMLESS
from loraplex.adapters.peft.methods import takes_from_base, way_out
from loraplex.adapters.violations import shown
from loraplex.launcher.convert.methods import products, sums
from loraplex.launcher.convert.methods.delta import WeightChange
from loraplex.launcher.convert.methods.initial import changed_base
from loraplex.launcher.convert.methods.module import Module
from loraplex.launcher.convert.plan import refusal

# What every method may say; besides, what has no part in the result once trained.
_COMMON = HARMLESS.union(
    {
        "alpha_pattern",
        "base_model_name_or_path",
        "bias",
        "exclude_modules",
        "fan_in_fan_out",
        "init_weights",
        "layers_pattern",
        "layers_to_transform",
        "modules_to_save",
        "peft_type",
        "r",
        "rank_pattern",
        "revision",
        "target_modules",
        "task_type",
    }
)


class Kind(NamedTuple):
    """delta: the formula. tensors: names after a module's path. shared: names without a path.

    keys: of the config, beside those that every method has.
    """

    delta: Callable[[Module], WeightChange]
    tensors: frozenset[str]
    keys: frozenset[str]
    shared: frozenset[str] = frozenset()


def _kind(
    delta: Callable[[Module], WeightChange], tensors: str, keys: str, shared: str = ""
) -> Kind:
    return Kind(delta, *(frozenset(names.split()) for names in (tensors, keys, shared)))


_LYCORIS = "alpha rank_dropout module_dropout use_effective_conv2d"
KINDS = {
    "ADALORA": _kind(
        sums.adalora,
        "lora_A lora_B lora_E",
        "target_r init_r tinit tfinal deltaT beta1 beta2 orth_reg_weight total_step lora_alpha "
        "init_lora_weights",
    ),
    "BOFT": _kind(
        products.boft,
        "boft_R boft_s",
        "boft_block_size boft_block_num boft_n_butterfly_factor boft_dropout",
    ),
    "C3A": _kind(sums.c3a, "c3a_kernel", "block_size block_size_pattern"),
    "FOURIERFT": _kind(
        sums.fourierft,
        "fourierft_spectrum",
        "n_frequency scaling random_loc_seed n_frequency_pattern",
    ),
    "HRA": _kind(products.hra, "hra_u", "apply_GS"),
    "IA3": _kind(products.ia3, "ia3_l", "feedforward_modules init_ia3_weights"),
    "LOHA": _kind(sums.loha, "hada_w1_a hada_w1_b hada_w2_a hada_w2_b hada_t1 hada_t2", _LYCORIS),
    "LOKR": _kind(
        sums.lokr,
        "lokr_w1 lokr_w1_a lokr_w1_b lokr_w2 lokr_w2_a lokr_w2_b lokr_t2",
        f"{_LYCORIS} decompose_both decompose_factor rank_dropout_scale",
    ),
    "MISS": _kind(sums.miss, "miss_block", "miss_dropout mini_r"),
    "OFT": _kind(
        products.oft,
        "oft_R.weight",
        "oft_block_size module_dropout coft eps block_share use_cayley_neumann "
        "num_cayley_neumann_terms",
    ),
    "RANDLORA": _kind(
        sums.randlora,
        "randlora_lambda randlora_gamma randlora_A randlora_B",
        "projection_prng_key save_projection sparse very_sparse randlora_dropout randlora_alpha",
        "randlora_A randlora_B",
    ),
    "VBLORA": _kind(
        sums.vblora,
        "vblora_logits_A vblora_logits_B vblora_logits_A_topk_indices vblora_logits_A_topk_weights "
        "vblora_logits_B_topk_indices vblora_logits_B_topk_weights",
        "num_vectors vector_length topk save_only_topk_weights vblora_dropout "
        "init_vector_bank_bound init_logits_std",
        "vblora_vector_bank",
    ),
    "VERA": _kind(
        sums.vera,
        "vera_lambda_b vera_lambda_d",
        "projection_prng_key save_projection vera_dropout d_initial",
        "vera_A vera_B",
    ),
}
# LoRA on a base that the start of the training has changed. Its keys are those of LoRA.
_CHANGED_BASE = _kind(changed_base, "lora_A.weight lora_B.weight", "")


def kind_of(config: Mapping[str, object]) -> Kind | None:
    """None = LoRA as it is served, or no config of PEFT. Raises AdapterError for other methods."""
    peft_type = config.get("peft_type")
    if peft_type is None:
        return None
    if peft_type == "LORA":
        return _CHANGED_BASE if takes_from_base(config.get("init_lora_weights")) else None
    kind = KINDS.get(peft_type) if isinstance(peft_type, str) else None
    if kind is None:
        raise refusal(f"peft_type {shown(peft_type)} is not converted: {way_out(peft_type)}")
    return kind


def takes_initial(kind: Kind) -> bool:
    """Whether the adapter as it was before the training has a part in the formula."""
    return kind is _CHANGED_BASE


def check_keys(kind: Kind, config: Mapping[str, object]) -> None:
    """Raises AdapterError for a key that may change the maths in a way that is not known."""
    if kind is _CHANGED_BASE:
        return  # read as any LoRA's
    for key, value in config.items():
        if (
            key not in _COMMON
            and key not in kind.keys
            and value not in (None, False, "", 0, [], {})
        ):
            raise refusal(f"unknown key {shown(key)} is set to {shown(value)}")
    bias = config.get("bias", "none")
    if bias not in (None, "none"):
        raise refusal(
            f"bias is {shown(bias)}: trained biases beside another method than LoRA are not "
            "converted; merge the adapter into its base with PEFT and serve that model"
        )
