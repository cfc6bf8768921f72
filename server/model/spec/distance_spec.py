"""Terms of encoders' scores that depend on the distance of a key. Pure."""

from loraplex.server.model.spec.linear_spec import LookupTable, Tensors, tensors_of
from loraplex.server.model.spec.norm_spec import NormSpec


class DistanceBias(LookupTable, frozen=True):
    """Biases that all layers add to scores by a key's distance, as T5 has them: a table `[buckets,
    heads]`. Half of the buckets are for keys behind the query. most: the distance from
    which on all share a bucket.
    """

    buckets: int = 32
    most: int = 128


class DistanceVectors(LookupTable, frozen=True):
    """Vectors of distances, of which each layer makes queries and keys, as DeBERTa has them (arXiv
    2006.03654): a table `[2 * span, size]`, which has the distance 0 at `span`. buckets: half of
    them have a distance each, and the others share those up to `most`; 0 = each has its own up to
    `span`. norm: of rows; None = none. meets_queries: queries of tokens have scores with keys of
    distances. meets_keys: keys of tokens have scores with queries of distances.
    """

    span: int
    size: int
    buckets: int
    most: int
    norm: NormSpec | None
    meets_queries: bool
    meets_keys: bool

    def tensors(self) -> Tensors:
        """Names and shapes of what the checkpoint holds."""
        yield self.tensor, (2 * self.span, self.size)
        yield from tensors_of(self.norm)
