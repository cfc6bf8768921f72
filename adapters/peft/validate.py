"""Judges an adapter's config and tensors against a base model; nothing unknown is ignored. Pure.

The result holds what PEFT would have loaded. Where PEFT drops a tensor with a warning, or changes
the base, the adapter is refused by name.
"""

from collections.abc import Iterable, Iterator

import msgspec

from adapters.base import BaseModule, BaseSpec, base_modules
from adapters.base_names import names_base, normal_name
from adapters.coverage import Coverage, Site, coverage_of
from adapters.manifest import SlabDtype
from adapters.peft.config import MAX_RANK, PeftConfig
from adapters.peft.sorted_tensors import sort_tensors
from adapters.peft.targeting import Targeting
from adapters.peft.tensor_names import NAMINGS, WHOLE, Naming, parse_tensor_name
from adapters.safetensors.header import FLOAT_DTYPES, TensorInfo
from adapters.safetensors.header import WEIGHTS_FILE as WEIGHTS_FILE
from adapters.violations import Findings, shown

MAX_ADAPTER_BYTES = 4 << 30
MAX_LORA_RANK = 256
MAX_STORE_BYTES = 200 << 30


class SlabRoom(msgspec.Struct, frozen=True):
    """The memory that packed adapters are served from. An adapter must fit into each part alone.

    device_bytes, host_bytes: options `adapter_memory` and `host_adapter_memory`.
    """

    dtype: SlabDtype
    extent_bytes: int
    device_bytes: int
    host_bytes: int


class AdapterLimits(msgspec.Struct, frozen=True):
    """What the operator allows.

    max_bytes: of one adapter's files. max_store_bytes: of a store's content and slabs together.
    allow_other_base: accept a config that names another base model, if the shapes fit.
    room: None = the packed size is not limited.
    """

    max_bytes: int = MAX_ADAPTER_BYTES
    max_lora_rank: int = MAX_LORA_RANK
    allow_other_base: bool = False
    max_store_bytes: int = MAX_STORE_BYTES
    room: SlabRoom | None = None


class ModuleLora(msgspec.Struct, frozen=True, gc=False):
    """LoRA of one module: `y += scale * B (A x)`.

    layer: 0-based, -1 for `embed_tokens` and `lm_head`. module: its short name.
    a: `[lora_rank, in_features]`; b: `[out_features, lora_rank]`.
    """

    layer: int
    module: str
    lora_rank: int
    scale: float
    a: TensorInfo
    b: TensorInfo


class LoraTensors(msgspec.Struct, frozen=True):
    """A validated adapter. modules: by layer, then by name.

    base_copies: module -> the base's own weights, saved beside the adapter; to be compared with
    `BaseSpec.embedding_digests` before the adapter is served, and otherwise not used.
    missing: targeted modules without tensors; they stay as the base has them.
    naming: how the adapter calls the modules.
    """

    config: PeftConfig
    modules: tuple[ModuleLora, ...]
    base_copies: tuple[tuple[str, TensorInfo], ...] = ()
    missing: tuple[Site, ...] = ()
    naming: Naming = WHOLE

    @property
    def sites(self) -> tuple[Site, ...]:
        """The targeted modules that have tensors."""
        return tuple((module.layer, module.module) for module in self.modules)

    @property
    def coverage(self) -> Coverage:
        return coverage_of(self.sites, self.missing)


def validate(
    config: PeftConfig,
    tensors: Iterable[TensorInfo],
    base: BaseSpec,
    limits: AdapterLimits,
    findings: Findings,
) -> LoraTensors | None:
    """The adapter's tensors in place; None when the config leaves the places open.

    Worth nothing unless `findings` is still empty afterwards.
    """
    targeting = check_config(config, base, limits, findings)
    return place_tensors(targeting, tensors, base, limits, findings)


def place_tensors(
    matcher: Targeting | None,
    tensors: Iterable[TensorInfo],
    base: BaseSpec,
    limits: AdapterLimits,
    findings: Findings,
) -> LoraTensors | None:
    """As `validate`. matcher: of a config that was checked; None = it cannot be read."""
    before = len(findings)
    found = sort_tensors(tensors, base, findings)
    if not found.pairs and len(findings) == before:
        findings.add("no_tensors", WEIGHTS_FILE, "the weights file has no LoRA tensors")
    if matcher is None or not matcher.is_sound:
        return None
    targeted = _targeted(matcher, base, found.naming)
    modules: list[ModuleLora] = []
    missing: list[Site] = []
    for module in base_modules(base):
        pair, spelled = found.pairs.get(module.path, {}), targeted.get(module.path)
        if pair and spelled is None:
            message = f"{module.path} has tensors but the config does not target it"
            findings.add("untargeted_tensor", next(iter(pair.values())).name, message)
        elif pair and spelled is not None:
            modules += _pair(module, pair, spelled, matcher, limits, findings)
        elif spelled is not None and matcher.config.starts_at_zero:
            missing.append((module.layer, module.name))
        elif spelled is not None:
            message = (
                f"{module.path} is targeted, has no tensors, and its initial values are random"
            )
            findings.add("missing_tensor", module.path, message)
    return LoraTensors(matcher.config, tuple(modules), found.copies, tuple(missing), found.naming)


def check_config(
    config: PeftConfig, base: BaseSpec, limits: AdapterLimits, findings: Findings
) -> Targeting:
    """Checks of a config before there are tensors, which show whose names it means."""
    check_base_name(config.base_model_name_or_path, base, limits, findings)
    matcher = Targeting(config, findings)
    if not matcher.is_sound:
        return matcher
    if not any(_all_targeted(matcher, base)) and (base.layer_modules or base.model_modules):
        message = "target_modules match no module of the base model"
        findings.add("unknown_target", "target_modules", message)
    _check_rank(matcher, base, limits, findings)
    tables = {module.path for module in base.model_modules.values()}
    if config.ensure_weight_tying and any(
        tables & targeted.keys() for targeted in _all_targeted(matcher, base)
    ):
        message = "ensure_weight_tying with embed_tokens or lm_head targeted is not supported"
        findings.add("unsupported_feature", "ensure_weight_tying", message)
    return matcher


def check_base_name(
    trained_for: str, base: BaseSpec, limits: AdapterLimits, findings: Findings
) -> None:
    if limits.allow_other_base or names_base(trained_for, base.names):
        return
    known = " or ".join(map(shown, base.names)) or "unnamed"
    unnamed = "" if normal_name(trained_for) else ", a path that does not end in a model's name"
    message = (
        f"the adapter was trained for {shown(trained_for)}{unnamed}; this base model is {known}. "
        "If both are the same model, --model-name adds the adapter's spelling to the base's names; "
        "--allow-other-base takes any name"
    )
    findings.add("wrong_base", "base_model_name_or_path", message)


def may_be_lora(tensor: TensorInfo) -> bool:
    """Whether its values count, judged by its name and dtype."""
    if tensor.dtype not in FLOAT_DTYPES:
        return False
    name = parse_tensor_name(tensor.name)
    return name is not None and bool(name.side)


def _targeted(matcher: Targeting, base: BaseSpec, naming: Naming) -> dict[str, str]:
    """Path of each module that the config targets -> what the trained model calls it."""
    head = base.model_modules.get("lm_head")
    targeted = {}
    for module in base_modules(base):
        spelled = naming.spelled(module.path)
        if spelled is not None and matcher.targets(spelled, is_output_head=module.shape == head):
            targeted[module.path] = spelled
    return targeted


def _all_targeted(matcher: Targeting, base: BaseSpec) -> Iterator[dict[str, str]]:
    """By every naming; lazily, as the first is enough for most adapters."""
    return (_targeted(matcher, base, naming) for naming in NAMINGS)


def _check_rank(
    matcher: Targeting, base: BaseSpec, limits: AdapterLimits, findings: Findings
) -> None:
    lowest = MAX_RANK + 1
    for targeted in _all_targeted(matcher, base):
        lowest = min((lowest, *map(matcher.lora_rank, targeted.values())))
        if lowest <= limits.max_lora_rank:
            return
    if lowest <= MAX_RANK:
        message = f"rank {lowest} or more everywhere; at most {limits.max_lora_rank} is served"
        findings.add("rank_too_large", "r", message)


def _pair(
    module: BaseModule,
    pair: dict[str, TensorInfo],
    spelled: str,
    matcher: Targeting,
    limits: AdapterLimits,
    findings: Findings,
) -> list[ModuleLora]:
    """spelled: what the trained model calls the module."""
    if len(pair) != 2:
        (side, tensor), *_ = pair.items()
        other = "B" if side == "A" else "A"
        findings.add("lone_tensor", tensor.name, f"{tensor.name} has no lora_{other} beside it")
        return []
    before = len(findings)
    lora_rank = matcher.lora_rank(spelled)
    if lora_rank > limits.max_lora_rank:
        message = f"{module.path}: rank {lora_rank}; at most {limits.max_lora_rank} is served"
        findings.add("rank_too_large", module.path, message)
    expected = {
        "A": (lora_rank, module.shape.in_features),
        "B": (module.shape.out_features, lora_rank),
    }
    for side, tensor in pair.items():
        _check_tensor(tensor, expected[side], axis=0 if side == "A" else 1, findings=findings)
    if len(findings) != before:
        return []
    scale = matcher.config.scale(lora_rank, matcher.lora_alpha(spelled))
    return [ModuleLora(module.layer, module.name, lora_rank, scale, pair["A"], pair["B"])]


def _check_tensor(
    tensor: TensorInfo, expected: tuple[int, int], axis: int, findings: Findings
) -> None:
    """axis: the dimension that is the rank."""
    if tensor.dtype not in FLOAT_DTYPES:
        message = f"{tensor.name}: dtype {tensor.dtype}, expected one of {sorted(FLOAT_DTYPES)}"
        findings.add("unsupported_dtype", tensor.name, message)
    if tensor.shape == expected:
        return
    shapes = f"expected {list(expected)}, got {list(tensor.shape)}"
    if len(tensor.shape) == 2 and tensor.shape[1 - axis] == expected[1 - axis]:
        message = f"{tensor.name}: the config says rank {expected[axis]}: {shapes}"
        findings.add("rank_mismatch", tensor.name, message)
    else:
        findings.add("shape_mismatch", tensor.name, f"{tensor.name}: {shapes}")
