"""An adapter of another method to LoRA: module by module, to a stated error."""

import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

import msgspec
import numpy as np

from loraplex.adapters.peft.config import parse_config
from loraplex.adapters.peft.targeting import Targeting
from loraplex.adapters.peft.tensor_names import NAMINGS, WHOLE
from loraplex.adapters.safetensors.file import Weights, open_weights
from loraplex.adapters.safetensors.header import WEIGHTS_FILE, TensorInfo
from loraplex.adapters.violations import Findings, shown
from loraplex.launcher.convert.lora_config import PREFIX, lora_config
from loraplex.launcher.convert.methods.base_modules import BaseModules
from loraplex.launcher.convert.methods.delta import NearestProduct, approximate
from loraplex.launcher.convert.methods.kinds import Kind, check_keys, takes_initial
from loraplex.launcher.convert.methods.module import Module, Tensors, Values
from loraplex.launcher.convert.methods.options import MethodOptions
from loraplex.launcher.convert.plan import ConversionLoss, ConversionPlan, Move, refusal

_SHARED_PREFIX = "base_model."
# PEFT saves the base's table beside an adapter that targets it; judging compares it with the base.
_BASE_COPY = re.compile(
    rf"{re.escape(PREFIX)}(?:.+\.)?(?:embed_tokens|lm_head)\.base_layer\.weight"
)
_COPIED_KEYS = ("modules_to_save", "task_type", "revision")
# Of a LoRA's config: what says which modules are meant, and how each is scaled.
_TARGETING_KEYS = (
    "base_model_name_or_path",
    "target_modules",
    "exclude_modules",
    "layers_to_transform",
    "layers_pattern",
    "modules_to_save",
    "task_type",
    "revision",
)


class _Sorted(msgspec.Struct):
    """modules: path -> name after it -> tensor. others: tensors that come along as they are."""

    modules: dict[str, dict[str, TensorInfo]]
    shared: dict[str, TensorInfo]
    others: list[TensorInfo]


def plan_method(
    kind: Kind, config: dict[str, Any], file: Weights, options: MethodOptions, made: Path
) -> ConversionPlan:
    """Computes LoRA's tensors, which `made` then holds one after the other.

    Raises AdapterError: what cannot be converted, or only to a larger error than is allowed.
    """
    check_keys(kind, config)
    targeting = _targeting(config)
    base = BaseModules(options.base)
    found = _sort(kind, file.tensors(), targeting.config.modules_to_save, _name(config))
    _check_targets(targeting, found.modules, base)
    with made.open("xb") as out, _initial(kind, options.initial) as initial:
        writer = _Writer(out)
        for path, own in found.modules.items():
            first = None if initial is None else _of_path(initial, path)
            tensors, shared = Tensors(own, file), Tensors(found.shared, file)
            module = Module(path, tensors, shared, first, targeting, Values(config), base)
            writer.add(path, _low_rank(kind, module, options))
        writer.finish()
        for tensor in found.others:
            writer.copy(tensor, file)
    fit = writer.fit()
    _check_error(fit, options)
    new = lora_config(targeting.config.base_model_name_or_path, writer.ranks, 1.0)
    new |= {key: config[key] for key in _COPIED_KEYS if config.get(key)}
    new["lora_bias"] = writer.has_biases
    text = json.dumps(new, indent=2).encode()
    return ConversionPlan(f"PEFT, {_name(config)}", text, tuple(writer.moves), fit=fit)


def _name(config: Mapping[str, Any]) -> str:
    return str(
        config["init_lora_weights"] if config["peft_type"] == "LORA" else config["peft_type"]
    )


def _targeting(config: dict[str, Any]) -> Targeting:
    """Raises AdapterError with every violation."""
    read: dict[str, Any] = {"peft_type": "LORA"}
    if config["peft_type"] == "LORA":
        read = config | {"init_lora_weights": True}
    else:
        read |= {key: config[key] for key in _TARGETING_KEYS if config.get(key)}
    if config["peft_type"] in ("LOHA", "LOKR"):
        read |= {"r": config.get("r", 8), "lora_alpha": config.get("alpha", 8)}
        read |= {key: config.get(key) or {} for key in ("rank_pattern", "alpha_pattern")}
    findings = Findings()
    parsed = parse_config(json.dumps(read).encode(), findings)
    findings.raise_if_any()
    assert parsed is not None
    if parsed.use_dora or parsed.bias != "none" or parsed.lora_bias:
        raise refusal("DoRA and biases on a changed base are not converted: merge the adapter")
    if parsed.alora_invocation_tokens:
        raise refusal(
            "alora_invocation_tokens: the base is changed for all tokens, and LoRA would act from "
            "the invocation on; merge the adapter, or train it with another init_lora_weights"
        )
    targeting = Targeting(parsed, findings)
    findings.raise_if_any()
    return targeting


def _sort(kind: Kind, tensors: Sequence[TensorInfo], saved: tuple[str, ...], words: str) -> _Sorted:
    """saved: names of `modules_to_save`. words: the method, for people. Raises AdapterError."""
    names = "|".join(map(re.escape, sorted(kind.tensors)))
    own = re.compile(rf"{re.escape(PREFIX)}(?P<path>.+)\.(?P<name>{names})")
    found = _Sorted({}, {}, [])
    for tensor in tensors:
        match = own.fullmatch(tensor.name)
        last = tensor.name.removeprefix(_SHARED_PREFIX)
        module, _, leaf = tensor.name.rpartition(".")
        is_saved = leaf == "weight" and module.endswith(saved)
        if match is not None:
            found.modules.setdefault(match["path"], {})[match["name"]] = tensor
        elif last in kind.shared:
            found.shared[last] = tensor
        elif is_saved or _BASE_COPY.fullmatch(tensor.name):
            found.others.append(tensor)
        else:
            raise refusal(f"{shown(tensor.name)} is no tensor of {words}, as PEFT saves it")
    if not found.modules:
        raise refusal(f"{WEIGHTS_FILE} has no tensors of {words}")
    return found


def _check_targets(targeting: Targeting, modules: Mapping[str, object], base: BaseModules) -> None:
    """PEFT leaves out tensors of what the config does not target, and draws those that lack."""
    for path in modules:
        if not targeting.targets(path, path.rpartition(".")[2] == "lm_head"):
            raise refusal(f"{path} has tensors, and the config does not target it")
    if base.is_known:
        naming = next((each for each in NAMINGS if all(map(each.meant, modules))), WHOLE)
        for path in base.paths():
            spelled = naming.spelled(path)
            if spelled is None or spelled in modules:
                continue
            if targeting.targets(spelled, path == "lm_head"):
                raise refusal(f"the config targets {spelled}, which has no tensors")
        return
    names = targeting.config.target_modules
    for name in () if isinstance(names, str) else names:
        if not any(f".{path}".endswith(f".{name}") for path in modules):
            raise refusal(
                f"target_modules names {shown(name)}, which has no tensors: --base MODEL shows "
                "whether the base has such a module"
            )


@contextmanager
def _initial(kind: Kind, folder: Path | None) -> Iterator[Tensors | None]:
    if folder is None:
        yield None
        return
    if not takes_initial(kind):
        raise refusal("--initial is for LoRA whose init_lora_weights changed the base")
    with open_weights(folder / WEIGHTS_FILE) as file:
        yield Tensors({tensor.name: tensor for tensor in file.tensors()}, file)


def _of_path(tensors: Tensors, path: str) -> Tensors:
    start = f"{PREFIX}{path}."
    found = {
        name.removeprefix(start): tensor
        for name, tensor in tensors.infos.items()
        if name.startswith(start)
    }
    return Tensors(found, tensors.weights)


def _low_rank(kind: Kind, module: Module, options: MethodOptions) -> NearestProduct:
    with np.errstate(over="ignore", invalid="ignore"):
        delta = kind.delta(module)
        parts = [part for part in delta if part is not None]
        if not all(np.isfinite(part).all() for part in parts):
            raise module.unfit("its change has values that are not finite")
        module.check_size(*delta.shape)
        if module.base.is_known and delta.shape != module.shape():
            shapes = f"{list(delta.shape)}; the base's module has {list(module.shape())}"
            raise module.unfit(f"its change has the shape {shapes}")
        found = approximate(delta, options.max_rank, options.wanted_error)
        if not (np.isfinite(found.a).all() and np.isfinite(found.b).all()):
            raise module.unfit("its change has values that are too large for float32")
    return found


class _Writer:
    """Tensors one after the other, in float32, and what is known of them."""

    def __init__(self, out: BinaryIO) -> None:
        self.moves: list[Move] = []
        self.ranks: dict[str, int] = {}
        self._out = out
        self._found: dict[str, tuple[float, float, float]] = {}
        self._biases: dict[str, tuple[int, Any]] = {}

    @property
    def has_biases(self) -> bool:
        return any(bias is not None for _, bias in self._biases.values())

    def add(self, path: str, found: NearestProduct) -> None:
        self._write(f"{PREFIX}{path}.lora_A.weight", found.a)
        self._write(f"{PREFIX}{path}.lora_B.weight", found.b)
        self.ranks[path] = len(found.a)
        self._found[path] = (found.norm, found.lost, found.error)
        self._biases[path] = (len(found.b), found.bias)

    def finish(self) -> None:
        """Where one module has a bias, all have one."""
        if not self.has_biases:
            return
        for path, (outputs, bias) in self._biases.items():
            values = np.zeros(outputs) if bias is None else bias
            self._write(f"{PREFIX}{path}.lora_B.bias", values.astype(np.float32))

    def copy(self, tensor: TensorInfo, file: Weights) -> None:
        start = self._out.tell()
        for piece in file.pieces(tensor.start, tensor.end):
            self._out.write(piece.data)
        copied = msgspec.structs.replace(tensor, start=start, end=self._out.tell())
        self.moves.append(Move(tensor.name, copied))

    def fit(self) -> ConversionLoss:
        worst = max(self._found, key=lambda path: self._found[path][2])
        norm = math.hypot(*(norm for norm, _, _ in self._found.values()))
        lost = math.hypot(*(lost for _, lost, _ in self._found.values()))
        return ConversionLoss(
            ranks=tuple(sorted(set(self.ranks.values()))),
            worst_error=self._found[worst][2],
            worst_module=worst,
            overall_error=lost / norm if norm else 0.0,
        )

    def _write(self, name: str, values: Any) -> None:
        start = self._out.tell()
        self._out.write(np.ascontiguousarray(values, "<f4").data)
        info = TensorInfo(name, "F32", values.shape, start, self._out.tell())
        self.moves.append(Move(name, info))


def _check_error(fit: ConversionLoss, options: MethodOptions) -> None:
    if fit.worst_error <= options.max_error:
        return
    raise refusal(
        f"rank {max(fit.ranks)} loses {fit.worst_error:.2g} of {fit.worst_module} (relative, "
        f"Frobenius) and {fit.overall_error:.2g} of all modules together; at most "
        f"{options.max_error:g} may be lost: --max-error allows more, --rank a higher rank"
    )
