"""The BaseSpec of a model's folder, with the facts that only its files tell. No torch."""

import mmap
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
from msgspec.structs import replace

from loraplex.adapters.base import BaseSpec
from loraplex.adapters.safetensors.floats import float_digest
from loraplex.server.model.checkpoint.checkpoint import (
    CheckpointError,
    ModelFile,
    base_digest,
    read_config,
    read_shards,
    stored_tensors,
    tables,
)
from loraplex.server.model.checkpoint.stored_forms import stored_forms
from loraplex.server.model.checkpoint.text_part import model_shards
from loraplex.server.model.checkpoint.tower_part import has_tower
from loraplex.server.model.spec.base_spec import base_spec
from loraplex.server.model.tokenizer.base_ends import end_token_ids
from loraplex.server.model.tokenizer.base_templates import (
    chat_templates,
    template_tokens,
    usable_templates,
)
from loraplex.server.model.tokenizer.base_tokenizer import (
    has_tokenizer,
    read_tokenizer,
    special_token_settings,
)

_THREADS = 16
_FLOAT_DTYPES = ("F64", "F32", "F16", "BF16")


def read_base_spec(folder: Path, names: tuple[str, ...]) -> BaseSpec:
    """Facts about the model that adapters are validated against.

    The embeddings are read once, for their digests. Raises CheckpointError, also for a tied head
    that is stored and is another.
    """
    model = read_config(folder)
    if model.pictures is not None and not has_tower(read_shards(folder)):
        model = replace(model, pictures=None)
    read = model_shards(folder, model)
    shards = {name: shard for shard in read for name in shard.tensors}
    names_of = {"embed_tokens": tables(shards, model)[0], "lm_head": tables(shards, model)[-1]}
    if model.head.linear.parts[0].path in stored_forms(model, stored_tensors(read)):
        del names_of["lm_head"]  # no adapter holds a copy of what is quantised
    elif model.head.linear.bias:
        names_of["lm_head.bias"] = f"{model.head.linear.parts[0].path}.bias"
    tensors = tuple(dict.fromkeys(names_of.values()))
    with ThreadPoolExecutor(_THREADS) as threads:  # a gigabyte each, at the start
        found = {name: _digest(shards, name, threads) for name in tensors}
    digests = {module: found[name] for module, name in names_of.items()}
    if model.head.tied and digests.get("lm_head") not in (None, digests["embed_tokens"]):
        raise CheckpointError(
            f"{folder}: config.json ties lm_head to embed_tokens, but the weights hold a different"
            f" {model.head.tensor}; set tie_word_embeddings to false to use it, or remove it"
        )
    digest = base_digest(folder)
    if not has_tokenizer(folder):
        return base_spec(model, digest, names, digests, None, model.eos_token_ids)
    tokenizer, _ = read_tokenizer(folder)
    special = template_tokens(special_token_settings(folder))
    templates = usable_templates(chat_templates(folder), special)
    ends = end_token_ids(model, tokenizer, special, templates.values())
    return base_spec(model, digest, names, digests, tokenizer.get_vocab(), ends)


def _digest(shards: Mapping[str, ModelFile], name: str, threads: ThreadPoolExecutor) -> str:
    shard = shards.get(name)
    if shard is None or shard.tensors[name].dtype not in _FLOAT_DTYPES:
        raise CheckpointError(f"the model's weights have no {name} in floating point")
    tensor = shard.tensors[name]
    with shard.path.open("rb") as file:
        mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        raw = np.frombuffer(mapped, np.uint8)[tensor.start : tensor.end]
        return float_digest(raw, tensor.dtype, threads.map)
