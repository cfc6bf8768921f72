"""Adapters of PEFT's other methods, made by PEFT itself for tiny models."""

from pathlib import Path
from typing import Any

import peft
import torch
from peft import PeftModel, get_peft_model

from tests.server.model.hub_models import make_model

# Of attention and of the MLP: three shapes in Llama, and one with a bias in Qwen2.
TARGETS = ["q_proj", "k_proj", "down_proj", "up_proj"]
PEFT_CONFIGS: dict[str, tuple[str, dict[str, Any]]] = {
    "adalora": ("AdaLoraConfig", {"init_r": 6, "target_r": 4, "total_step": 10, "lora_alpha": 3}),
    "boft": ("BOFTConfig", {"boft_block_size": 8}),
    "c3a": ("C3AConfig", {"block_size": 16}),
    "fourierft": ("FourierFTConfig", {"n_frequency": 300, "scaling": 20.0}),
    "hra": ("HRAConfig", {"r": 4}),
    "hra_gs": ("HRAConfig", {"r": 4, "apply_GS": True}),
    "ia3": ("IA3Config", {"feedforward_modules": ["down_proj"]}),
    "loha": ("LoHaConfig", {"r": 3, "alpha": 5, "rank_pattern": {"k_proj": 2}}),
    "loha_saved": (
        "LoHaConfig",
        {"r": 2, "alpha": 5, "modules_to_save": ["lm_head", "model.norm"]},
    ),
    "loha_wide": ("LoHaConfig", {"r": 9, "alpha": 5, "alpha_pattern": {"up_proj": 3}}),
    "lokr": ("LoKrConfig", {"r": 2, "alpha": 3, "decompose_factor": 4}),
    "lokr_both": ("LoKrConfig", {"r": 2, "alpha": 3, "decompose_both": True}),
    "lokr_whole": ("LoKrConfig", {"r": 64, "alpha": 3}),
    "miss": ("MissConfig", {"r": 6}),
    "miss_bat": ("MissConfig", {"r": 16, "init_weights": "bat"}),
    "miss_mini": ("MissConfig", {"r": 4, "mini_r": 16, "init_weights": "mini"}),
    "oft": ("OFTConfig", {"oft_block_size": 8, "r": 0}),
    "oft_coft": ("OFTConfig", {"oft_block_size": 8, "r": 0, "coft": True, "eps": 0.05}),
    "oft_shared": (
        "OFTConfig",
        {"oft_block_size": 8, "r": 0, "block_share": True, "use_cayley_neumann": False},
    ),
    "randlora": ("RandLoraConfig", {"r": 5}),
    "vblora": ("VBLoRAConfig", {"r": 3, "num_vectors": 12, "vector_length": 16, "topk": 2}),
    "vblora_topk": (
        "VBLoRAConfig",
        {
            "r": 3,
            "num_vectors": 12,
            "vector_length": 16,
            "topk": 3,
            "save_only_topk_weights": True,
        },
    ),
    "vera": ("VeraConfig", {"r": 10}),
}
# The change does not depend on the start's random numbers, or the start is kept.
CHANGED_BASES = ["pissa", "olora", "pissa_niter_4"]


def made_by_peft(name: str, family: str, folder: Path) -> PeftModel:
    """The model, whose adapter `folder` then holds."""
    class_name, settings = PEFT_CONFIGS[name]
    config = getattr(peft, class_name)(target_modules=TARGETS, **settings)
    model = get_peft_model(make_model(family), config)
    disturb(model, seed=len(name))
    model.save_pretrained(folder)
    return model


def with_changed_base(init: str, family: str, folder: Path, initial: Path) -> PeftModel:
    """As `made_by_peft`; `initial` holds the adapter before its training."""
    config = peft.LoraConfig(
        r=4,
        lora_alpha=6,
        use_rslora=True,
        target_modules=TARGETS,
        init_lora_weights=init,
    )
    model = get_peft_model(make_model(family), config)
    model.save_pretrained(initial)
    disturb(model, seed=3)
    model.save_pretrained(folder)
    return model


def disturb(model: PeftModel, seed: int) -> None:
    """As if by training."""
    random = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                noise = torch.randn(parameter.shape, generator=random)
                parameter.add_(
                    noise * max(float(parameter.std()) if len(parameter) > 1 else 0, 0.1)
                )
    model.train(False)
