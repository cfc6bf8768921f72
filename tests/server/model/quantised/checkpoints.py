"""Tiny models whose layers' matrices are quantised: the folder, and the model of its values."""

import json
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import PreTrainedModel

from tests.server.model.hub_models import save_model
from tests.server.model.quantised.formats import Format, Tensors

CHANGED = "model.layers.0.mlp.down_proj"
INDEX = "model.safetensors.index.json"


def matrices(model: PreTrainedModel, skip: Collection[str] = ()) -> Iterator[tuple[str, nn.Linear]]:
    """The linears of layers. skip: names of modules, such as `down_proj`."""
    for name, module in model.named_modules():
        skipped = ".layers." not in name or name.rpartition(".")[2] in skip
        if isinstance(module, nn.Linear) and not skipped:
            yield name, module


def save_quantised(
    model: PreTrainedModel, folder: Path, form: Format, skip: Collection[str] = (), **options: Any
) -> Path:
    """The model's matrices become what the checkpoint's stand for. options: of save_pretrained."""
    tensors: dict[str, Tensors] = {}
    with torch.no_grad():
        for path, module in matrices(model, skip):
            found, weight = form.pack(module.weight.detach().clone())
            if module.bias is not None:
                found.pop("bias", None)
            module.weight.copy_(weight)
            tensors[path] = found
    save_model(model, folder, **options)
    for shard in sorted(folder.glob("*.safetensors")):
        _replace(shard, tensors)
    change_config(folder, quantization_config=form.config)
    return folder


def change_config(folder: Path, **keys: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **keys}))


def change_tensors(folder: Path, changes: Mapping[str, torch.Tensor | None]) -> None:
    """Of `down_proj` of the first layer, by suffix; None takes a tensor out."""
    path = folder / "model.safetensors"
    tensors = load_file(path)
    for suffix, tensor in changes.items():
        del tensors[f"{CHANGED}.{suffix}"]
        if tensor is not None:
            tensors[f"{CHANGED}.{suffix}"] = tensor
    save_file(tensors, path, metadata={"format": "pt"})


def _replace(shard: Path, quantised: dict[str, Tensors]) -> None:
    plain = load_file(shard)
    index = shard.parent / INDEX
    found = {}
    for name, tensor in plain.items():
        path, _, last = name.rpartition(".")
        if path not in quantised or last != "weight":
            found[name] = tensor
            continue
        found |= {f"{path}.{s}": t.contiguous().clone() for s, t in quantised[path].items()}
    save_file(found, shard, metadata={"format": "pt"})
    if index.exists():
        entries = json.loads(index.read_text())
        entries["weight_map"] |= dict.fromkeys(found, shard.name)
        index.write_text(json.dumps(entries))
