"""From products of queries and keys to scores: scale, soft cap and slopes, in base 2 for the
softmax."""

from dataclasses import dataclass, field
from typing import Any

import torch
import triton
import triton.language as tl

LOG2_E = tl.constexpr(1.4426950408889634)
# Below every score, and finite: what no key was seen for yet decays to nothing.
NO_SCORE = tl.constexpr(-1e30)


@dataclass(frozen=True, slots=True)
class ScoreRule:
    """The rule of one layer's scores. scale: of `q k^T`, more than 0.

    softcap: scores become `softcap * tanh(score / softcap)`, None = as they are. window: a token
    sees that many latest tokens, itself included; None = all. slopes: float32 `[heads]`, what a
    score loses for each token that the key lies before the query (ALiBi), None = nothing.
    """

    scale: float
    softcap: float | None = None
    window: int | None = None
    slopes: torch.Tensor | None = field(default=None, compare=False)

    @property
    def inner(self) -> float:
        """The factor inside the soft cap's tanh; 1 without a cap."""
        return 1.0 if self.softcap is None else self.scale / self.softcap

    @property
    def outer(self) -> float:
        """The factor that makes scores to base 2 of products, or of their tanh."""
        factor = self.scale if self.softcap is None else self.softcap
        return factor * float(LOG2_E.value)

    @property
    def arguments(self) -> tuple[float, float, int]:
        """Arguments of a kernel: inner, outer, window."""
        return self.inner, self.outer, self.window or 0

    @property
    def switches(self) -> dict[str, bool]:
        """Switches of a kernel."""
        return {"CAPPED": self.softcap is not None, "WINDOWED": self.window is not None}


@triton.jit
def capped(products: tl.tensor, inner: tl.tensor) -> Any:
    """`tanh(inner * products)`, float32, with an absolute error of some 1e-7."""
    return 1.0 - 2.0 / (tl.exp2(products * (inner * (2.0 * LOG2_E))) + 1.0)


@triton.jit
def slopes_of(slopes_ptr: tl.tensor, heads: tl.tensor, live: tl.tensor, outer: tl.tensor) -> Any:
    """Slopes of query heads as `outer` finds them, float32 as `heads`, 0 where not live."""
    slopes = tl.load(slopes_ptr + heads, mask=live, other=0.0)
    return slopes * (LOG2_E / outer)
