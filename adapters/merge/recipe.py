"""A merge's recipe: its checks, its canonical form, and its identity. Pure."""

import hashlib
import math
import re
from collections.abc import Sequence
from typing import Literal, get_args

import msgspec

from loraplex.adapters.errors import AdapterError

MergeStrategy = Literal["linear", "ties", "dare_linear", "dare_ties"]
SignMethod = Literal["total", "frequency"]

STRATEGIES: tuple[str, ...] = get_args(MergeStrategy)
SIGN_METHODS: tuple[str, ...] = get_args(SignMethod)
MAX_MEMBERS = 16
MAX_WEIGHT = 1000.0
# Of a member of a linear merge; what is left of weights that cancel each other out lies below.
MIN_WEIGHT = 1e-9

# Changes whenever the same recipe would give other weights.
_VERSION = b"loraplex merge 1"
_DIGEST = re.compile(r"[0-9a-f]{64}")


class MergeMember(msgspec.Struct, frozen=True, array_like=True):
    """One adapter of a merge, with its weight. digest: of an admitted adapter. weight: of its true
    delta `scale * B A`.
    """

    digest: str
    weight: float


class MergeRecipe(msgspec.Struct, frozen=True, array_like=True):
    """A recipe that merges admitted adapters' true deltas; names mean what PEFT's do.

    density: share of a delta's values that `ties` and `dare_*` keep, in (0, 1].
    majority_sign_method: how `ties` and `dare_ties` elect each value's sign.
    """

    members: tuple[MergeMember, ...]
    strategy: MergeStrategy = "linear"
    density: float = 1.0
    majority_sign_method: SignMethod = "total"

    @property
    def digest(self) -> str:
        """The merged adapter's identity (sha256 hex); seeds the masks of `dare_*`, too."""
        return hashlib.sha256(_VERSION + msgspec.json.encode(self)).hexdigest()


def make_recipe(
    members: Sequence[MergeMember],
    strategy: MergeStrategy,
    density: float,
    majority_sign_method: SignMethod,
) -> MergeRecipe:
    """The simplest recipe with this result. Raises AdapterError `invalid` when there is none.

    Values that a strategy does not use are left out; a single member is merged linearly, as PEFT
    does. For `linear`, members with the same content are added up and weights of 0 are dropped.
    """
    kept = tuple(MergeMember(member.digest, member.weight + 0.0) for member in members)
    if len(kept) == 1 or strategy == "linear":
        recipe = MergeRecipe(_added_up(kept))
    elif strategy == "dare_linear":
        recipe = MergeRecipe(kept, strategy, density)
    else:
        recipe = MergeRecipe(kept, strategy, density, majority_sign_method)
    problem = recipe_problem(recipe)
    if problem is not None:
        raise AdapterError("invalid", f"these adapters cannot be merged: {problem}")
    return recipe


def recipe_problem(recipe: MergeRecipe) -> str | None:
    """Why nothing can be made by this recipe, or None."""
    weights = [member.weight for member in recipe.members]
    if not any(weights):
        return "every weight is 0, or they cancel each other out"
    if len(weights) > MAX_MEMBERS:
        return f"at most {MAX_MEMBERS} adapters are merged, got {len(weights)}"
    if not all(math.isfinite(weight) and abs(weight) <= MAX_WEIGHT for weight in weights):
        return f"a weight lies within +-{MAX_WEIGHT:g}"
    if not 0 < recipe.density <= 1:
        return f"density lies above 0 and is at most 1, got {recipe.density:g}"
    if not all(_DIGEST.fullmatch(member.digest) for member in recipe.members):
        return "a digest has 64 hexadecimal digits"
    return None


def sole_member(recipe: MergeRecipe) -> str | None:
    """The digest of the one adapter that the recipe leaves as it is, if it does."""
    alone = len(recipe.members) == 1 and recipe.members[0].weight == 1
    return recipe.members[0].digest if alone else None


def _added_up(members: Sequence[MergeMember]) -> tuple[MergeMember, ...]:
    sums: dict[str, float] = {}
    for member in members:
        sums[member.digest] = sums.get(member.digest, 0.0) + member.weight
    return tuple(
        MergeMember(digest, weight) for digest, weight in sums.items() if abs(weight) >= MIN_WEIGHT
    )
