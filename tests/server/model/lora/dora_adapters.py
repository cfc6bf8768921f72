"""Adapters with DoRA, and a plain one beside them."""

from peft import LoraConfig

from tests.server.model.families.variants import Variant


def dora_adapters(variant: Variant) -> dict[str, LoraConfig]:
    names = variant.targets
    adapters = {
        "plain": LoraConfig(r=4, lora_alpha=8, target_modules=[*names]),
        "dora": LoraConfig(r=3, lora_alpha=6, target_modules=[*names], use_dora=True),
        "dora_few": LoraConfig(
            r=8,
            lora_alpha=6,
            target_modules=[names[0], names[-1]],
            use_dora=True,
            use_rslora=True,
            rank_pattern={names[-1]: 5},
            layers_to_transform=[1],
        ),
        "dora_tables": LoraConfig(
            r=8, lora_alpha=6, target_modules=["embed_tokens", "lm_head", names[-2]], use_dora=True
        ),
    }
    for config in adapters.values():
        config.exclude_modules = variant.excluded
    return adapters
