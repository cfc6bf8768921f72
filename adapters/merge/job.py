"""Carries out a merge in a folder of its own, which holds the job and its members' files.

The merged adapter's config and weights are written one module at a time, and judged elsewhere.
"""

import hashlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from loraplex.adapters.base import BaseSpec
from loraplex.adapters.judge import rejudge
from loraplex.adapters.manifest import AdapterManifest
from loraplex.adapters.merge.plan import MergedModule, merged_config, plan_merge
from loraplex.adapters.merge.recipe import MergeRecipe, SignMethod
from loraplex.adapters.peft.config import CONFIG_FILE
from loraplex.adapters.peft.files import GENERATION_FILE
from loraplex.adapters.peft.validate import WEIGHTS_FILE, AdapterLimits
from loraplex.adapters.safetensors.file import WeightsFile, open_weights
from loraplex.adapters.safetensors.floats import read_floats
from loraplex.adapters.safetensors.header import TensorInfo

Matrix = npt.NDArray[np.float32]

# Up to this side LAPACK's full decomposition is fast enough.
EXACT_SIDE = 512
_OVERSAMPLING = 8
_POWERS = 3
Mask = npt.NDArray[np.bool_]
_BLOCK_VALUES = 1 << 21
_JOB_FILE = "job.json"
_PREFIX = "base_model.model."
_LINEAR_NAMES = ("lora_A.weight", "lora_B.weight")
_EMBEDDING_NAMES = ("lora_embedding_A", "lora_embedding_B")

Read = Callable[[int, TensorInfo], Matrix]
_Make = Callable[[MergedModule], tuple[Matrix, Matrix]]


class MergeJob(msgspec.Struct, frozen=True):
    """A merge to carry out. The members' files lie in the folders `0`, `1`, …"""

    recipe: MergeRecipe
    base: BaseSpec
    limits: AdapterLimits


def write_job(folder: Path, job: MergeJob, contents: Sequence[Path]) -> None:
    """Writes a merge into a folder, from which a process can run it. contents: for each member of
    the recipe, the folder of its judged files; they are linked.
    """
    (folder / _JOB_FILE).write_bytes(msgspec.json.encode(job))
    for index, content in enumerate(contents):
        member = folder / str(index)
        member.mkdir()
        for name in (CONFIG_FILE, WEIGHTS_FILE):
            (member / name).hardlink_to(content / name)


def write_ends(folder: Path, members: Sequence[AdapterManifest]) -> None:
    """Writes the tokens that end a merged adapter's answers: all that end those of any member."""
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
    """Computes a merged module's A `[rank, in_features]` and B `[out_features, rank]`."""
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


class MemberDelta(NamedTuple):
    """One member's delta of the module, `b @ a`, with its weight. member: its place."""

    member: int
    weight: float
    b: Matrix
    a: Matrix


def merge_deltas(deltas: Sequence[MemberDelta], recipe: MergeRecipe, path: str) -> Matrix:
    """The merged delta, `[out_features, in_features]`. One such matrix more is held meanwhile."""
    keepers = [_keeper(delta, recipe, path) for delta in deltas]
    merged = np.empty((len(deltas[0].b), deltas[0].a.shape[1]), np.float32)
    for rows in _row_blocks(*merged.shape):
        kept = [
            keep.block(delta.b[rows] @ delta.a) for delta, keep in zip(deltas, keepers, strict=True)
        ]
        merged[rows] = _combine(kept, [delta.weight for delta in deltas], recipe)
    return merged


def draw_seed(recipe: MergeRecipe, *names: str) -> int:
    """The seed of one random draw of the recipe; another name, another draw."""
    text = "\0".join((recipe.digest, *names))
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:16], "little")


class RandomKeeper:
    """Chooses values as DARE: each stays with probability `density`, scaled to make up."""

    def __init__(self, density: float, seed: int) -> None:
        self._density = np.float32(density)
        self._rng = np.random.default_rng(seed)

    def mask(self, shape: tuple[int, ...]) -> Mask:
        """The next rows' mask."""
        return self._rng.random(shape, dtype=np.float32) < self._density

    def block(self, values: Matrix) -> Matrix:
        return values * self.mask(values.shape) / self._density


class LargestKeeper:
    """Chooses values as TIES: the share `density` of the largest, equal ones all."""

    def __init__(self, delta: MemberDelta, density: float) -> None:
        self._least = _magnitude(delta, density)

    def block(self, values: Matrix) -> Matrix:
        return np.where(np.abs(values) >= self._least, values, np.float32(0))


def _keeper(delta: MemberDelta, recipe: MergeRecipe, path: str) -> RandomKeeper | LargestKeeper:
    if recipe.strategy == "ties":
        return LargestKeeper(delta, recipe.density)
    return RandomKeeper(recipe.density, draw_seed(recipe, path, str(delta.member)))


def _magnitude(delta: MemberDelta, density: float) -> float:
    """The least magnitude that is kept; computed as the blocks are, so that they compare equal."""
    if density >= 1:
        return 0.0
    magnitudes = np.empty((len(delta.b), delta.a.shape[1]), np.float32)
    for rows in _row_blocks(*magnitudes.shape):
        np.abs(delta.b[rows] @ delta.a, out=magnitudes[rows])
    kept = int(density * magnitudes.size)
    if kept == 0:
        return float("inf")
    flat = magnitudes.reshape(-1)
    flat.partition(flat.size - kept)
    return float(flat[flat.size - kept])


def _combine(kept: Sequence[Matrix], weights: Sequence[float], recipe: MergeRecipe) -> Matrix:
    total, voters = _zero(kept), _zero(kept)
    if recipe.strategy == "dare_linear":
        for weight, values in zip(weights, kept, strict=True):
            total += np.float32(weight) * values
        return total
    elected = _elect(kept, recipe.majority_sign_method)
    for weight, values in zip(weights, kept, strict=True):
        agrees = np.sign(values) == elected
        total += np.float32(weight) * values * agrees
        voters += agrees
    total /= np.maximum(voters, np.float32(1))
    return total


def _elect(kept: Sequence[Matrix], method: SignMethod) -> Matrix:
    """1 or -1 for each value: the sign of the unweighted sum, or of the count of signs."""
    votes = (values if method == "total" else np.sign(values) for values in kept)
    return np.where(sum(votes, _zero(kept)) >= 0, np.float32(1), np.float32(-1))


def _zero(kept: Sequence[Matrix]) -> Matrix:
    return np.zeros_like(kept[0])


def _row_blocks(rows: int, columns: int) -> Iterator[slice]:
    step = max(1, _BLOCK_VALUES // columns)
    for start in range(0, rows, step):
        yield slice(start, min(start + step, rows))


def factorise(matrix: Matrix, rank: int, seed: int) -> tuple[Matrix, Matrix]:
    """B `[rows, rank]` and A `[rank, columns]` such that B A is closest to `matrix`.

    Exact where a side has at most `EXACT_SIDE` values. Beyond, a randomised block Krylov method
    (Musco and Musco, NeurIPS 2015, algorithm 2) starts from a matrix drawn from `seed`. Its error
    is within a fraction of a percent of the best approximation's. Singular values are split evenly.
    """
    if min(matrix.shape) <= EXACT_SIDE:
        left, values, right = np.linalg.svd(matrix, full_matrices=False)
    else:
        basis = _krylov_basis(matrix, rank + _OVERSAMPLING, seed)
        left, values, right = np.linalg.svd(basis.T @ matrix, full_matrices=False)
        left = basis @ left
    roots = np.sqrt(values[:rank])
    return left[:, :rank] * roots, roots[:, None] * right[:rank]


def _krylov_basis(matrix: Matrix, width: int, seed: int) -> Matrix:
    """Orthonormal columns that span `(M M^T)^q M G` for q = 0 .. `_POWERS` and a random G."""
    rng = np.random.default_rng(seed)
    start = rng.standard_normal((matrix.shape[1], width), dtype=np.float32)
    block = _orthonormal(matrix @ start)
    blocks = [block]
    for _ in range(_POWERS):
        block = _orthonormal(matrix @ _orthonormal(matrix.T @ block))
        blocks.append(block)
    return _orthonormal(np.concatenate(blocks, axis=1))


def _orthonormal(columns: Matrix) -> Matrix:
    return np.linalg.qr(columns)[0]
