"""Carries out a merge in a folder of its own, which holds the job and its members' files.

It writes the merged adapter's config and weights, one module at a time; what the result is worth is
judged elsewhere.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from loraplex.adapters.base import BaseSpec
from loraplex.adapters.judge import rejudge
from loraplex.adapters.manifest import AdapterManifest
from loraplex.adapters.merge.delta import MemberDelta, draw_seed, merge_deltas
from loraplex.adapters.merge.low_rank import Matrix, factorise
from loraplex.adapters.merge.plan import MergedModule, merged_config, plan_merge
from loraplex.adapters.merge.recipe import MergeRecipe
from loraplex.adapters.peft.config import CONFIG_FILE
from loraplex.adapters.peft.own_ends import GENERATION_FILE
from loraplex.adapters.peft.validate import WEIGHTS_FILE, AdapterLimits
from loraplex.adapters.safetensors.file import WeightsFile, open_weights
from loraplex.adapters.safetensors.floats import read_floats
from loraplex.adapters.safetensors.header import TensorInfo

_JOB_FILE = "job.json"
_PREFIX = "base_model.model."
_LINEAR_NAMES = ("lora_A.weight", "lora_B.weight")
_EMBEDDING_NAMES = ("lora_embedding_A", "lora_embedding_B")

Read = Callable[[int, TensorInfo], Matrix]
_Make = Callable[[MergedModule], tuple[Matrix, Matrix]]


class MergeJob(msgspec.Struct, frozen=True):
    """What to merge. The members' files lie in the folders `0`, `1`, …"""

    recipe: MergeRecipe
    base: BaseSpec
    limits: AdapterLimits


def write_job(folder: Path, job: MergeJob, contents: Sequence[Path]) -> None:
    """contents: for each member of the recipe, the folder of its judged files; they are linked."""
    (folder / _JOB_FILE).write_bytes(msgspec.json.encode(job))
    for index, content in enumerate(contents):
        member = folder / str(index)
        member.mkdir()
        for name in (CONFIG_FILE, WEIGHTS_FILE):
            (member / name).hardlink_to(content / name)


def write_ends(folder: Path, members: Sequence[AdapterManifest]) -> None:
    """A merged adapter may end its answers as each of its members does."""
    ends = sorted({i for member in members for i in member.end_token_ids or ()})
    if ends:
        (folder / GENERATION_FILE).write_bytes(msgspec.json.encode({"eos_token_id": ends}))


def run_job(folder: Path) -> None:
    """Writes the merged adapter's files into the folder. Raises AdapterError, OSError."""
    job = msgspec.json.decode((folder / _JOB_FILE).read_bytes(), type=MergeJob)
    members = [folder / str(index) for index in range(len(job.recipe.members))]
    tensors = [rejudge(member, job.base, job.limits) for member in members]
    modules = plan_merge(job.recipe, tensors, job.base, job.limits).modules
    config = msgspec.json.encode(merged_config(modules, job.base))
    (folder / CONFIG_FILE).write_bytes(config)
    with ExitStack() as stack:
        files = [stack.enter_context(open_weights(member / WEIGHTS_FILE)) for member in members]
        make = partial(_make, partial(_read, files), job.recipe)
        _write_weights(folder / WEIGHTS_FILE, modules, make)


def _read(files: Sequence[WeightsFile], member: int, tensor: TensorInfo) -> Matrix:
    values = read_floats(files[member].read(tensor), tensor.dtype)
    return values.reshape(tensor.shape).astype(np.float32, copy=False)


def _make(read: Read, recipe: MergeRecipe, module: MergedModule) -> tuple[Matrix, Matrix]:
    """A `[rank, in_features]` and B `[out_features, rank]`."""
    factors = [
        (read(part.member, part.lora.a), np.float32(part.factor) * read(part.member, part.lora.b))
        for part in module.parts
    ]
    if recipe.strategy == "linear":
        a = np.concatenate([a for a, _ in factors], axis=0)
        return a, np.concatenate([b for _, b in factors], axis=1)
    deltas = [
        MemberDelta(part.member, recipe.members[part.member].weight, b, a)
        for part, (a, b) in zip(module.parts, factors, strict=True)
    ]
    merged = merge_deltas(deltas, recipe, module.path)
    b, a = factorise(merged, module.lora_rank, draw_seed(recipe, module.path))
    return a, b


def _write_weights(target: Path, modules: Sequence[MergedModule], make: _Make) -> None:
    """A safetensors file of float32, written as the modules come."""
    header = msgspec.json.encode({"__metadata__": {"format": "pt"}} | dict(_entries(modules)))
    header += b" " * (-len(header) % 8)
    with target.open("xb") as out:
        out.write(len(header).to_bytes(8, "little") + header)
        for module in modules:
            for matrix in make(module):
                out.write(np.ascontiguousarray(matrix, dtype="<f4").data)


def _entries(modules: Sequence[MergedModule]) -> Iterator[tuple[str, dict[str, Any]]]:
    position = 0
    for module in modules:
        embedding = module.module == "embed_tokens"
        names = _EMBEDDING_NAMES if embedding else _LINEAR_NAMES
        shapes = (
            (module.lora_rank, module.shape.in_features),
            (module.shape.out_features, module.lora_rank),
        )
        for name, shape in zip(names, shapes, strict=True):
            end = position + 4 * shape[0] * shape[1]
            entry = {"dtype": "F32", "shape": shape, "data_offsets": (position, end)}
            yield f"{_PREFIX}{module.path}.{name}", entry
            position = end
