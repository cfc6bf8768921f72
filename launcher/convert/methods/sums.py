"""Methods that add to a weight what does not depend on it, each as a `WeightChange`.

Source: `get_delta_weight` of each method's layer in PEFT 0.21.
"""

import importlib.util

import numpy as np
import numpy.typing as npt

from loraplex.adapters.common import extras
from loraplex.adapters.errors import AdapterError
from loraplex.launcher.convert.methods.delta import Matrix, WeightChange
from loraplex.launcher.convert.methods.module import Module
from loraplex.launcher.convert.plan import refusal

_MAX_SEED = (1 << 63) - 1
# Singular values below this part of the largest are rounding.
_ROUNDING = 1e-12


def adalora(module: Module) -> WeightChange:
    """`B diag(E) A`. PEFT divides by the rank at the start of the training."""
    a = module.read("lora_A", None, None)
    e = module.read("lora_E", len(a), 1)
    b = module.read("lora_B", None, len(a))
    alpha = module.values.number("lora_alpha", 8)
    scale = alpha if alpha > 0 else len(a)
    first = module.values.whole("init_r", 12)
    return WeightChange(b * (scale / (first + 1e-5)), e * a)


def vera(module: Module) -> WeightChange:
    """`diag(b) B diag(d) A`. All modules share B and A, of which each uses the beginning."""
    outputs, inputs = module.shape()
    d = module.read("vera_lambda_d", None)
    b = module.read("vera_lambda_b", outputs)
    if not module.has_shared("vera_A"):
        raise refusal(
            "the adapter has no vera_A and vera_B: they are drawn from projection_prng_key, which "
            "does not give the same everywhere; load it with PEFT where it was trained and save it "
            "with save_projection=True"
        )
    shared_a = module.read_shared("vera_A", len(d), None)
    shared_b = module.read_shared("vera_B", None, len(d))
    if shared_a.shape[1] < inputs or len(shared_b) < outputs:
        raise module.unfit(f"vera_A and vera_B are smaller than the module's {outputs}, {inputs}")
    return WeightChange(b[:, None] * shared_b[:outputs], d[:, None] * shared_a[:, :inputs])


def loha(module: Module) -> WeightChange:
    """`(w1_a w1_b) * (w2_a w2_b)`, value by value; as one product its rank is that of both."""
    _refuse_kernels(module, "hada_t1", "hada_t2")
    rank = module.rank
    w1_a, w1_b = module.read("hada_w1_a", None, rank), module.read("hada_w1_b", rank, None)
    outputs, inputs = len(w1_a), w1_b.shape[1]
    w2_a, w2_b = module.read("hada_w2_a", outputs, rank), module.read("hada_w2_b", rank, inputs)
    module.check_size(outputs, inputs)
    scale = module.scale
    if rank * rank >= min(outputs, inputs):
        return WeightChange((w1_a @ w1_b) * (w2_a @ w2_b) * scale)
    left = (w1_a[:, :, None] * w2_a[:, None, :]).reshape(outputs, -1)
    right = (w1_b[:, None, :] * w2_b[None, :, :]).reshape(-1, inputs)
    return WeightChange(left * scale, right)


def lokr(module: Module) -> WeightChange:
    """The Kronecker product of two matrices; its rank is the product of theirs."""
    _refuse_kernels(module, "lokr_t2")
    first, second = _lokr_side(module, "lokr_w1"), _lokr_side(module, "lokr_w2")
    outputs, inputs = len(first) * len(second), first.shape[1] * second.shape[1]
    module.check_size(outputs, inputs)
    (left_1, right_1), (left_2, right_2) = _factors(first), _factors(second)
    scale = module.scale
    if left_1.shape[1] * left_2.shape[1] >= min(outputs, inputs):
        return WeightChange(_kron(first, second) * scale)
    return WeightChange(_kron(left_1, left_2) * scale, _kron(right_1, right_2))


def vblora(module: Module) -> WeightChange:
    """`B A`, each made of the vectors of a bank that all modules share."""
    bank = module.read_shared("vblora_vector_bank", None, None)
    topk = module.values.whole("topk", 2)
    a = _from_bank(module, "vblora_logits_A", bank, topk)
    b = _from_bank(module, "vblora_logits_B", bank, topk)
    rank, inputs = len(a), a.shape[1] * a.shape[2]
    if b.shape[1] != rank:
        raise module.unfit("vblora_logits_A and vblora_logits_B have other ranks")
    return WeightChange(b.transpose(0, 2, 1).reshape(-1, rank), a.reshape(rank, inputs))


def miss(module: Module) -> WeightChange:
    """Sums of every r-th input, times a matrix. In the mode "mini" that repeats itself."""
    outputs, inputs = module.shape()
    if module.values.word("init_weights") == "bat":
        return _bat(module, outputs, inputs)
    block = module.read("miss_block", None, None)
    if module.values.word("init_weights") == "mini" and outputs % block.shape[1] == 0:
        block = np.tile(block, outputs // block.shape[1])
    rank, found = block.shape
    if found != outputs or not 0 < rank <= inputs:
        raise module.unfit(
            f"miss_block does not fit a module of {outputs} outputs, {inputs} inputs"
        )
    sums = np.zeros((rank, inputs))
    sums[np.arange(inputs) % rank, np.arange(inputs)] = 1
    return WeightChange(np.ascontiguousarray(block.T), sums)


def fourierft(module: Module) -> WeightChange:
    """The real part of a spectrum's inverse transform. Its places are drawn from a seed."""
    outputs, inputs = module.shape()
    spectrum = module.read("fourierft_spectrum", None)
    if len(spectrum) > outputs * inputs:
        raise module.unfit(f"fourierft_spectrum has more than {outputs * inputs} values")
    seed = module.values.whole("random_loc_seed", 777, least=0, most=_MAX_SEED)
    dense = np.zeros(outputs * inputs)
    dense[_first_drawn(outputs * inputs, len(spectrum), seed)] = spectrum
    whole = np.fft.ifft2(dense.reshape(outputs, inputs)).real
    return WeightChange(whole * module.values.number("scaling", 150.0))


def c3a(module: Module) -> WeightChange:
    """Blocks whose rows are each other's, moved on by one; divided by the number of inputs."""
    kernel = module.read("c3a_kernel", None, None, None)
    rows, columns, size = kernel.shape
    module.check_size(rows * size, columns * size)
    moved = (np.arange(size)[None, :] - np.arange(size)[:, None]) % size
    blocks = kernel[:, :, moved]  # [rows, columns, output, input]
    whole = blocks.transpose(0, 2, 1, 3).reshape(rows * size, columns * size)
    return WeightChange(whole / (columns * size))


def randlora(module: Module) -> WeightChange:
    """A sum of products of random matrices, which all modules share, with trained diagonals."""
    outputs, inputs = module.shape()
    read = module.read if module.has("randlora_A") else module.read_shared
    if not module.has("randlora_A") and not module.has_shared("randlora_A"):
        raise refusal(
            "the adapter has no randlora_A and randlora_B: load it with PEFT where it was trained "
            "and save it with save_projection=True"
        )
    small, large = sorted((outputs, inputs))
    rank = module.values.whole("r", 32)
    weights = module.read("randlora_lambda", rank, None)
    bases = weights.shape[1]
    gamma = module.read("randlora_gamma", bases, small)
    shared_a = read("randlora_A", rank, 1, None)[:, :, :small]
    shared_b = read("randlora_B", None, None, rank)[:large, :bases]
    if shared_a.shape[2] < small or shared_b.shape[:2] != (large, bases):
        raise module.unfit("randlora_A and randlora_B are too small for the module")
    module.check_size(rank * bases, small)
    flat_a = (weights[:, :, None] * shared_a * gamma[None]).reshape(rank * bases, small)
    flat_b = shared_b.reshape(large, rank * bases)
    scale = module.values.number("randlora_alpha", 640) / rank
    if small == inputs:
        return WeightChange(flat_b * scale, flat_a)
    return WeightChange(flat_a.T * scale, flat_b.T)


def _refuse_kernels(module: Module, *names: str) -> None:
    for name in names:
        if module.has(name):
            raise module.unfit(f"{name} is of a convolution, which the base does not have")


def _lokr_side(module: Module, name: str) -> Matrix:
    if module.has(name):
        return module.read(name, None, None)
    a = module.read(f"{name}_a", None, module.rank)
    b = module.read(f"{name}_b", module.rank, None)
    module.check_size(len(a), b.shape[1])
    return a @ b


def _factors(matrix: Matrix) -> tuple[Matrix, Matrix]:
    """Two matrices of no more than the matrix's rank, whose product it is."""
    left, values, right = np.linalg.svd(matrix, full_matrices=False)
    rank = int((values > _ROUNDING * values.max(initial=0.0)).sum())
    return left[:, :rank] * values[:rank], right[:rank]


def _kron(first: Matrix, second: Matrix) -> Matrix:
    return np.asarray(np.kron(first, second), np.float64)


def _from_bank(module: Module, name: str, bank: Matrix, topk: int) -> Matrix:
    """`[rows, columns, length]`: sums of `topk` vectors each."""
    if module.has(f"{name}_topk_indices"):
        chosen = module.read_indices(f"{name}_topk_indices", len(bank))
        if chosen.ndim != 3:
            raise module.unfit(f"{name}_topk_indices: expected three sides")
        shape = (*chosen.shape[:2], chosen.shape[2] - 1)
        weights = module.read(f"{name}_topk_weights", *shape)
        weights = np.append(weights, 1 - weights.sum(-1, keepdims=True), axis=-1)
    else:
        logits = module.read(name, None, None, len(bank))
        if topk > len(bank):
            raise module.unfit(f"topk is {topk}, and the bank has {len(bank)} vectors")
        ordered = np.argsort(-logits, axis=-1, kind="stable")
        _refuse_ties(module, name, logits, ordered[..., topk - 1 : topk + 1])
        chosen = ordered[..., :topk]
        largest = np.take_along_axis(logits, chosen, -1)
        weights = np.exp(largest - largest.max(-1, keepdims=True))
        weights /= weights.sum(-1, keepdims=True)
    module.check_size(*chosen.shape, bank.shape[1])
    made: Matrix = np.einsum("...k,...kv->...v", weights, bank[chosen])
    return made


def _refuse_ties(
    module: Module, name: str, logits: Matrix, border: npt.NDArray[np.integer]
) -> None:
    """border: places of the last vector that is taken, and of the first that is not."""
    values = np.take_along_axis(logits, border, -1)
    if values.shape[-1] == 2 and (values[..., 0] == values[..., 1]).any():
        raise module.unfit(
            f"{name}: of equal logits PEFT takes any for topk, which differs between machines; "
            "load it with PEFT where it was trained and save it with save_only_topk_weights=True"
        )


def _bat(module: Module, outputs: int, inputs: int) -> WeightChange:
    """Each block of the weight times a square of its row of blocks, and that square added."""
    squares = module.read("miss_block", None, None, None)
    rows, size, width = squares.shape
    if size != width or not size or rows * size != outputs or inputs % size:
        raise module.unfit(
            f"miss_block does not fit a module of {outputs} outputs, {inputs} inputs"
        )
    blocks = module.weight().reshape(rows, size, inputs // size, size).transpose(2, 0, 1, 3)
    change = blocks @ squares + squares
    return WeightChange(change.transpose(1, 2, 0, 3).reshape(outputs, inputs))


def _first_drawn(count: int, wanted: int, seed: int) -> Matrix:
    """The first numbers of torch's permutation of `count`, as PEFT draws it on every machine."""
    if importlib.util.find_spec("torch") is None:
        how = extras.remedy("torch", "convert")
        raise AdapterError("unavailable", f"FourierFT's places are drawn by torch: {how}")
    import torch

    generator = torch.Generator().manual_seed(seed)
    drawn: Matrix = torch.randperm(count, generator=generator)[:wanted].numpy()
    return drawn
