"""Says from file names what a place is that was given as a base model and is none.

Each text goes on after the place's name: "… is a LoRA adapter, not a base model: …".
"""

import json
from collections.abc import Collection
from pathlib import Path, PurePosixPath

from loraplex.adapters.peft.files import newest_first

CONFIG_FILE = "config.json"
WEIGHTS_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"

_ADAPTER_FILE = "adapter_config.json"
_EXPECTED = "expected a model folder as on the Hugging Face Hub"
_PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")
# Other programs' formats, by the end of a file's name.
_FORMATS = {
    ".gguf": "GGUF",
    ".ggml": "GGML",
    ".onnx": "ONNX",
    ".h5": "TensorFlow's format",
    ".msgpack": "Flax's format",
    ".npz": "NumPy's format",
    ".mlmodel": "Core ML's format",
    ".tflite": "TensorFlow Lite's format",
    ".engine": "TensorRT's format",
}
_MAX_LISTED = 4
_MAX_ENTRIES = 10_000
_MAX_JSON_BYTES = 1 << 20


def what_it_is(folder: Path) -> str:
    """Describes a folder without `config.json`."""
    names = files_of(folder)
    if not names and folder.is_dir():
        return f"is empty: it has no {CONFIG_FILE}; {_EXPECTED}"
    return without_config(names, str(folder), _trained_for(folder))


def files_of(folder: Path) -> list[str]:
    """Names of a folder's files, and of subfolders' configurations; bounded."""
    found: list[str] = []
    for path in folder.glob("*"):
        if path.is_dir():
            inner = (CONFIG_FILE, _ADAPTER_FILE)
            found += (f"{path.name}/{name}" for name in inner if (path / name).is_file())
        else:
            found.append(path.name)
        if len(found) >= _MAX_ENTRIES:
            break
    return sorted(found)


def without_config(names: Collection[str], place: str, trained_for: str = "") -> str:
    """Say why a folder without `config.json` holds no model that can be served. names: paths of all
    files. trained_for: of an adapter, what its config names as its base.
    """
    if _ADAPTER_FILE in names:
        return _adapter(place, trained_for)
    if "model_index.json" in names:
        return "is a pipeline of diffusers, not a language model"
    if "params.json" in names:
        return "holds a model in its maker's own format (params.json): serve its Hugging Face form"
    inner = _inner(names, CONFIG_FILE)
    if inner:
        return f"has no {CONFIG_FILE}; did you mean {' or '.join(f'{place}/{n}' for n in inner)}?"
    adapters = _inner(names, _ADAPTER_FILE)
    if adapters:
        return f"is no base model; it holds LoRA adapters: {', '.join(adapters)}"
    return _other_format(names) or f"has no {CONFIG_FILE}; {_EXPECTED}"


def without_weights(names: Collection[str], place: str) -> str:
    """Describe a place with `config.json` and without safetensors of the usual names."""
    if _ADAPTER_FILE in names:
        return _adapter(place, "")
    other = _other_format(names)
    if other is not None:
        return other
    own = [name for name in sorted(names) if name.endswith(".safetensors") and "/" not in name]
    if own:
        listed = ", ".join(own[:_MAX_LISTED])
        return f"has {listed}, but neither {WEIGHTS_FILE} nor {INDEX_FILE}"
    return f"has neither {WEIGHTS_FILE} nor {INDEX_FILE}"


def _adapter(place: str, trained_for: str) -> str:
    base = f" ({trained_for})" if trained_for else ""
    return (
        f"is a LoRA adapter, not a base model: serve its base model{base} and give the adapter a "
        f"name beside it, --adapter NAME={place}"
    )


def _other_format(names: Collection[str]) -> str | None:
    here = sorted(name for name in names if "/" not in name)
    if any(name.endswith(".safetensors") for name in here):
        return None
    pickles = [name for name in here if name.endswith(_PICKLES) and name != "training_args.bin"]
    if pickles:
        return (
            f"has only {', '.join(pickles[:_MAX_LISTED])}, which can run code when opened and are"
            " never read; convert the model to safetensors (save_pretrained writes them)"
        )
    for name in here:
        known = _FORMATS.get(PurePosixPath(name).suffix)
        if known is not None:
            return f"has its weights in {known} ({name}), which is not read; serve the safetensors"
    return None


def _inner(names: Collection[str], config: str) -> list[str]:
    """Subfolders with a configuration of this name: of a trainer's checkpoints the newest first."""
    inner = {name.rpartition("/")[0] for name in names if name.endswith(f"/{config}")}
    return newest_first(name for name in inner if "/" not in name)[:_MAX_LISTED]


def _trained_for(folder: Path) -> str:
    """The base that an adapter's config names; "" when the name cannot be known."""
    try:
        with (folder / _ADAPTER_FILE).open("rb") as file:
            config = json.loads(file.read(_MAX_JSON_BYTES))
        return str(config.get("base_model_name_or_path") or "")[:160]
    except (OSError, ValueError, AttributeError, RecursionError):
        return ""
