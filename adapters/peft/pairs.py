"""Checks the tensors of one LoRA against what the config and the base say of it. Pure."""

from collections.abc import Mapping
from typing import NamedTuple

from loraplex.adapters.peft.targeting import Targeting
from loraplex.adapters.safetensors.header import FLOAT_DTYPES, TensorInfo
from loraplex.adapters.violations import Findings

# Side -> tensor.
Pair = Mapping[str, TensorInfo]


# As what each side is stored.
_STORED = {"A": "lora_A", "B": "lora_B", "M": "lora_magnitude_vector", "b": "lora_B.bias"}


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
        if not self._is_whole(pair):
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
        for side in ("M", "b"):
            if side in pair:
                self.check_outputs(pair[side], outputs)
        if len(self._findings) != before:
            return None
        return Fit(lora_rank, self._matcher.config.scale(lora_rank, self._matcher.lora_alpha(key)))

    def _is_whole(self, pair: Pair) -> bool:
        """Whether the tensors are those that the config speaks of."""
        config = self._matcher.config
        switches = {"M": ("use_dora", config.use_dora), "b": ("lora_bias", config.lora_bias)}
        needed = ["A", "B", *(side for side, (_, is_on) in switches.items() if is_on)]
        lacking = [_STORED[side] for side in needed if side not in pair]
        first = next(iter(pair.values()))
        if lacking:
            message = f"{first.name} has no {' and no '.join(lacking)} beside it"
            self._findings.add("lone_tensor", first.name, message)
        surplus = [side for side in switches if side in pair and side not in needed]
        for side in surplus:
            name, key = pair[side].name, switches[side][0]
            message = f"{name}: the config does not switch {key} on"
            self._findings.add("unknown_tensor", name, message)
        return not lacking and not surplus

    def check_outputs(self, tensor: TensorInfo, outputs: int) -> None:
        """Of a tensor with a number for each output."""
        self._check_dtype(tensor)
        if tensor.shape != (outputs,):
            message = f"{tensor.name}: expected {[outputs]}, got {list(tensor.shape)}"
            self._findings.add("shape_mismatch", tensor.name, message)

    def _check_dtype(self, tensor: TensorInfo) -> None:
        if tensor.dtype not in FLOAT_DTYPES:
            expected = f"expected one of {sorted(FLOAT_DTYPES)}"
            message = f"{tensor.name}: dtype {tensor.dtype}, {expected}"
            self._findings.add("unsupported_dtype", tensor.name, message)

    def _check(self, tensor: TensorInfo, expected: tuple[int, int], said: str, axis: int) -> None:
        """said: the config's rank, in words. axis: the dimension that is the rank."""
        name, found = tensor.name, self._findings
        self._check_dtype(tensor)
        if tensor.shape == expected:
            return
        shapes = f"expected {list(expected)}, got {list(tensor.shape)}"
        if len(tensor.shape) == 2 and tensor.shape[1 - axis] == expected[1 - axis]:
            found.add("rank_mismatch", name, f"{name}: the config says {said}: {shapes}")
        else:
            found.add("shape_mismatch", name, f"{name}: {shapes}")
