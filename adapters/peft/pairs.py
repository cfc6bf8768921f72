"""Checks the two tensors of one LoRA against what the config and the base say of it. Pure."""

from collections.abc import Mapping
from typing import NamedTuple

from adapters.peft.targeting import Targeting
from adapters.safetensors.header import FLOAT_DTYPES, TensorInfo
from adapters.violations import Findings

# Side (`A`, `B`) -> tensor.
Pair = Mapping[str, TensorInfo]


class Fit(NamedTuple):
    """A pair that is as it should be."""

    lora_rank: int
    scale: float


class PairChecks:
    """What is wrong is added to `findings`."""

    def __init__(self, matcher: Targeting, max_lora_rank: int, findings: Findings) -> None:
        self._matcher = matcher
        self._max_lora_rank = max_lora_rank
        self._findings = findings

    def fit(
        self, path: str, key: str, pair: Pair, inputs: int, outputs: int, experts: int = 1
    ) -> Fit | None:
        """None when something is wrong.

        path: in the base. key: what patterns see. inputs, outputs: of A and B. experts: how many
        share the pair, each with a rank of its own.
        """
        if len(pair) != 2:
            (side, tensor), *_ = pair.items()
            other = "B" if side == "A" else "A"
            message = f"{tensor.name} has no lora_{other} beside it"
            self._findings.add("lone_tensor", tensor.name, message)
            return None
        before = len(self._findings)
        lora_rank = self._matcher.lora_rank(key)
        if lora_rank > self._max_lora_rank:
            message = f"{path}: rank {lora_rank}; at most {self._max_lora_rank} is served"
            self._findings.add("rank_too_large", path, message)
        rows = lora_rank * experts
        said = f"rank {lora_rank}" + (f" of {experts} experts" if experts > 1 else "")
        self._check(pair["A"], (rows, inputs), said, axis=0)
        self._check(pair["B"], (outputs, rows), said, axis=1)
        if len(self._findings) != before:
            return None
        return Fit(lora_rank, self._matcher.config.scale(lora_rank, self._matcher.lora_alpha(key)))

    def _check(self, tensor: TensorInfo, expected: tuple[int, int], said: str, axis: int) -> None:
        """said: the config's rank, in words. axis: the dimension that is the rank."""
        name, found = tensor.name, self._findings
        if tensor.dtype not in FLOAT_DTYPES:
            message = f"{name}: dtype {tensor.dtype}, expected one of {sorted(FLOAT_DTYPES)}"
            found.add("unsupported_dtype", name, message)
        if tensor.shape == expected:
            return
        shapes = f"expected {list(expected)}, got {list(tensor.shape)}"
        if len(tensor.shape) == 2 and tensor.shape[1 - axis] == expected[1 - axis]:
            found.add("rank_mismatch", name, f"{name}: the config says {said}: {shapes}")
        else:
            found.add("shape_mismatch", name, f"{name}: {shapes}")
