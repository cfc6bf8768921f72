"""From token ids to the residual stream, and to what layers read beside it. Pure."""

from loraplex.server.model.spec.linear_spec import LinearSpec, LookupTable, Tensors, tensors_of
from loraplex.server.model.spec.norm_spec import NormSpec


class PositionTable(LookupTable, frozen=True):
    """Learned vectors of positions, `[rows, hidden]`, which are added to the embedding. first: the
    row of the first position."""

    rows: int
    first: int = 0


class LayerInputs(LookupTable, frozen=True):
    """Inputs of each layer beside the stream: `norm(x W^T) + scale * row`, where x is a token's
    embedding and the row that of a table; W and the row are of all layers. The table is
    `[rows, layers * size]`. size: features for one layer, which the norm is over. linear: W.
    devices: among so many a layer's features of table and sum are shared out; W is whole on each.
    """

    rows: int
    layers: int
    size: int
    linear: LinearSpec
    norm: NormSpec
    scale: float
    devices: int = 1

    @property
    def own_size(self) -> int:
        """Features for one layer that this device has."""
        return self.size // self.devices

    def tensors(self) -> Tensors:
        """Names and shapes of what the checkpoint holds."""
        yield self.tensor, (self.rows, self.layers * self.own_size)
        yield from tensors_of(self.linear, self.norm)


class EmbeddingSpec(LookupTable, frozen=True):
    """A table `[vocab_size, size]`, whose rows are multiplied by `scale`, rounded to the dtype.
    rows: those that this device has; None = all. positions: None = positions add nothing. types:
    what the first text of a pair adds, and the second; None = nothing. norm: of the sum.
    projection: from rows of the table to the residual stream; None = they are as wide.
    projects_first: positions are added behind it. inputs: None = layers read the stream alone."""

    vocab_size: int
    size: int
    scale: float = 1.0
    rows: int | None = None
    positions: PositionTable | None = None
    types: PositionTable | None = None
    norm: NormSpec | None = None
    projection: LinearSpec | None = None
    projects_first: bool = False
    inputs: LayerInputs | None = None

    @property
    def num_types(self) -> int:
        return 1 if self.types is None else self.types.rows

    @property
    def summed_size(self) -> int:
        """Features of what positions and types are added to."""
        first = self.projection if self.projects_first else None
        return self.size if first is None else first.out_features

    @property
    def num_rows(self) -> int:
        return self.vocab_size if self.rows is None else self.rows

    def tensors(self) -> Tensors:
        """Names and shapes of what the checkpoint holds."""
        yield self.tensor, (self.num_rows, self.size)
        for table in (self.positions, self.types):
            if table is not None:
                yield table.tensor, (table.rows, self.summed_size)
        yield from tensors_of(self.norm, self.projection, self.inputs)
