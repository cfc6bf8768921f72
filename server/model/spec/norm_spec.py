"""A norm over features. Pure."""

from typing import Literal

import msgspec

from loraplex.server.model.spec.linear_spec import Tensors

NormKind = Literal["rms", "layer", "scale"]


class NormSpec(msgspec.Struct, frozen=True):
    """A norm over `size` features. path: its module. offset: added to the stored weight at load, as
    Gemma stores the weight less one. kind: by the root of the mean square, or LayerNorm, which
    takes the mean away before; a scale is the weight alone, in place of a norm. bias: of a
    LayerNorm. has_weight: False = a norm without. factor: of the stored weight. name: of its tensor
    in the module. heads: of a norm over each head whose weight is each head's own; 0 = all features
    share one. is_listed: the checkpoint has a tensor for each head."""

    path: str
    size: int
    epsilon: float
    offset: float = 0.0
    kind: NormKind = "rms"
    bias: bool = False
    has_weight: bool = True
    factor: float = 1.0
    name: str = "weight"
    heads: int = 0
    is_listed: bool = False

    @property
    def is_plain(self) -> bool:
        """Whether its weight is one tensor, which is stored as a module's weight."""
        is_weight = self.has_weight and self.name == "weight" and self.factor == 1.0
        return is_weight and not self.is_listed

    @property
    def numbers(self) -> int:
        """Numbers of its weight."""
        return self.size * max(self.heads, 1)

    def tensors(self) -> Tensors:
        """Names and shapes of what the checkpoint holds."""
        if self.is_listed:
            yield from ((name, (self.size,)) for name in self.listed(self.path))
        elif self.has_weight:
            shape = (self.heads, self.size) if self.heads else (self.size,)
            yield f"{self.path}.{self.name}", shape
        if self.bias:
            yield f"{self.path}.bias", (self.size,)

    def listed(self, path: str) -> list[str]:
        """List the tensors of heads. path: the module's whole path."""
        return [f"{path}.norms.{head}.{self.name}" for head in range(self.heads)]
