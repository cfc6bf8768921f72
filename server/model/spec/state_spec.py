"""Mixers whose memory of earlier tokens is a state of fixed size, and the forms of states. Pure."""

from itertools import chain

import msgspec

from loraplex.adapters.base import Span
from loraplex.server.model.spec.linear_spec import LinearSpec, Tensors, tensors_of

# The usual name of a convolution.
CONV = "conv1d"


class StateForm(msgspec.Struct, frozen=True):
    """One tensor of a sequence's state in one layer. shape: of one sequence. wide: in float32; else
    in the model's dtype."""

    shape: tuple[int, ...]
    wide: bool = False


class DeltaNetSpec(msgspec.Struct, frozen=True):
    """Gated DeltaNet (arXiv 2412.06464): a causal convolution of q, k and v over `kernel` tokens,
    the gated delta rule, and a norm gated by z.

    mixed: the product of q, k, v and z. gates: that of b, from which beta comes, and a, from which
    the decay comes. path: of the module that has all. value_heads: a multiple of `key_heads`;
    neighbours share a key. key_dim, value_dim: features of a head. by_key_head: outputs of one key
    head lie together, `q k v z` of `mixed` and `b a` of `gates`; else those of all heads do.
    gates_z: z lies behind b and a in `gates`. beta: the most that it can be. norm: the norm's name.
    convs: names of the convolution's tensors and rows of each; () = one, `conv1d`.
    """

    mixed: LinearSpec
    gates: LinearSpec
    out: LinearSpec
    path: str
    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    kernel: int
    epsilon: float
    by_key_head: bool = False
    gates_z: bool = False
    beta: int = 1
    norm: str = "norm"
    convs: tuple[tuple[str, int], ...] = ()

    @property
    def linears(self) -> tuple[LinearSpec, ...]:
        """Products that adapters may change, in the order of their sites."""
        return self.mixed, self.gates, self.out

    @property
    def units(self) -> int:
        """Units of the state that devices share out."""
        return self.key_heads

    def divides(self, count: int) -> bool:
        """Whether so many devices can share it."""
        return self.key_heads % count == 0

    @property
    def key_size(self) -> int:
        return self.key_heads * self.key_dim

    @property
    def value_size(self) -> int:
        return self.value_heads * self.value_dim

    @property
    def num_channels(self) -> int:
        """Number of convolved features: q, k and v of all heads."""
        return 2 * self.key_size + self.value_size

    @property
    def channel_spans(self) -> tuple[Span, ...]:
        """Spans of the convolved features, as devices share them."""
        keys = Span(self.key_size, self.key_dim)
        return keys, keys, Span(self.value_size, self.value_size // self.key_heads)

    @property
    def states(self) -> tuple[StateForm, ...]:
        """The convolution's latest inputs, oldest first, and each head's matrix."""
        return (
            StateForm((self.kernel - 1, self.num_channels)),
            StateForm((self.value_heads, self.key_dim, self.value_dim), wide=True),
        )

    def mixed_columns(self) -> list[int]:
        """Columns of `mixed` that are q of all heads, then k, v and, unless `gates` has it, z."""
        values = self.value_size // self.key_heads
        return self._columns((self.key_dim, self.key_dim, *[values] * (1 if self.gates_z else 2)))

    def gate_columns(self) -> list[int]:
        """Columns of `gates` that are b of all heads, then a and, if it has it, z."""
        heads = self.value_heads // self.key_heads
        z = [self.value_size // self.key_heads] * self.gates_z
        return self._columns((heads, heads, *z))

    def _columns(self, of_key_head: tuple[int, ...]) -> list[int]:
        """The columns of several parts, each of all heads. of_key_head: features of a key head in
        each."""
        width = sum(of_key_head)
        if not self.by_key_head:
            return list(range(self.key_heads * width))
        begins = (sum(of_key_head[:number]) for number in range(len(of_key_head)))
        parts = (
            range(head * width + begin, head * width + begin + size)
            for begin, size in zip(begins, of_key_head, strict=True)
            for head in range(self.key_heads)
        )
        return list(chain.from_iterable(parts))

    def tensors(self) -> Tensors:
        """Names, relative to the layer, and shapes of what the checkpoint holds."""
        yield from tensors_of(*self.linears)
        for conv, rows in self.convs or ((CONV, self.num_channels),):
            yield from conv_tensors(f"{self.path}.{conv}", rows, self.kernel, bias=False)
        yield f"{self.path}.A_log", (self.value_heads,)
        yield f"{self.path}.dt_bias", (self.value_heads,)
        yield f"{self.path}.{self.norm}.weight", (self.value_dim,)


class ShortConvSpec(msgspec.Struct, frozen=True):
    """A gated short convolution (LFM2): `out(c * conv(b * x))`, over `kernel` tokens.

    mixed: the product of b, c and x, of `channels` features each. path: of the convolution. bias:
    whether the convolution has one.
    """

    mixed: LinearSpec
    out: LinearSpec
    path: str
    channels: int
    kernel: int
    bias: bool = False

    @property
    def linears(self) -> tuple[LinearSpec, ...]:
        """Products that adapters may change, in the order of their sites."""
        return self.mixed, self.out

    @property
    def units(self) -> int:
        """Units of the state that devices share out."""
        return self.channels

    def divides(self, count: int) -> bool:
        """Whether so many devices can share it."""
        return self.channels % count == 0

    @property
    def channel_spans(self) -> tuple[Span, ...]:
        """Spans of the convolved features, as devices share them."""
        return (Span(self.channels),)

    @property
    def states(self) -> tuple[StateForm, ...]:
        """The convolution's latest inputs, oldest first."""
        return (StateForm((self.kernel - 1, self.channels)),)

    def tensors(self) -> Tensors:
        """Names, relative to the layer, and shapes of what the checkpoint holds."""
        yield from tensors_of(*self.linears)
        yield from conv_tensors(self.path, self.channels, self.kernel, bias=self.bias)


class Mamba2Spec(msgspec.Struct, frozen=True):
    """Mamba-2 (arXiv 2405.21060): a causal convolution of x, B and C over `kernel` tokens, a state
    of each head that B writes and C reads, and a norm of what is read, gated by z.

    mixed: the product of z, x, B, C and dt. path: of the module that has all. groups: heads share B
    and C, neighbours those of one group; devices may repeat groups. state: numbers of B. norm_size:
    features that are normed together, on all devices; None = nothing is normed. gate_first: see
    `GatedNorm`. bias: of the convolution. limits: of dt behind softplus. factors: of z, x, B, C and
    dt.
    """

    mixed: LinearSpec
    out: LinearSpec
    path: str
    heads: int
    groups: int
    head_dim: int
    state: int
    kernel: int
    epsilon: float
    norm_size: int | None
    gate_first: bool = True
    bias: bool = True
    limits: tuple[float, float] = (0.0, float("inf"))
    factors: tuple[float, ...] = (1.0,) * 5

    @property
    def linears(self) -> tuple[LinearSpec, ...]:
        """Products that adapters may change, in the order of their sites."""
        return self.mixed, self.out

    @property
    def units(self) -> int:
        """Units of the state that devices share out."""
        return self.heads

    @property
    def inner(self) -> int:
        """Features of all heads."""
        return self.heads * self.head_dim

    @property
    def num_channels(self) -> int:
        """Number of convolved features: x, B and C."""
        return self.inner + 2 * self.groups * self.state

    @property
    def channel_spans(self) -> tuple[Span, ...]:
        """Spans of the convolved features, as devices share them."""
        of_groups = Span(self.groups * self.state, self.state)
        return Span(self.inner, self.head_dim), of_groups, of_groups

    @property
    def states(self) -> tuple[StateForm, ...]:
        """The convolution's latest inputs, oldest first, and each head's matrix."""
        return (
            StateForm((self.kernel - 1, self.num_channels)),
            StateForm((self.heads, self.state, self.head_dim), wide=True),
        )

    def divides(self, count: int) -> bool:
        """Whether so many devices can share it. Those that repeat a group norm together, and then
        all must."""
        norms = self.norm_size is None or self.groups % count == 0 or self.groups == 1
        return self.heads % count == 0 and self.channel_spans[1].divides(count) and norms

    def tensors(self) -> Tensors:
        """Names, relative to the layer, and shapes of what the checkpoint holds."""
        yield from tensors_of(*self.linears)
        conv = f"{self.path}.{CONV}"
        yield from conv_tensors(conv, self.num_channels, self.kernel, bias=self.bias)
        for name in ("A_log", "D", "dt_bias"):
            yield f"{self.path}.{name}", (self.heads,)
        if self.norm_size is not None:
            yield f"{self.path}.norm.weight", (self.inner,)


# What mixes tokens by a state.
StateSpec = DeltaNetSpec | ShortConvSpec | Mamba2Spec


def conv_tensors(path: str, channels: int, kernel: int, *, bias: bool) -> Tensors:
    """Tensors of a convolution by channel."""
    yield f"{path}.weight", (channels, 1, kernel)
    if bias:
        yield f"{path}.bias", (channels,)
