"""Files of sentence-transformers next to a model: how hidden states become vectors. No torch.

Steps beyond pooling and a norm are refused by name.
"""

import json
from pathlib import Path
from typing import Any, NamedTuple

from loraplex.adapters.errors import shown
from loraplex.server.model.spec.model_spec import Activation
from loraplex.server.model.spec.vector_forms import DenseForm, SentenceFiles
from loraplex.server.protocol import TextPooling

MODULES_FILE = "modules.json"
PROMPTS_FILE = "config_sentence_transformers.json"
LENGTH_FILE = "sentence_bert_config.json"
CONFIG_NAME = "config.json"
_MAX_BYTES = 1 << 20
_MAX_PROMPTS = 256
_MOST_FEATURES = 1 << 16
# By their names in `modules.json`, without the package.
_TRANSFORMER, _POOLING, _NORMALIZE, _LOGITS = "Transformer", "Pooling", "Normalize", "LogitScore"
_DENSE = "Dense"
DENSE_WEIGHTS = "model.safetensors"
_ACTIVATIONS: dict[str, Activation | None] = {
    "Identity": None,
    "Tanh": "tanh",
    "ReLU": "relu",
    "GELU": "gelu",
    "SiLU": "silu",
}
_TASKS = ("feature-extraction", "text-generation", "sequence-classification")
_MODES: dict[str, TextPooling] = {
    "lasttoken": "last",
    "mean": "mean",
    "cls": "first",
    "max": "max",
}
# How each mode was spelled in older files.
_OLD_MODES = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
    "pooling_mode_lasttoken": "lasttoken",
}


class _Module(NamedTuple):
    kind: str
    path: str


def pools_vectors(folder: Path) -> bool:
    """Whether the model is there for vectors."""
    try:
        return any(module.kind == _POOLING for module in _modules(folder))
    except ValueError:
        return True  # and `read_sentence_files` says what is wrong


def read_sentence_files(folder: Path) -> SentenceFiles | None:
    """Read the files that sentence-transformers adds to a model. None: there are none. Raises
    ValueError, with the file's name.
    """
    modules = _modules(folder)
    if not modules:
        return None
    kinds = [module.kind for module in modules]
    pooling, yes_no = None, tuple[int, ...]()
    if _POOLING in kinds:
        expected = [_TRANSFORMER, _POOLING, *[_DENSE] * kinds.count(_DENSE), _NORMALIZE]
        pooling = _read_pooling(folder / modules[kinds.index(_POOLING)].path / CONFIG_NAME)
    else:
        expected = [_TRANSFORMER, _LOGITS]
        if _LOGITS in kinds:
            yes_no = _read_logits(folder / modules[kinds.index(_LOGITS)].path / CONFIG_NAME)
    if kinds != expected[: len(kinds)]:
        others = [kind for kind in kinds if kind not in expected] or kinds
        named = [_TRANSFORMER, _POOLING, _DENSE, _NORMALIZE] if _POOLING in kinds else expected
        raise ValueError(
            f"{MODULES_FILE}: {', '.join(others)[:160]} is not served; served are "
            f"{', '.join(named)} in this order"
        )
    dense = tuple(_read_dense(folder, each) for each in modules if each.kind == _DENSE)
    prompts, default = _read_prompts(folder)
    return SentenceFiles(
        pooling, _NORMALIZE in kinds, _read_length(folder), prompts, default, yes_no, dense
    )


def _read_dense(folder: Path, module: _Module) -> DenseForm:
    name = f"{module.path}/{CONFIG_NAME}"
    table = _table(folder / module.path / CONFIG_NAME, name)
    taken, given = (_features(table, key, name) for key in ("in_features", "out_features"))
    activation = str(table.get("activation_function", "Tanh")).rpartition(".")[2]
    if activation not in _ACTIVATIONS:
        known = ", ".join(_ACTIVATIONS)
        raise ValueError(
            f"{name}: activation_function must be one of {known}, got {shown(activation)}"
        )
    bias = table.get("bias", True) is True
    return DenseForm(module.path, taken, given, bias, _ACTIVATIONS[activation])


def _features(table: dict[str, Any], key: str, name: str) -> int:
    value = table.get(key)
    if type(value) is not int or not 0 < value <= _MOST_FEATURES:
        raise ValueError(f"{name}: {key} must be a positive integer, got {shown(value)}")
    return value


def dense_forms(folder: Path) -> tuple[DenseForm, ...]:
    """List what pooled vectors of the model go through. Raises ValueError."""
    files = read_sentence_files(folder)
    return () if files is None else files.dense


def _modules(folder: Path) -> list[_Module]:
    """Read the list of modules, empty without one. Raises ValueError for a malformed one."""
    listed = _read(folder / MODULES_FILE)
    if listed is None:
        return []
    if not isinstance(listed, list) or not all(isinstance(each, dict) for each in listed):
        raise ValueError(f"{MODULES_FILE} must be a list of modules")
    found = []
    for each in listed:
        path = str(each.get("path", ""))
        if Path(path).is_absolute() or ".." in Path(path).parts:
            raise ValueError(f"{MODULES_FILE}: path {shown(path)} leads out of the folder")
        found.append(_Module(str(each.get("type", "")).rpartition(".")[2], path))
    return found


def _read_pooling(path: Path) -> TextPooling:
    name = f"{path.parent.name}/{path.name}"
    table = _table(path, name)
    modes = table.get("pooling_mode")
    if modes is None:
        modes = [mode for key, mode in _OLD_MODES.items() if table.get(key)] or ["mean"]
    modes = [modes] if isinstance(modes, str) else modes
    if not isinstance(modes, list) or len(modes) != 1 or modes[0] not in _MODES:
        raise ValueError(
            f"{name}: pooling_mode must be one of {', '.join(_MODES)}, got {shown(modes)}"
        )
    pooling = _MODES[modes[0]]
    if pooling == "mean" and table.get("include_prompt") is False:
        raise ValueError(f"{name}: a mean without the prompt (include_prompt) is not served")
    return pooling


def _read_logits(path: Path) -> tuple[int, ...]:
    name = f"{path.parent.name}/{path.name}"
    table = _table(path, name)
    ids = [table.get("true_token_id"), table.get("false_token_id")]
    found = [i for i in ids if type(i) is int and i >= 0]
    if len(found) != 2:
        raise ValueError(f"{name}: true_token_id and false_token_id must be token ids")
    return tuple(found)


def _read_prompts(folder: Path) -> tuple[dict[str, str], str | None]:
    table = _table(folder / PROMPTS_FILE, PROMPTS_FILE)
    prompts, default = table.get("prompts") or {}, table.get("default_prompt_name")
    if not isinstance(prompts, dict) or len(prompts) > _MAX_PROMPTS:
        raise ValueError(f"{PROMPTS_FILE}: prompts must be a table of at most {_MAX_PROMPTS}")
    known = {str(name): str(text) for name, text in prompts.items() if text is not None}
    if default is not None and default not in known:
        raise ValueError(f"{PROMPTS_FILE}: default_prompt_name is no prompt: {shown(default)}")
    return known, default


def _read_length(folder: Path) -> int | None:
    table = _table(folder / LENGTH_FILE, LENGTH_FILE)
    if table.get("do_lower_case"):
        raise ValueError(f"{LENGTH_FILE}: do_lower_case must be false")
    task = table.get("transformer_task")
    if task not in (None, *_TASKS):
        raise ValueError(
            f"{LENGTH_FILE}: transformer_task must be {' or '.join(_TASKS)}, got {shown(task)}"
        )
    most = table.get("max_seq_length")
    if most is not None and (type(most) is not int or most < 1):
        raise ValueError(f"{LENGTH_FILE}: max_seq_length must be a positive integer")
    return most


def _table(path: Path, name: str) -> dict[str, Any]:
    """Empty where there is no such file. name: for people."""
    value = _read(path)
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise ValueError(f"{name} must be an object")
    return value


def _read(path: Path) -> Any:
    """Read a JSON file; None without such a file. Raises ValueError where it cannot be read."""
    try:
        if path.stat().st_size > _MAX_BYTES:
            raise ValueError(f"{path.name}: larger than {_MAX_BYTES} bytes")
        return json.loads(path.read_text("utf-8"))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(f"{path.name}: cannot be read as JSON ({error})") from None
