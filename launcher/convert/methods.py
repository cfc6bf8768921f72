"""Makes LoRA of an adapter of another PEFT method.

PEFT merges the adapter into its base, module by module in float64. The nearest product of a small
rank to the change of a module's weight is the module's LoRA.
"""

import importlib.util
import json
import math
import re
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from loraplex.adapters.common import extras
from loraplex.adapters.errors import AdapterError, Findings, shown
from loraplex.adapters.peft.config import (
    CONFIG_FILE,
    CONVERTED,
    HARMLESS,
    parse_config,
    takes_from_base,
    way_out,
)
from loraplex.adapters.peft.validate import MAX_LORA_RANK
from loraplex.adapters.safetensors.header import WEIGHTS_FILE
from loraplex.launcher.convert.base_class import base_class
from loraplex.launcher.convert.formats import PREFIX, lora_config
from loraplex.launcher.convert.plan import ConversionLoss, WrittenAdapter, refusal
from loraplex.server.model.checkpoint.checkpoint import read_config

if TYPE_CHECKING:
    import torch

Matrix = npt.NDArray[np.float64]
# Far above what float64 rounds, far below what float32 shows in an answer.
EXACT = 1e-5
# PEFT saves the base's table beside an adapter that targets it; judging compares it with the base.
_BASE_COPY = re.compile(
    rf"{re.escape(PREFIX)}(?:.+\.)?(?:embed_tokens|lm_head)\.base_layer\.weight"
)
_COPIED_KEYS = ("modules_to_save", "task_type", "revision")
# PEFT takes memory and time for as much as these say.
_BOUNDED_KEYS = ("r", "num_cayley_neumann_terms")
_MAX_COUNT = 1 << 16
_ADAPTER, _START = "default", "start"
_DRAWN_FROM_WEIGHTS = ("pissa", "olora")
_FIRST_WIDTH = 64
_MAX_WORDS = 300


class MethodOptions(msgspec.Struct, frozen=True):
    """Options of a conversion to LoRA.

    rank: of each module that has as much to say; None = the lowest that `max_error` allows.
    max_error: of each module's change, relative, Frobenius. base: the base's folder. initial: the
    folder of the adapter before its training.
    """

    rank: int | None = None
    max_error: float = EXACT
    base: Path | None = None
    initial: Path | None = None

    @property
    def is_asked_for(self) -> bool:
        return (self.rank, self.max_error, self.initial) != (None, EXACT, None)

    @property
    def max_rank(self) -> int:
        return MAX_LORA_RANK if self.rank is None else self.rank

    @property
    def wanted_error(self) -> float:
        """The error from which on no further rank is taken."""
        return self.max_error if self.rank is None else min(self.max_error, EXACT)


class NearestProduct(NamedTuple):
    """The nearest product to a module's change.

    b: `[outputs, rank]`, a: `[rank, inputs]`, float32. norm: of the change, Frobenius. lost: of the
    change less `b @ a`.
    """

    b: npt.NDArray[np.float32]
    a: npt.NDArray[np.float32]
    norm: float
    lost: float

    @property
    def error(self) -> float:
        return self.lost / self.norm if self.norm else 0.0


def is_other_method(config: Mapping[str, object]) -> bool:
    """Tell another method, or LoRA on a changed base, from LoRA as it is served. Raises
    AdapterError for a method that is not converted."""
    peft_type = config.get("peft_type")
    if peft_type is None or peft_type == "LORA":
        return peft_type is not None and takes_from_base(config.get("init_lora_weights"))
    if not isinstance(peft_type, str) or peft_type not in CONVERTED:
        raise refusal(f"peft_type {shown(peft_type)} is not converted: {way_out(peft_type)}")
    return True


def convert_method(
    config: dict[str, Any], weights: Path, options: MethodOptions, result: Path
) -> WrittenAdapter:
    """Write LoRA's config and weights to the folder `result`.

    weights: a safetensors file. Raises AdapterError: what cannot be converted, or only to a larger
    error than is allowed.
    """
    _check(config, options)
    tensors, others = _divided(_read(weights), config)
    model = _adapted_base(config, tensors, options)
    found: dict[str, NearestProduct] = {}
    made = dict(others)
    biases: dict[str, Matrix] = {}
    for path, change, bias in _changes(model):
        found[path] = _factored(path, change, options)
        made[f"{PREFIX}{path}.lora_A.weight"] = _tensor(found[path].a)
        made[f"{PREFIX}{path}.lora_B.weight"] = _tensor(found[path].b)
        biases[path] = bias
    fit = _fit(found, options)
    # Where one module has a bias, all have one.
    has_biases = any(bias.any() for bias in biases.values())
    for path, bias in biases.items() if has_biases else ():
        made[f"{PREFIX}{path}.lora_B.bias"] = _tensor(bias)
    ranks = {path: len(low_rank.a) for path, low_rank in found.items()}
    _write(result, config, ranks, has_biases, made)
    return WrittenAdapter(f"PEFT, {_name(config)}", len(made), fit=fit)


def approximate(change: Matrix, max_rank: int, max_error: float) -> NearestProduct:
    """The lowest rank, at most `max_rank`, that loses at most `max_error` of the norm.

    change: `[outputs, inputs]`. Where no such rank is low enough, the best of `max_rank`. Singular
    values are split evenly.
    """
    norm = float(np.linalg.norm(change))
    left, values, right = _decomposed(change, max_error * norm)
    # lost[r]: with the first r values.
    lost = np.sqrt(np.append(np.cumsum(values[::-1] ** 2)[::-1], 0.0))
    enough = int(np.argmax(lost <= max_error * norm))
    rank = min(max(enough, 1), max_rank, len(values))
    roots = np.sqrt(values[:rank])
    b = np.ascontiguousarray(left[:, :rank] * roots, np.float32)
    a = np.ascontiguousarray(roots[:, None] * right[:rank], np.float32)
    left_out = change - b.astype(np.float64) @ a.astype(np.float64)
    return NearestProduct(b, a, norm, float(np.linalg.norm(left_out)))


def _decomposed(change: Matrix, allowed: float) -> tuple[Matrix, Matrix, Matrix]:
    """Singular vectors and values, the largest first; those far below `allowed` may be left out.

    A change of small rank is seen in its product with a few random vectors, which takes a fraction
    of the time of a whole decomposition.
    """
    random = np.random.default_rng(0)
    width = _FIRST_WIDTH
    while 2 * width < min(change.shape):
        basis = np.linalg.qr(change @ random.standard_normal((change.shape[1], width)))[0]
        inner = basis.T @ change
        if np.linalg.norm(change - basis @ inner) <= 1e-4 * allowed:
            left, values, right = np.linalg.svd(inner, full_matrices=False)
            return basis @ left, values, right
        width *= 4
    return _wholly_decomposed(change)


def _wholly_decomposed(matrix: Matrix) -> tuple[Matrix, Matrix, Matrix]:
    """The decomposition by eigenvectors of the smaller side's Gram matrix, which is faster than the
    direct one. Values below 1e-8 of the largest are not exact."""
    if matrix.shape[0] > matrix.shape[1]:
        left, values, right = _wholly_decomposed(np.ascontiguousarray(matrix.T))
        return right.T, values, left.T
    squares, vectors = np.linalg.eigh(matrix @ matrix.T)
    values, left = np.sqrt(np.maximum(squares[::-1], 0.0)), vectors[:, ::-1]
    scale = np.where(values > 0, values, 1.0)
    return left, values, (left.T @ matrix) / scale[:, None]


def _name(config: Mapping[str, Any]) -> str:
    return str(
        config["init_lora_weights"] if config["peft_type"] == "LORA" else config["peft_type"]
    )


def _check(config: Mapping[str, Any], options: MethodOptions) -> None:
    """Refuse, before the base is loaded, what is not converted. Raises AdapterError."""
    for package in ("peft", "transformers"):
        if importlib.util.find_spec(package) is None:
            how = extras.remedy(package, "convert")
            raise AdapterError("unavailable", f"PEFT merges other methods than LoRA: {how}")
    if config["peft_type"] == "LORA":
        _check_lora(config)
        _check_start(_name(config), options)
    else:
        _check_keys(config)
        if options.initial is not None:
            raise refusal("--initial is for LoRA whose init_lora_weights changed the base")
    if options.base is None:
        raise refusal("its base is needed: --base MODEL names it")
    if read_config(options.base).quantisation is not None:
        raise refusal(
            f"{options.base}: its weights are quantised; --base must name the same model "
            "in floating point"
        )


def _check_keys(config: Mapping[str, Any]) -> None:
    """Checks a config's keys before the conversion. Raises AdapterError for a key that may change
    the maths in a way that PEFT does not know.
    """
    if config.get("bias", "none") not in (None, "none"):
        raise refusal(
            f"bias is {shown(config['bias'])}: trained biases beside another method than LoRA are "
            "not converted; merge the adapter into its base with PEFT and serve that model"
        )
    known = _config_class(config["peft_type"]).__dataclass_fields__
    for key, value in config.items():
        if key not in known and key not in HARMLESS and value not in (None, False, "", 0, [], {}):
            raise refusal(f"unknown key {shown(key)} is set to {shown(value)}")
    for key in _BOUNDED_KEYS:
        if isinstance(config.get(key), int) and config[key] > _MAX_COUNT:
            raise refusal(f"{key}: expected at most {_MAX_COUNT}, got {shown(config[key])}")
    if config.get("save_projection") is False:
        raise refusal(
            "its random matrices are not saved: they are drawn from projection_prng_key, which "
            "does not give the same everywhere; load it with PEFT where it was trained and save it "
            "with save_projection=True"
        )


def _check_lora(config: Mapping[str, Any]) -> None:
    findings = Findings()
    text = json.dumps({**config, "init_lora_weights": True}).encode()
    parsed = parse_config(text, findings)
    findings.raise_if_any()
    assert parsed is not None
    if parsed.use_dora or parsed.bias != "none" or parsed.lora_bias:
        raise refusal("DoRA and biases on a changed base are not converted: merge the adapter")
    if parsed.alora_invocation_tokens:
        raise refusal(
            "alora_invocation_tokens: the base is changed for all tokens, and LoRA would act from "
            "the invocation on; merge the adapter, or train it with another init_lora_weights"
        )


def _check_start(init: str, options: MethodOptions) -> None:
    if options.initial is None and init.lower() not in _DRAWN_FROM_WEIGHTS:
        raise refusal(
            f"init_lora_weights is {init}, whose start the base does not show: --initial FOLDER "
            "names the adapter as it was saved before the training"
        )


def _config_class(peft_type: str) -> Any:
    from peft.mapping import PEFT_TYPE_TO_CONFIG_MAPPING

    return PEFT_TYPE_TO_CONFIG_MAPPING[peft_type]


def _read(file: Path) -> "dict[str, torch.Tensor]":
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        return load_file(file)
    except SafetensorError as error:
        raise refusal(f"{file.name} cannot be read: {_words(error)}") from None


def _divided(
    tensors: "dict[str, torch.Tensor]", config: Mapping[str, Any]
) -> "tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]":
    """The method's own tensors, and whole modules that come along as they are."""
    saved = config.get("modules_to_save") or ()
    if not isinstance(saved, list | tuple) or not all(isinstance(name, str) for name in saved):
        raise refusal(f"modules_to_save: expected names, got {shown(saved)}")
    own: dict[str, torch.Tensor] = {}
    others: dict[str, torch.Tensor] = {}
    for name, tensor in tensors.items():
        module, _, leaf = name.rpartition(".")
        is_saved = leaf == "weight" and module.endswith(tuple(saved))
        part = others if is_saved or _BASE_COPY.fullmatch(name) else own
        part[name] = tensor
    return own, others


def _adapted_base(
    config: Mapping[str, Any], tensors: "dict[str, torch.Tensor]", options: MethodOptions
) -> Any:
    """PEFT's model with the adapter, and with its start if that has changed the base."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert options.base is not None
        base = _base(options.base, tensors)
        try:
            if config["peft_type"] != "LORA":
                return _with_adapter(base, _peft_config(config), tensors)
            model = _with_start(base, config, options.initial)
            model.add_adapter(_ADAPTER, _peft_config(config, True), low_cpu_mem_usage=True)
            return _loaded(model, tensors, _ADAPTER)
        except AdapterError:
            raise
        except Exception as error:  # any error that a wrong adapter causes in PEFT
            raise refusal(f"PEFT cannot load it: {_words(error)}") from None


def _base(folder: Path, names: Mapping[str, object]) -> Any:
    """The model, or the model within it, of whose modules the adapter's tensors are named."""
    from transformers.utils import logging

    logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    try:
        kind = base_class(folder, local_files_only=True)
        model = kind.from_pretrained(folder, dtype="auto", local_files_only=True)
    except (OSError, ValueError) as error:
        raise refusal(f"--base: transformers cannot load it: {_words(error)}") from None
    firsts = {
        name.removeprefix(PREFIX).partition(".")[0] for name in names if name.startswith(PREFIX)
    }
    for each in (model, model.base_model):
        if all(hasattr(each, first) for first in firsts):
            return each
    raise refusal(f"its tensors are not named as the base's modules: {shown(next(iter(names)))}")


def _peft_config(config: Mapping[str, Any], init: object = None) -> Any:
    """PEFT's own config. init: of LoRA, how it starts."""
    known = {**config, "modules_to_save": None}
    if init is not None:
        known["init_lora_weights"] = init
    made = _config_class(config["peft_type"]).from_peft_type(**known)
    made.inference_mode = True
    return made


def _with_adapter(base: Any, config: Any, tensors: "dict[str, torch.Tensor]") -> Any:
    from peft import PeftModel

    # On torch's meta device a config's claims take no memory.
    model = PeftModel(base, config, low_cpu_mem_usage=True)
    return _loaded(model, tensors, _ADAPTER)


def _with_start(base: Any, config: Mapping[str, Any], initial: Path | None) -> Any:
    """The base with the adapter before its training, which PEFT draws or `initial` has."""
    from peft import PeftModel

    if initial is None:
        return PeftModel(base, _peft_config(config), adapter_name=_START)
    start = _peft_config(config, True)
    model = PeftModel(base, start, adapter_name=_START, low_cpu_mem_usage=True)
    try:
        return _loaded(model, _divided(_read(initial / WEIGHTS_FILE), config)[0], _START)
    except RuntimeError as error:
        raise refusal(f"--initial: {_words(error)}") from None


def _loaded(model: Any, tensors: "dict[str, torch.Tensor]", name: str) -> Any:
    """Loads an adapter's tensors into a PEFT model and returns it. Raises AdapterError for tensors
    that the config does not ask for, and for those that lack.
    """
    from peft import set_peft_model_state_dict

    result = set_peft_model_state_dict(model, tensors, name, low_cpu_mem_usage=True)
    if result.unexpected_keys:
        raise refusal(f"{shown(result.unexpected_keys[0])} is no tensor of what the config targets")
    for path, layer in _layers(model):
        for key, tensor in layer.state_dict().items():
            if tensor.is_meta:
                raise refusal(f"{path}.{key}: the tensor is missing")
    return model.eval()


def _words(error: Exception) -> str:
    """The last line of an error, in ASCII."""
    lines = str(error).split("\n")
    return f"{type(error).__name__}: {ascii(lines[-1].strip())[1:-1][:_MAX_WORDS]}"


def _layers(model: Any) -> Iterator[tuple[str, Any]]:
    from peft.tuners.tuners_utils import BaseTunerLayer

    for name, module in model.named_modules():
        if isinstance(module, BaseTunerLayer):
            yield name.removeprefix(PREFIX), module


def _changes(model: Any) -> Iterator[tuple[str, Matrix, Matrix]]:
    """Each module's path and what the adapter adds to its weight and its bias. The module's weight
    is given up afterwards."""
    import torch
    from transformers.pytorch_utils import Conv1D

    has_start = _START in model.peft_config
    for path, layer in _layers(model):
        linear = layer.get_base_layer()
        if not isinstance(linear, torch.nn.Linear | Conv1D):
            raise refusal(f"{path}: the base has no linear module of that name")
        with torch.no_grad():
            layer.to(torch.float64)
            try:
                change, added = (_since_start if has_start else _merged)(layer, linear)
            except Exception as error:  # any error that a wrong adapter causes in PEFT
                raise refusal(f"{path}: PEFT cannot merge it: {_words(error)}") from None
            linear.weight = torch.nn.Parameter(torch.empty(0))
        if isinstance(linear, Conv1D):  # GPT-2's, which holds `[in, out]`
            change = change.T
        yield path, change.detach().numpy(), added.detach().numpy()


def _since_start(layer: Any, linear: Any) -> "tuple[torch.Tensor, torch.Tensor]":
    """LoRA's change of a weight, less that of its start; and of a bias, which is none."""
    change = layer.get_delta_weight(_ADAPTER) - layer.get_delta_weight(_START)
    return change, change.new_zeros(getattr(linear, "nf", None) or linear.out_features)


def _merged(layer: Any, linear: Any) -> "tuple[torch.Tensor, torch.Tensor]":
    """The change of a weight and of a bias as PEFT merges the adapter into both."""
    weight, bias = linear.weight.clone(), linear.bias
    bias = weight.new_zeros(linear.out_features) if bias is None else bias.clone()
    layer.merge(safe_merge=True, adapter_names=[_ADAPTER])
    after = bias if linear.bias is None else linear.bias
    return linear.weight - weight, after - bias


def _factored(path: str, change: Matrix, options: MethodOptions) -> NearestProduct:
    if not np.isfinite(change).all():
        raise refusal(f"{path}: its change has values that are not finite")
    with np.errstate(over="ignore", invalid="ignore"):
        found = approximate(change, options.max_rank, options.wanted_error)
    if not (np.isfinite(found.a).all() and np.isfinite(found.b).all()):
        raise refusal(f"{path}: its change has values that are too large for float32")
    return found


def _fit(found: Mapping[str, NearestProduct], options: MethodOptions) -> ConversionLoss:
    """How much is lost. Raises AdapterError: more than allowed, or of no module at all."""
    if not found:
        raise refusal("the config targets no module of the base")
    worst = max(found, key=lambda path: found[path].error)
    norm = math.hypot(*(each.norm for each in found.values()))
    lost = math.hypot(*(each.lost for each in found.values()))
    fit = ConversionLoss(
        ranks=tuple(sorted({len(each.a) for each in found.values()})),
        worst_error=found[worst].error,
        worst_module=worst,
        overall_error=lost / norm if norm else 0.0,
    )
    if fit.worst_error > options.max_error:
        raise refusal(
            f"rank {max(fit.ranks)} loses {fit.worst_error:.2g} of {worst} (relative, "
            f"Frobenius) and {fit.overall_error:.2g} of all modules together; at most "
            f"{options.max_error:g} may be lost: --max-error allows more, --rank a higher rank"
        )
    return fit


def _write(
    result: Path,
    config: Mapping[str, Any],
    ranks: Mapping[str, int],
    has_biases: bool,
    tensors: "dict[str, torch.Tensor]",
) -> None:
    from safetensors.torch import save_file

    new = lora_config(config.get("base_model_name_or_path") or "", ranks, 1.0)
    new |= {key: config[key] for key in _COPIED_KEYS if config.get(key)}
    new["lora_bias"] = has_biases
    (result / CONFIG_FILE).write_text(json.dumps(new, indent=2))
    save_file(tensors, result / WEIGHTS_FILE, {"format": "pt"})


def _tensor(values: npt.NDArray[Any]) -> "torch.Tensor":
    import torch

    return torch.from_numpy(np.ascontiguousarray(values, np.float32))
