"""One product of a model: the modules that it is made of, and how they are stored. Pure."""

from collections.abc import Iterator, Sequence
from typing import Literal, NamedTuple, Protocol

import msgspec

from loraplex.adapters.base import UNGROUPED, Groups, ModuleShape, Role, Sharding, Span, module_name

ExpertForm = Literal["each", "stacked", "rows", "mxfp4"]
Tensors = Iterator[tuple[str, tuple[int, ...]]]

# Features that share a scale in MXFP4, two in a byte.
MXFP4_BLOCK = 32
# How the names of its tensors end.
MXFP4_TENSORS = ("_blocks", "_scales")


# Of a part's inputs and outputs, numbers.
BOUNDS = ("input_min", "input_max", "output_min", "output_max")


class HasTensors(Protocol):
    """A part of a model that a checkpoint holds."""

    def tensors(self) -> Tensors: ...


def tensors_of(*parts: HasTensors | None) -> Tensors:
    """Names and shapes of what the checkpoint holds of these, None = of nothing."""
    for part in parts:
        if part is not None:
            yield from part.tensors()


class LookupTable(msgspec.Struct, frozen=True):
    """A matrix whose rows are looked up. path: its module."""

    path: str

    @property
    def tensor(self) -> str:
        return f"{self.path}.weight"


class Matrix(NamedTuple):
    """One module with a weight `[out_features, in_features]`."""

    path: str
    out_features: int
    in_features: int


class Part(msgspec.Struct, frozen=True):
    """One module of a matrix. path: as PEFT and the checkpoint name it, `self_attn.q_proj`; of
    experts `mlp.experts.{}.w1`, for the number of one. spans: of its outputs, as devices share
    them; () = one. groups: how files hold the spans. aliases: paths of the module in other versions
    of transformers."""

    path: str
    out_features: int
    spans: tuple[Span, ...] = ()
    groups: Groups = UNGROUPED
    aliases: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        return module_name(self.path)


class ExpertStorage(msgspec.Struct, frozen=True):
    """How a checkpoint stores one matrix of all experts of a layer.

    form: `each` = a tensor for each expert and part; `stacked` = one tensor, `[experts, out, in]`;
    `rows` = a tensor for each part, `[experts * out, in]`, which no adapter changes; `mxfp4` = the
    same in blocks of MXFP4_BLOCK features. path: of the tensor of all experts, to which `mxfp4`
    adds suffixes. interleaved: in such a tensor row i belongs to part i % parts; else each part's
    rows lie together. transposed: `stacked` is `[experts, in, out]`, `rows` is `[experts * in,
    out]`. flips: a checkpoint may have it so, where the module has not.
    """

    path: str
    form: ExpertForm = "each"
    interleaved: bool = False
    transposed: bool = False
    flips: bool = False

    def tensors(
        self, shape: tuple[int, int, int], parts: Sequence[tuple[str, int]], *, bias: bool
    ) -> Tensors:
        """List the tensors that hold the experts, with their shapes. shape: experts, output and
        input features. parts: paths and output features.
        """
        experts, outputs, inputs = shape
        if self.form == "each":
            for path, features in parts:
                for expert in range(experts):
                    yield f"{path.format(expert)}.weight", (features, inputs)
            return
        if self.form == "rows":
            for path, features in parts:
                own = (inputs, features) if self.transposed else (features, inputs)
                yield path, (experts * own[0], own[1])
            return
        if self.form == "stacked":
            inner = (inputs, outputs) if self.transposed else (outputs, inputs)
            yield self.path, (experts, *inner)
        else:
            blocks = (experts, outputs, inputs // MXFP4_BLOCK)
            yield f"{self.path}_blocks", (*blocks, MXFP4_BLOCK // 2)
            yield f"{self.path}_scales", blocks
        if bias:
            yield f"{self.path}_bias", (experts, outputs)


class LinearSpec(msgspec.Struct, frozen=True):
    """`x W^T + bias`. role: of its site. parts: modules with the same input, whose rows lie one
    below the other; one part where the checkpoint stores the matrix whole. experts: how many such
    matrices there are, of the same shape; then `stored` says how. transposed: a checkpoint has
    `[in, out]` of a part that is not quantised. clips: a part's inputs and outputs are held within
    bounds that a checkpoint has beside it (`BOUNDS`). factor_behind: as of ModuleShape."""

    role: Role
    in_features: int
    parts: tuple[Part, ...]
    sharding: Sharding
    bias: bool = False
    experts: int = 1
    stored: ExpertStorage | None = None
    transposed: bool = False
    clips: bool = False
    factor_behind: bool = False

    @property
    def names(self) -> tuple[str, ...]:
        """PEFT's short name of each part."""
        return tuple(part.name for part in self.parts)

    @property
    def widths(self) -> tuple[int, ...]:
        """Output features of each part."""
        return tuple(part.out_features for part in self.parts)

    @property
    def out_features(self) -> int:
        return sum(self.widths)

    @property
    def takes_lora(self) -> bool:
        """Whether adapters may change it."""
        return self.stored is None or self.stored.form != "rows"

    def spans_of(self, part: Part) -> tuple[Span, ...]:
        """Spans of the features that devices share: the part's outputs, or all inputs."""
        features = self.in_features if self.sharding == "row" else part.out_features
        return part.spans or (Span(features),)

    def tensors(self) -> Tensors:
        """Names and shapes of what the checkpoint holds."""
        if self.stored is not None:
            shape = (self.experts, self.out_features, self.in_features)
            parts = [(part.path, part.out_features) for part in self.parts]
            yield from self.stored.tensors(shape, parts, bias=self.bias)
            return
        for part in self.parts:
            own = part.out_features, self.in_features
            yield f"{part.path}.weight", own[::-1] if self.transposed else own
            if self.bias:
                yield f"{part.path}.bias", (part.out_features,)
            for bound in BOUNDS if self.clips else ():
                yield f"{part.path}.{bound}", ()

    def matrices(self) -> Iterator[Matrix]:
        """Modules with a matrix of their own in the checkpoint, expert after expert."""
        if self.stored is not None and self.stored.form != "each":
            return
        for expert in range(self.experts):
            for part in self.parts:
                path = part.path if self.stored is None else part.path.format(expert)
                yield Matrix(path, part.out_features, self.in_features)

    def modules(self) -> dict[str, ModuleShape]:
        """Return the shapes of the modules that LoRA can change, by PEFT's short name."""
        has_bias = self.bias and self.stored is None
        return {
            part.name: ModuleShape(
                part.path,
                self.in_features,
                part.out_features,
                self.experts,
                sharding=self.sharding,
                spans=self.spans_of(part),
                has_bias=has_bias,
                groups=part.groups,
                factor_behind=self.factor_behind,
            )
            for part in self.parts
        }
