"""Terms of encoders' scores that depend on the distance of a key. Pure."""

import msgspec

from loraplex.server.model.spec.linear_spec import Tensors
from loraplex.server.model.spec.norm_spec import NormSpec


class DistanceBias(msgspec.Struct, frozen=True):
    """Biases that all layers add to scores by a key's distance, as T5 has them. path: of the table,
    `[buckets, heads]`. Half of the buckets are for keys behind the query. most: the distance from
    which on all share a bucket.
    """

    path: str
    buckets: int = 32
    most: int = 128

    @property
    def tensor(self) -> str:
        return f"{self.path}.weight"


class DistanceVectors(msgspec.Struct, frozen=True):
    """Vectors of distances, of which each layer makes queries and keys, as DeBERTa has them (arXiv
    2006.03654). path: of the table, `[2 * span, size]`, which has the distance 0 at `span`.
    buckets: half of them have a distance each, and the others share those up to `most`; 0 = each
    has its own up to `span`. norm: of rows; None = none. meets_queries: queries of tokens have
    scores with keys of distances. meets_keys: keys of tokens have scores with queries of distances.
    """

    path: str
    span: int
    size: int
    buckets: int
    most: int
    norm: NormSpec | None
    meets_queries: bool
    meets_keys: bool

    @property
    def tensor(self) -> str:
        return f"{self.path}.weight"

    def tensors(self) -> Tensors:
        """Names and shapes of what the checkpoint holds."""
        yield self.tensor, (2 * self.span, self.size)
        if self.norm is not None:
            yield from self.norm.tensors()
