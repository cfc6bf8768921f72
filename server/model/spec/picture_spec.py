"""The part of a model that reads pictures: an encoder of patches, whose results stand in place of
tokens. Pure."""

from itertools import chain
from typing import Literal

import msgspec

from loraplex.server.model.spec.linear_spec import LinearSpec, Tensors, tensors_of
from loraplex.server.model.spec.model_spec import (
    Activation,
    EmbeddingSpec,
    HeadSpec,
    ModelSpec,
    NormSpec,
)
from loraplex.server.protocol import AnyForm, PictureForm

Joins = Literal["none", "windowed", "all"]


class PatchSpec(EmbeddingSpec, frozen=True):
    """A product of patches in place of a table: `[patches, vocab_size] -> [patches, size]`. The
    checkpoint has its matrix, `[size, vocab_size]`, as the kernel of a convolution. kernel: shape
    of that but for `size`. bias: of the product. first: the tensor of a row before all patches; ""
    = there is none. positions: of that row and each patch, where every picture has one grid; else a
    square, between whose vectors a patch's place lies: their corners lie upon the picture's.
    by_axis: positions are two tables, of columns and of rows. by_fraction: a patch's row and column
    there are fractions of the tile's side, as float32 rounds them. is_batched: the checkpoint has
    `first` and `positions` as those of a batch of one. is_paired: it has rows of both tables in
    pairs. around: norms of patches, and of the product."""

    kernel: tuple[int, ...] = ()
    bias: bool = False
    first: str = ""
    by_axis: bool = False
    by_fraction: bool = False
    is_batched: bool = False
    is_paired: bool = False
    around: tuple[NormSpec | None, NormSpec | None] = (None, None)

    def tensors(self) -> Tensors:
        """Names and shapes of what the checkpoint holds."""
        yield self.tensor, (self.size, *self.kernel)
        for name, shape in tuple(EmbeddingSpec.tensors(self))[1:]:
            is_table = self.positions is not None and name == self.positions.tensor
            before = (2,) if self.by_axis else (1,) if self.is_batched else ()
            of_table = (shape[0], 2, *shape[1:]) if self.is_paired else (*before, *shape)
            yield name, of_table if is_table else shape
        yield from tensors_of(*self.around)
        if self.bias:
            yield f"{self.path}.bias", (self.size,)
        if self.first:
            yield self.first, (1, 1, self.size) if self.is_batched else (self.size,)


class DeepMergerSpec(msgspec.Struct, frozen=True):
    """A merger of what a layer of the tower gives, as `MergerSpec`, which norms the features of a
    token's patches together. Layers of the text part take its results, the first one those of the
    first merger: each adds them to what it gives for tokens of pictures. layer: 0-based.
    """

    layer: int
    norm: NormSpec
    first: LinearSpec
    linear: LinearSpec


class PoolSpec(msgspec.Struct, frozen=True):
    """The mean of a token's patches, times `factor`, then `(x - shift) * scale` where these name
    tensors, and a norm."""

    norm: NormSpec
    factor: float = 1.0
    shift: str = ""
    scale: str = ""

    def tensors(self) -> Tensors:
        yield from self.norm.tensors()
        for name in filter(None, (self.shift, self.scale)):
            yield name, (self.norm.size,)


class MergerSpec(HeadSpec, frozen=True, kw_only=True):
    """A head that makes one token of a square of normed patches, whose side the form of pictures
    has: `linear(activation(first(x)))` of their features one behind the other, or of what `pool`
    makes of them. first: None = `linear(x)`. norm: of all features of a token's patches together.
    reads_stream: patches are as the last layer leaves them, without a norm. skipped: rows before
    those of patches that make no token. joined: a product before `first`; the features of a token's
    patches come one by one there, each of all patches. newline: the tensor of a token behind each
    line of a TiledForm; "" = there is none. deep: mergers of earlier layers, in their order."""

    first: LinearSpec | None = None
    pool: PoolSpec | None = None
    norm: NormSpec | None = None
    activation: Activation = "gelu"
    reads_stream: bool = False
    skipped: int = 0
    joined: LinearSpec | None = None
    newline: str = ""
    deep: tuple[DeepMergerSpec, ...] = ()

    @property
    def linears(self) -> tuple[LinearSpec, ...]:
        of_deep = ((each.first, each.linear) for each in self.deep)
        others = (each for each in (self.joined, self.first) if each is not None)
        return *others, self.linear, *chain.from_iterable(of_deep)

    def tensors(self) -> Tensors:
        yield from HeadSpec.tensors(self)
        yield from tensors_of(self.pool)
        if self.newline:
            yield self.newline, (self.linear.out_features,)
        yield from tensors_of(self.norm, *(each.norm for each in self.deep))


class PictureSpec(msgspec.Struct, frozen=True):
    """How a model reads pictures. tower: the encoder, of a PatchSpec, layers and a MergerSpec. Its
    attention has no window where a patch sees all patches of its picture; else it sees those of its
    window, a square of `window * window` tokens; 0 = no layer has one. token_id: the placeholder of
    a picture's token. axes: for each pair of a head's features by what it turns, 0 = time, 1 =
    height, 2 = width; None = all turn by the position. form: of placeholders. pixels: a side of
    every picture; 0 = the tower takes any. splits: of the frequencies by which a head's features
    turn in the tower, rows have the first, third and so on, and columns the others; else both have
    the former. in_halves: the first half of a head's features turns by the column, the second by
    the row, each as a head of its own. stand_in: the token whose inputs of layers (`LayerInputs`)
    placeholders have; None = their own. joins: layers of the text part that join pictures, as of
    AttentionSpec. path: of what holds the tower's layers, as adapters name it. wrapped: what
    adapters call the product within a module of the name that it has here. most_tokens:
    placeholders of any picture; 0 = there may be any number.
    """

    tower: ModelSpec
    token_id: int
    window: int = 0
    axes: tuple[int, ...] | None = None
    form: AnyForm = PictureForm()
    pixels: int = 0
    splits: bool = False
    in_halves: bool = False
    stand_in: int | None = None
    joins: Joins = "none"
    path: str = "vision_tower.encoder.layers"
    wrapped: str = ""
    most_tokens: int = 0

    @property
    def merger(self) -> MergerSpec:
        head = self.tower.head
        assert isinstance(head, MergerSpec)
        return head

    @property
    def embedding(self) -> PatchSpec:
        embedding = self.tower.embedding
        assert isinstance(embedding, PatchSpec)
        return embedding

    @property
    def result_size(self) -> int:
        """Features of a token's result: those of the merger, then those of each deep one."""
        return (1 + len(self.merger.deep)) * self.merger.linear.out_features

    @property
    def columns(self) -> int:
        """Numbers of one patch."""
        return self.tower.embedding.vocab_size
