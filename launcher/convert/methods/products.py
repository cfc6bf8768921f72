"""Methods that multiply a weight. Each makes the `WeightChange` of a module with the base's weight.

Source: `forward` of each method's layer in PEFT 0.21.
"""

import numpy as np

from loraplex.launcher.convert.methods.delta import Matrix, WeightChange
from loraplex.launcher.convert.methods.module import Module


def ia3(module: Module) -> WeightChange:
    """Inputs or outputs times a vector; the module's bias is a part of its outputs."""
    weight = module.weight()
    outputs, inputs = weight.shape
    if outputs != 1 and module.sides("ia3_l")[:1] == (1,):
        return WeightChange(weight * (module.read("ia3_l", 1, inputs) - 1))
    factors = module.read("ia3_l", outputs, 1) - 1
    bias = module.base.bias(module.path)
    return WeightChange(weight * factors, bias=None if bias is None else bias * factors[:, 0])


def hra(module: Module) -> WeightChange:
    """`W H_1 … H_r` with Householder's reflections: r columns and rows of change."""
    weight = module.weight()
    vectors = module.read("hra_u", weight.shape[1], None)
    if module.values.flag("apply_GS"):
        vectors = _orthonormal(vectors)
    lengths = np.linalg.norm(vectors, axis=0)
    if not lengths.all():
        raise module.unfit("hra_u has a vector of zeros, whose reflection is not defined")
    columns, changed = [], weight.copy()
    for vector in (vectors / lengths).T:
        columns.append(-2 * changed @ vector)
        changed += np.outer(columns[-1], vector)
    left = np.stack(columns, 1) if columns else np.zeros((len(weight), 0))
    return WeightChange(left, (vectors / lengths).T)


def oft(module: Module) -> WeightChange:
    """`W R^T` with a block-diagonal R, whose blocks rotate a few inputs each."""
    weight = module.weight()
    inputs = weight.shape[1]
    numbers = module.read("oft_R.weight", None, None)
    size = (1 + round((1 + 8 * numbers.shape[1]) ** 0.5)) // 2
    count = 1 if module.values.flag("block_share") else inputs // size
    if numbers.shape != (count, size * (size - 1) // 2) or inputs % size:
        raise module.unfit(f"oft_R.weight {list(numbers.shape)} does not fit {inputs} inputs")
    skew = np.zeros((count, size, size))
    skew[:, *np.triu_indices(size, 1)] = numbers
    skew -= skew.transpose(0, 2, 1)
    if module.values.flag("coft"):
        skew = _shortened(skew, module.values.number("eps", 6e-5))
    if module.values.flag("use_cayley_neumann", default=True):
        rotations = _neumann(skew, module.values.whole("num_cayley_neumann_terms", 5))
    else:
        rotations = _cayley(skew)
    return WeightChange(_rotated(weight, rotations.transpose(0, 2, 1)) - weight)


def boft(module: Module) -> WeightChange:
    """As OFT with blocks of another parameter, and outputs times a vector."""
    weight = module.weight()
    outputs, inputs = weight.shape
    numbers = module.read("boft_R", None, None, None, None)
    factors = module.read("boft_s", outputs, 1)
    if len(numbers) != 1:
        raise module.unfit("boft_n_butterfly_factor of more than 1 is not converted: merge it")
    _, count, size, width = numbers.shape
    if size != width or count * size != inputs:
        raise module.unfit(f"boft_R {list(numbers.shape)} does not fit {inputs} inputs")
    skew = (numbers[0] - numbers[0].transpose(0, 2, 1)) / 2
    rotated = _rotated(weight, _cayley(skew).transpose(0, 2, 1))
    return WeightChange(rotated * factors - weight)


def _orthonormal(vectors: Matrix) -> Matrix:
    """Gram and Schmidt's way, column by column, as PEFT goes it."""
    made: list[Matrix] = []
    for column in vectors.T:
        vector = column.copy()
        for other in made:
            vector -= (other @ vector) * other
        length = float(np.linalg.norm(vector))
        made.append(vector / length if length else vector)
    return np.stack(made, 1) if made else vectors


def _shortened(skew: Matrix, eps: float) -> Matrix:
    """Blocks that are longer than COFT allows get the length that it allows."""
    most = eps / len(skew) ** 0.5
    lengths = np.linalg.norm(skew, axis=(1, 2), keepdims=True)
    return np.where(lengths <= most, skew, skew * (most / np.where(lengths > 0, lengths, 1)))


def _neumann(skew: Matrix, terms: int) -> Matrix:
    """`I + 2 Q + 2 Q^2 + … + Q^(terms - 1)`, PEFT's stand-in for Cayley's transform."""
    rotations = np.tile(np.eye(skew.shape[-1]), (len(skew), 1, 1))
    if terms > 1:
        rotations += 2 * skew
    if terms > 2:
        power = skew @ skew
        rotations += 2 * power
        for _ in range(3, terms - 1):
            power = power @ skew
            rotations += 2 * power
        rotations += power @ skew
    return rotations


def _cayley(skew: Matrix) -> Matrix:
    """`(I - Q) (I + Q)^-1`; with a skew-symmetric Q, `I + Q` has an inverse."""
    one = np.eye(skew.shape[-1])
    solved = np.linalg.solve((one + skew).transpose(0, 2, 1), (one - skew).transpose(0, 2, 1))
    return np.asarray(solved.transpose(0, 2, 1), np.float64)


def _rotated(weight: Matrix, blocks: Matrix) -> Matrix:
    """`W` times the block-diagonal matrix of `blocks`; a single one counts for all."""
    size = blocks.shape[-1]
    parts = weight.reshape(len(weight), -1, size).transpose(1, 0, 2)
    return (parts @ blocks).transpose(1, 0, 2).reshape(weight.shape)
