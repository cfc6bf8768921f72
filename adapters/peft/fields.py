"""Lists the keys of PEFT's LoraConfig and of trainers, and PEFT's other methods. Pure.

*Used*: part of the maths that is served. *Harmless*: no part of the result once trained. *Refused*:
changes the maths in a way that is not implemented, unless it has one of the values listed. A key in
none of the three is refused too, unless its value is empty.
"""

CONVERT = "`loraplex adapter convert` makes LoRA of it"
# What `loraplex adapter convert` turns into LoRA.
CONVERTED = frozenset(
    {
        "ADALORA",
        "BOFT",
        "C3A",
        "FOURIERFT",
        "HRA",
        "IA3",
        "LOHA",
        "LOKR",
        "MISS",
        "OFT",
        "RANDLORA",
        "VBLORA",
        "VERA",
    }
)
# What PEFT itself turns into LoRA, with the whole base in memory.
_SAVED_AS_LORA = frozenset(
    {"DELORA", "GRALORA", "HIRA", "PSOFT", "SHIRA", "TINYLORA", "UNILORA", "WAVEFT"}
)
# These change no weight of the base, or change with every text.
_NO_WEIGHTS = frozenset(
    {
        "ADAPTION_PROMPT",
        "CARTRIDGE",
        "CPT",
        "MULTITASK_PROMPT_TUNING",
        "POLY",
        "PREFIX_TUNING",
        "PROMPT_TUNING",
        "P_TUNING",
        "XLORA",
    }
)
# Values of `init_lora_weights` that take a part of the base's weights out: B A at the start.
_INITS_FROM_BASE = ("corda", "lora_ga", "olora", "pissa")
USED = frozenset(
    {
        "alora_invocation_tokens",
        "alpha_pattern",
        "base_model_name_or_path",
        "bias",
        "ensure_weight_tying",
        "exclude_modules",
        "fan_in_fan_out",
        "init_lora_weights",
        "layers_pattern",
        "layers_to_transform",
        "lora_alpha",
        "lora_bias",
        "modules_to_save",
        "peft_type",
        "r",
        "rank_pattern",
        "revision",
        "target_modules",
        "target_parameters",
        "task_type",
        "trainable_token_indices",
        "use_dora",
        "use_rslora",
    }
)

# The sub-configurations here speak of initialisation, and only for the value of
# `init_lora_weights` that goes with them, which is judged itself.
# PEFT of today does not read these: ms-swift writes `lora_dtype`, `lorap_emb_lr`, `lorap_lr_ratio`,
# axolotl `nvfp4_merge_aware`, and PEFT itself wrote `merge_weights` in 2023.
HARMLESS = frozenset(
    {
        "auto_mapping",
        "corda_config",
        "eva_config",
        "inference_mode",
        "loftq_config",
        "lora_dropout",
        "lora_dtype",
        "lorap_emb_lr",
        "lorap_lr_ratio",
        "megatron_core",
        "merge_weights",
        "nvfp4_merge_aware",
        "peft_version",
        "qalora_group_size",
        "runtime_config",
    }
)

# Key -> the values that leave plain LoRA. Sub-configurations are refused even when empty: PEFT
# turns `{}` into the defaults and switches the variant on.
REFUSED: dict[str, tuple[object, ...]] = {
    "arrow_config": (None,),
    "enable_lora": (None, []),
    "kasa_config": (None,),
    "layer_replication": (None, []),
    "lora_ga_config": (None,),
    "megatron_config": (None,),
    "monteclora_config": (None,),
    "swift_type": (None, "LORA"),
    "use_bdlora": (None, False),
    "use_qalora": (None, False),
    "velora_config": (None,),
}

# Values of `init_lora_weights` that leave the base's weights alone: what is saved is the whole
# result. With these B (MiCA: A) starts at zero, so a module without saved tensors changes nothing.
INIT_FROM_ZERO: tuple[object, ...] = (True, "gaussian", "eva", "mica")
# With these it starts at random: a module without saved tensors has no defined result.
INIT_RANDOM: tuple[object, ...] = (False, "orthogonal")
# Any other is refused: for `pissa`, `pissa_niter_N`, `olora`, `corda`, `loftq` and `lora_ga` PEFT
# changes the base's weights at every load. It subtracts the initial product, or quantises them.

UNUSED_VALUES: tuple[object, ...] = (None, False, 0, "", [], {})


def way_out(peft_type: object) -> str:
    """Advises what to do with an adapter whose `peft_type` is not LORA."""
    if not isinstance(peft_type, str):
        return "PEFT writes the method's name there"
    if peft_type in CONVERTED:
        return CONVERT
    if peft_type in _SAVED_AS_LORA:
        return "peft.save_as_lora makes LoRA of it"
    if peft_type in _NO_WEIGHTS:
        return "no LoRA is equal to it; train LoRA instead"
    return "merge it into its base with PEFT (merge_and_unload) and serve that model"


def takes_from_base(init: object) -> bool:
    """Whether this `init_lora_weights` leaves the base with other weights than it had."""
    return isinstance(init, str) and init.lower().startswith(_INITS_FROM_BASE)
