"""PEFT's methods besides LoRA, and what to do with an adapter of each. Pure."""

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


def way_out(peft_type: object) -> str:
    """What to do with an adapter whose `peft_type` is not LORA."""
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
