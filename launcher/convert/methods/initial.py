"""LoRA that was trained on a base whose weights lack what B A was at the start.

Its change is `B A` less that product: twice the rank. Source: `pissa_init`, `olora_init` and
`subtract_mutated_init` of PEFT 0.21.
"""

import numpy as np

from loraplex.launcher.convert.methods.delta import Matrix, WeightChange, decompose
from loraplex.launcher.convert.methods.module import Module


def changed_base(module: Module) -> WeightChange:
    """`scale (B A - B_0 A_0)`, with the start from the initial adapter or from the base."""
    rank = module.rank
    a = module.read("lora_A.weight", rank, None)
    b = module.read("lora_B.weight", None, rank)
    if module.has_initial:
        first_a = module.read_initial("lora_A.weight", *a.shape) * module.scale
        first_b = module.read_initial("lora_B.weight", *b.shape)
    else:
        first_b, first_a = _drawn_from(module, rank)
    if len(first_b) != len(b) or first_a.shape[1] != a.shape[1]:
        raise module.unfit(f"B and A do not fit a module of {len(first_b)}, {first_a.shape[1]}")
    return WeightChange(np.hstack([b * module.scale, -first_b]), np.vstack([a, first_a]))


def _drawn_from(module: Module, rank: int) -> tuple[Matrix, Matrix]:
    """B_0 and `scale A_0`, where the base's weight alone decides them."""
    init = module.values.word("init_lora_weights")
    if init.lower() not in ("pissa", "olora"):
        raise module.unfit(
            f"init_lora_weights is {init}, whose start the base does not show: --initial FOLDER "
            "names the adapter as it was saved before the training"
        )
    weight = module.weight()
    if init.lower() == "olora":
        left, right = np.linalg.qr(weight)
        return left[:, :rank], right[:rank] * module.scale
    left, values, right = decompose(WeightChange(weight))
    return left[:, :rank] * values[:rank], right[:rank]
