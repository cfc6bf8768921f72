"""Judges an adapter's config and tensors against a base model; nothing unknown is ignored. Pure.

The result holds what PEFT would have loaded; where PEFT drops a tensor with a warning, or changes
the base, the adapter is refused by name.
"""

import re
from collections.abc import Iterable

import msgspec

from adapters.base import BaseSpec, ModuleShape, module_path
from adapters.base_names import names_base, normal_name
from adapters.coverage import Coverage, Site, coverage_of
from adapters.header import FLOAT_DTYPES, TensorInfo
from adapters.manifest import SlabDtype
from adapters.peft_format import PeftConfig
from adapters.targeting import Targeting
from adapters.violations import Findings, shown

WEIGHTS_FILE = "adapter_model.safetensors"
MAX_ADAPTER_BYTES = 4 << 30
MAX_LORA_RANK = 256
MAX_STORE_BYTES = 200 << 30

# PEFT names tensors `<prefix><module>.lora_A.weight`, and takes `lora_A.default.weight` too when it
# loads an adapter under its default name. Embeddings hold parameters, hence no `.weight`.
_LORA_NAME = re.compile(
    r"base_model\.model\.(?P<path>.+)\.lora_(?P<embedding>embedding_)?(?P<side>[AB])"
    r"(?:\.default)?(?P<weight>\.weight)?"
)
_BASE_COPY = re.compile(r"base_model\.model\.(?P<path>.+?)(?:\.base_layer)?\.weight")
_LAYER = re.compile(r"model\.layers\.(?P<layer>0|[1-9][0-9]{0,5})\.(?P<path>.+)")


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
    """

    config: PeftConfig
    modules: tuple[ModuleLora, ...]
    base_copies: tuple[tuple[str, TensorInfo], ...] = ()
    missing: tuple[Site, ...] = ()

    @property
    def sites(self) -> tuple[Site, ...]:
        """The targeted modules that have tensors."""
        return tuple((module.layer, module.module) for module in self.modules)

    @property
    def coverage(self) -> Coverage:
        return coverage_of(self.sites, self.missing)


class _Module(msgspec.Struct, frozen=True):
    layer: int
    name: str
    path: str
    shape: ModuleShape


def validate(
    config: PeftConfig,
    tensors: Iterable[TensorInfo],
    base: BaseSpec,
    limits: AdapterLimits,
    findings: Findings,
) -> LoraTensors | None:
    """The adapter's tensors in place; None when the config does not tell where.

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
    table = {module.path: module for module in _modules(base)}
    sides, copies = _sort_tensors(tensors, base, table, findings)
    if not sides and len(findings) == before:
        findings.add("no_tensors", WEIGHTS_FILE, "the weights file has no LoRA tensors")
    if matcher is None or not matcher.is_sound:
        return None
    config = matcher.config
    targeted = _targeted(matcher, base)
    modules: list[ModuleLora] = []
    missing: list[Site] = []
    for path, module in table.items():
        pair = sides.get(path, {})
        if pair and path not in targeted:
            message = f"{path} has tensors but the config does not target it"
            findings.add("untargeted_tensor", next(iter(pair.values())).name, message)
        elif pair:
            modules += _pair(module, pair, config, matcher, limits, findings)
        elif path in targeted and config.starts_at_zero:
            missing.append((module.layer, module.name))
        elif path in targeted:
            message = f"{path} is targeted, has no tensors, and its initial values are random"
            findings.add("missing_tensor", path, message)
    return LoraTensors(config, tuple(modules), tuple(copies), tuple(missing))


def check_config(
    config: PeftConfig, base: BaseSpec, limits: AdapterLimits, findings: Findings
) -> Targeting:
    """What can be told of a config before there are tensors."""
    check_base_name(config.base_model_name_or_path, base, limits, findings)
    matcher = Targeting(config, findings)
    targeted = _targeted(matcher, base) if matcher.is_sound else set()
    if matcher.is_sound and not targeted and (base.layer_modules or base.model_modules):
        message = "target_modules match no module of the base model"
        findings.add("unknown_target", "target_modules", message)
    lowest = min(map(matcher.lora_rank, targeted), default=0)
    if lowest > limits.max_lora_rank:
        message = f"rank {lowest} or more everywhere; at most {limits.max_lora_rank} is served"
        findings.add("rank_too_large", "r", message)
    if config.ensure_weight_tying and any(m.path in targeted for m in base.model_modules.values()):
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
    """Whether its values count, as far as its name and dtype tell."""
    return tensor.dtype in FLOAT_DTYPES and _LORA_NAME.fullmatch(tensor.name) is not None


def _modules(base: BaseSpec) -> Iterable[_Module]:
    for layer in range(base.num_layers):
        for name, shape in base.layer_modules.items():
            yield _Module(layer, name, module_path(shape, layer), shape)
    for name, shape in base.model_modules.items():
        yield _Module(-1, name, shape.path, shape)


def _targeted(matcher: Targeting, base: BaseSpec) -> set[str]:
    """Paths of the modules that the config targets."""
    head = base.model_modules.get("lm_head")
    return {
        module.path
        for module in _modules(base)
        if matcher.targets(module.path, is_output_head=module.shape == head)
    }


def _sort_tensors(
    tensors: Iterable[TensorInfo],
    base: BaseSpec,
    table: dict[str, _Module],
    findings: Findings,
) -> tuple[dict[str, dict[str, TensorInfo]], list[tuple[str, TensorInfo]]]:
    """Path -> side (`A`, `B`) -> tensor; and copies of the base's weights."""
    sides: dict[str, dict[str, TensorInfo]] = {}
    copies: list[tuple[str, TensorInfo]] = []
    for tensor in tensors:
        found = _LORA_NAME.fullmatch(tensor.name)
        module = table.get(found["path"]) if found else None
        if found is None or module is None:
            copy = _BASE_COPY.fullmatch(tensor.name)
            copied = table.get(copy["path"]) if copy and not found else None
            if copied is not None and copied.layer < 0:
                if _is_comparable(copied, tensor, base, findings):
                    copies.append((copied.name, tensor))
            else:
                findings.add(*_unknown(tensor.name, base))
            continue
        is_embedding = module.name == "embed_tokens"
        if is_embedding is not bool(found["embedding"]) or is_embedding is bool(found["weight"]):
            kind = "lora_embedding_A/B" if is_embedding else "lora_A/B.weight"
            message = f"{tensor.name}: LoRA of {module.path} is stored as {kind}"
            findings.add("misplaced_tensor", tensor.name, message)
        elif found["side"] in sides.setdefault(module.path, {}):
            message = f"{tensor.name}: the same tensor is stored twice"
            findings.add("duplicate_tensor", tensor.name, message)
        else:
            sides[module.path][found["side"]] = tensor
    return sides, copies


def _unknown(name: str, base: BaseSpec) -> tuple[str, str, str]:
    found = _LORA_NAME.fullmatch(name)
    layer = _LAYER.fullmatch(found["path"]) if found else None
    if layer and int(layer["layer"]) >= base.num_layers:
        message = f"{name}: the base model has {base.num_layers} layers"
        return "layer_out_of_range", name, message
    if found:
        return "unknown_module", name, f"{name}: the base model has no module {found['path']}"
    expected = "expected names such as base_model.model.MODULE.lora_A.weight"
    message = f"{name}: not a tensor of plain LoRA on this base model; {expected}"
    return "unknown_tensor", name, message


def _is_comparable(module: _Module, tensor: TensorInfo, base: BaseSpec, findings: Findings) -> bool:
    """Whether a table saved beside the adapter can be compared with the base's own, here or where
    the base is known."""
    rows, columns = base.vocab_size, base.hidden_size
    if tensor.shape != (rows, columns):
        message = f"{tensor.name}: {list(tensor.shape)} resizes the base's [{rows}, {columns}]"
        findings.add("resized_embeddings", tensor.name, message)
        return False
    known = base.is_inferred or base.embedding_digests.get(module.name)
    if tensor.dtype not in FLOAT_DTYPES or not known:
        message = (
            f"{tensor.name}: replaces weights of the base model; save the adapter with "
            "save_embedding_layers=False"
        )
        findings.add("base_weights_included", tensor.name, message)
        return False
    return True


def _pair(
    module: _Module,
    pair: dict[str, TensorInfo],
    config: PeftConfig,
    matcher: Targeting,
    limits: AdapterLimits,
    findings: Findings,
) -> list[ModuleLora]:
    if len(pair) != 2:
        (side, tensor), *_ = pair.items()
        other = "B" if side == "A" else "A"
        findings.add("lone_tensor", tensor.name, f"{tensor.name} has no lora_{other} beside it")
        return []
    before = len(findings)
    lora_rank = matcher.lora_rank(module.path)
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
    scale = config.scale(lora_rank, matcher.lora_alpha(module.path))
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
