"""Weights in several files, for tests of every room."""

import json
from pathlib import Path

from safetensors.torch import load_file, save_file

WEIGHTS = "adapter_model.safetensors"
INDEX = f"{WEIGHTS}.index.json"


def shard(number: int, count: int) -> str:
    return f"adapter_model-{number:05}-of-{count:05}.safetensors"


def cut(folder: Path, parts: int, index: str = INDEX) -> Path:
    """Its weights in several files, dealt out in turn."""
    tensors = load_file(folder / WEIGHTS)
    weight_map = {name: shard(i % parts + 1, parts) for i, name in enumerate(sorted(tensors))}
    for file in set(weight_map.values()):
        held = {name: tensors[name] for name, where in weight_map.items() if where == file}
        save_file(held, folder / file, metadata={"format": "pt"})
    table = {"metadata": {"total_size": 1}, "weight_map": weight_map}
    (folder / index).write_text(json.dumps(table))
    (folder / WEIGHTS).unlink()
    return folder
