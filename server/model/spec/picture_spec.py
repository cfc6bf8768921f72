"""The part of a model that reads pictures: an encoder of patches, whose results stand in place of
tokens. Pure."""

import msgspec

from loraplex.server.model.spec.linear_spec import LinearSpec, Tensors
from loraplex.server.model.spec.model_spec import Activation, EmbeddingSpec, HeadSpec, ModelSpec
from loraplex.server.protocol import Grid


class PatchSpec(EmbeddingSpec, frozen=True):
    """A product of patches in place of a table: `[patches, vocab_size] -> [patches, size]`. The
    checkpoint has its matrix, `[size, vocab_size]`, as the kernel of a convolution. kernel: shape
    of that but for `size`. first: the tensor of a row before all patches; "" = there is none.
    positions: of that row and each patch, where every picture has one grid."""

    kernel: tuple[int, ...] = ()
    first: str = ""

    def tensors(self) -> Tensors:
        """Names and shapes of what the checkpoint holds."""
        yield self.tensor, (self.size, *self.kernel)
        yield from tuple(EmbeddingSpec.tensors(self))[1:]
        if self.first:
            yield self.first, (self.size,)


class MergerSpec(HeadSpec, frozen=True, kw_only=True):
    """A head that makes one token of `side * side` normed patches: `linear(activation(first(x)))`
    of their features one behind the other. reads_stream: patches are as the last layer leaves
    them, without a norm. skipped: rows before those of patches that make no token."""

    first: LinearSpec
    activation: Activation = "gelu"
    side: int = 2
    reads_stream: bool = False
    skipped: int = 0

    @property
    def linears(self) -> tuple[LinearSpec, ...]:
        return self.first, self.linear


class PictureSpec(msgspec.Struct, frozen=True):
    """How a model reads pictures. tower: the encoder, of a PatchSpec, layers and a MergerSpec. Its
    attention has no window where a patch sees all patches of its picture; else it sees those of its
    window, a square of `window * window` tokens; 0 = no layer has one. token_id: the placeholder of
    a picture's token. sections: pairs of each head's features that turn by time, by height and by
    width; None = all turn by the position. grid: of every picture; None = the tower takes any.
    added: tokens of a picture beside those of its patches.
    """

    tower: ModelSpec
    token_id: int
    window: int = 0
    sections: tuple[int, int, int] | None = None
    grid: Grid | None = None
    added: int = 0

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
    def columns(self) -> int:
        """Numbers of one patch."""
        return self.tower.embedding.vocab_size
