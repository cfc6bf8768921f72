"""A model's weights on the device: packed as the decoder multiplies them, read from safetensors."""

import logging
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch.nn import functional

from loraplex.adapters.base import WHOLE, Shard, Span
from loraplex.server.config import AtLoad
from loraplex.server.model.checkpoint.checkpoint import (
    CheckpointError,
    check_tensors,
    kinds,
    model_shards,
    stored_tensors,
    tables,
)
from loraplex.server.model.checkpoint.sentence_files import DENSE_WEIGHTS, dense_forms
from loraplex.server.model.checkpoint.stored_forms import as_stored, stored_forms
from loraplex.server.model.checkpoint.tower_part import tower_name, tower_shards
from loraplex.server.model.checkpoint.unpack import cut_of
from loraplex.server.model.distance_biases import distance_biases
from loraplex.server.model.latent_weights import LatentWeights, load_latents
from loraplex.server.model.linear.dense import DenseLinear
from loraplex.server.model.linear.linear import Linear, MoeWeights
from loraplex.server.model.linear.norm import LayerNorm as LayerNorm
from loraplex.server.model.linear.norm import Norm as Norm
from loraplex.server.model.linear.norm import RmsNorm as RmsNorm
from loraplex.server.model.pages.pinned_copies import PinnedCopies
from loraplex.server.model.spec.latent_spec import LatentSpec
from loraplex.server.model.spec.linear_spec import LinearSpec
from loraplex.server.model.spec.model_spec import (
    SINKS,
    XIELU,
    XIELU_TENSORS,
    Activation,
    AttentionSpec,
    Branch,
    EmbeddingSpec,
    LayerInputs,
    MlpSpec,
    ModelSpec,
    NormSpec,
    layer_path,
)
from loraplex.server.model.spec.moe_spec import MoeSpec
from loraplex.server.model.spec.picture_spec import PoolSpec
from loraplex.server.model.spec.served_as import form_at_load
from loraplex.server.model.weight_source import StateWeights, WeightSource, load_states, path_in

log = logging.getLogger(__name__)


class KvScales(NamedTuple):
    """Scales of one layer's keys and of its values in eight bits: `number * scale`, in int8 also
    times that of the token's head."""

    k: float = 1.0
    v: float = 1.0


# Kernels multiply weights and a head's scale of values in float16, which ends at 6e-8.
INT8_SCALES = KvScales(v=2.0**-6)


@dataclass(frozen=True, slots=True)
class AttentionWeights:
    """Weights of an attention. qk_norm: `[heads + kv_heads, head_dim]`, one row a head of q, then
    of k, if it has some. qk_layer_norm: the same of LayerNorms, in place of qk_norm. sinks: float32
    `[heads]`. kv_scales: those that the checkpoint has."""

    qkv: Linear
    o: Linear
    qk_norm: torch.Tensor | None
    sinks: torch.Tensor | None = None
    kv_scales: KvScales = KvScales()
    gate: Linear | None = None
    qk_layer_norm: LayerNorm | None = None
    distances: Linear | None = None

    @property
    def linears(self) -> tuple[Linear, ...]:
        """The matrices that every token is multiplied with."""
        others = (each for each in (self.gate, self.distances) if each is not None)
        return self.qkv, *others, self.o


@dataclass(frozen=True, slots=True)
class MlpWeights:
    """Weights of an MLP, as `spec` says. xielu: float32 `[4]`, what `pointwise.xielu` takes."""

    spec: MlpSpec
    gate_up: Linear
    down: Linear
    xielu: torch.Tensor | None = None
    out_gate: DenseLinear | None = None

    @property
    def linears(self) -> tuple[Linear, ...]:
        """The matrices that every token is multiplied with."""
        gate = () if self.out_gate is None else (self.out_gate,)
        return *gate, self.gate_up, self.down


MixerWeights = AttentionWeights | LatentWeights | StateWeights
BranchWeights = MixerWeights | MlpWeights | MoeWeights


@dataclass(frozen=True, slots=True)
class StepWeights:
    """Weights of one step of a layer, as its StepSpec says. own: norms before and behind each
    branch. scalar: what its sum is multiplied with."""

    branches: tuple[BranchWeights, ...]
    pre: Norm | None
    post: Norm | None
    own: tuple[tuple[Norm | None, Norm | None], ...] = ()
    scalar: float = 1.0
    after: Norm | None = None


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """Weights of one layer: those of its steps in order."""

    steps: tuple[StepWeights, ...]

    @property
    def branches(self) -> tuple[BranchWeights, ...]:
        return tuple(chain.from_iterable(step.branches for step in self.steps))

    @property
    def attention(self) -> AttentionWeights:
        """Weights of the attention of a layer that has one."""
        return next(branch for branch in self.branches if isinstance(branch, AttentionWeights))

    @property
    def kv_scales(self) -> KvScales:
        """Scales of keys and values; 1 where the layer keeps none."""
        found = (of.kv_scales for of in self.branches if isinstance(of, AttentionWeights))
        return next(found, KvScales())

    @property
    def linears(self) -> tuple[Linear, ...]:
        """The matrices that every token is multiplied with."""
        return tuple(chain.from_iterable(branch.linears for branch in self.branches))


# Tensors of a score head by their names in `ScoreSpec.tensors`.
ScoreTensors = dict[str, torch.Tensor]


@dataclass(frozen=True, slots=True)
class InputWeights:
    """Weights of what layers read beside the stream, as `spec` says. table: `[rows, layers,
    features]`, those that the device has. mine: these features of all."""

    spec: LayerInputs
    table: torch.Tensor
    linear: Linear
    norm: Norm
    mine: slice


@dataclass(frozen=True, slots=True)
class EmbeddingWeights:
    """Weights beside the table of an embedding. positions: what positions add, `[types * positions,
    size]`: those of a first text, then those of a second one. inputs: of layers beside the
    stream."""

    positions: torch.Tensor | None = None
    norm: Norm | None = None
    projection: Linear | None = None
    inputs: InputWeights | None = None


@dataclass(frozen=True, slots=True)
class VectorDense:
    """A product and an activation that a pooled vector goes through, in float32."""

    linear: DenseLinear
    activation: Activation | None


@dataclass(frozen=True, slots=True)
class ModelWeights:
    """Weights of the device's part of a model. embed: `[vocab, size]`; the head's matrix is the
    same tensor when they are tied. score: what the checkpoint has of score heads. biases: as of
    `distance_biases`, of all distances that texts have. dense: what pooled vectors go through.
    output: as of ModelSpec. distances: `[2 * span, size]`, as of `DistanceVectors`, normed. tower:
    what reads pictures, whole on each device; None = nothing does.
    """

    embed: torch.Tensor
    layers: tuple[LayerWeights, ...]
    norm: Norm
    lm_head: Linear
    score: ScoreTensors
    embedding: EmbeddingWeights = EmbeddingWeights()
    biases: torch.Tensor | None = None
    dense: tuple[VectorDense, ...] = ()
    output: Linear | None = None
    distances: torch.Tensor | None = None
    tower: "TowerWeights | None" = None

    @property
    def linears(self) -> tuple[Linear, ...]:
        """The matrices that every token is multiplied with, but the head's."""
        return *chain.from_iterable(layer.linears for layer in self.layers), *self.beside

    @property
    def beside(self) -> tuple[Linear, ...]:
        """The matrices outside the layers, as of `ModelSpec.beside`."""
        inputs = self.embedding.inputs
        of_inputs = None if inputs is None else inputs.linear
        found = (self.embedding.projection, of_inputs, self.output)
        return tuple(linear for linear in found if linear is not None)


@dataclass(frozen=True, slots=True)
class DeepMergerWeights:
    """Weights of a DeepMergerSpec."""

    norm: Norm
    first: Linear
    last: Linear


@dataclass(frozen=True, slots=True)
class PoolWeights:
    """Weights of a PoolSpec. shift, scale: `[features]`; None = there is none."""

    norm: Norm
    shift: torch.Tensor | None
    scale: torch.Tensor | None


@dataclass(frozen=True, slots=True)
class TowerWeights:
    """Weights of an encoder of pictures. body: `embed` is the matrix of patches, `[hidden,
    columns]`, and `lm_head` the merger's last one. joined, first: the merger's other matrices.
    bias: of patches. deep: by the tower's layer. pool, norm: as of MergerSpec. newline: a token's
    vector. around: as of PatchSpec. None = there is none."""

    body: ModelWeights
    first: Linear | None
    bias: torch.Tensor | None
    deep: dict[int, DeepMergerWeights]
    joined: Linear | None
    pool: PoolWeights | None = None
    newline: torch.Tensor | None = None
    norm: Norm | None = None
    around: tuple[Norm | None, Norm | None] = (None, None)

    @property
    def products(self) -> tuple[Linear, ...]:
        """The products outside of layers: of `MergerSpec.linears`, and that of patches."""
        of_deep = ((each.first, each.last) for each in self.deep.values())
        patches = DenseLinear(self.body.embed, self.bias)
        others = (each for each in (self.joined, self.first) if each is not None)
        return *others, self.body.lm_head, *chain.from_iterable(of_deep), patches


def load_weights(
    folder: Path,
    model: ModelSpec,
    dtype: torch.dtype,
    device: torch.device,
    *,
    packed: bool | None = None,
    at_load: AtLoad | None = None,
    shard: Shard = WHOLE,
    read: Callable[[float, float, str], None] = lambda done, total, unit: None,
) -> ModelWeights:
    """Read the checkpoint, cast to `dtype`. model: whole; of its matrices the part of the device
    with this shard is read. packed: quantised matrices stay so where kernels read
    them, and else are dequantised; None = on a GPU. at_load: how other matrices of layers are
    quantised. read: hears about how much of all was read. Raises CheckpointError with
    everything that is missing, unexpected or of another shape."""
    shards = model_shards(folder, model)
    stored = stored_tensors(shards)
    model = as_stored(model, stored)
    left_out = check_tensors(folder, shards, model)
    if model.pictures is not None:
        left_out = tuple(name for name in left_out if tower_name(name) is None)
    if left_out:
        log.info("%d stored tensors change no token and are left out: %s", *kinds(left_out))
    embedding = tables(stored, model)[0]
    on_gpu = device.type == "cuda"
    with torch.inference_mode(), PinnedCopies(device) if on_gpu else nullcontext():
        forms = stored_forms(model, stored)
        stays = on_gpu if packed is None else packed
        made = None if at_load is None else form_at_load(at_load, model.quantisation)
        source = WeightSource(shards, forms, dtype, device, packed=stays, at_load=made, shard=shard)
        nbytes = sum(tensor.nbytes for tensor in stored.values())
        mine = nbytes / shard.count / (1 << 30)
        weights = weights_of(source, model, embedding, lambda done: read(mine * done, mine, "GiB"))
        tower = None if model.pictures is None else load_tower(folder, model, dtype, device)
        return replace(weights, dense=_load_dense(folder, device), tower=tower)


def weights_of(
    source: WeightSource,
    model: ModelSpec,
    embedding: str,
    read: Callable[[float], None] = lambda done: None,
) -> ModelWeights:
    """Make the device's part of a model, but its tower and the products of pooled vectors. model:
    whole. embedding: the table's name. read: hears about which part of the layers was read."""
    embed, layers = source.table(embedding), []
    for index in range(model.num_layers):
        read(index / model.num_layers)
        layers.append(_load_layer(source, model, index))
    head = DenseLinear(embed) if model.head.tied else source.linear(model.head.linear)
    if model.head.is_normed and isinstance(head, DenseLinear):
        head.weight.copy_(functional.normalize(head.weight.float()))
    return ModelWeights(
        embed,
        tuple(layers),
        _norm(source, model.norm),
        head,
        _load_scores(source, model),
        _load_embedding(source, model.embedding),
        _load_biases(source, model),
        output=None if model.output is None else source.linear(model.output),
        distances=_load_distances(source, model),
    )


def load_tower(
    folder: Path, model: ModelSpec, dtype: torch.dtype, device: torch.device
) -> TowerWeights:
    """Read a model's encoder of pictures, whole and in floating point, cast to `dtype`. Raises
    CheckpointError with everything that is missing, unexpected or of another shape.
    """
    assert model.pictures is not None
    pictures = model.pictures
    tower, merger, embedding = pictures.tower, pictures.merger, pictures.embedding
    shards = tower_shards(folder, tower)
    left_out = check_tensors(folder, shards, tower)
    if left_out:
        raise CheckpointError(f"{folder}: unexpected tensors of the part for images: {left_out[0]}")
    forms = stored_forms(tower, stored_tensors(shards))
    source = WeightSource(shards, forms, dtype, device, packed=False, at_load=None)
    patches = source.get(embedding.tensor).flatten(1)
    bias = source.get(f"{embedding.path}.bias") if embedding.bias else None
    beside = _load_embedding(source, embedding)
    if embedding.first and beside.positions is not None:
        positions = beside.positions.flatten(0, -2)
        positions[0] += source.get(embedding.first).flatten()
        beside = replace(beside, positions=positions)
    if embedding.is_paired and beside.positions is not None:
        beside = replace(beside, positions=beside.positions.transpose(0, 1))
    layers = tuple(_load_layer(source, tower, index) for index in range(tower.num_layers))
    last, norm = source.linear(merger.linear), _norm(source, tower.norm)
    body = ModelWeights(patches, layers, norm, last, {}, beside)
    deep = {
        each.layer: DeepMergerWeights(
            _norm(source, each.norm), source.linear(each.first), source.linear(each.linear)
        )
        for each in merger.deep
    }
    joined, first = (
        None if of is None else source.linear(of) for of in (merger.joined, merger.first)
    )
    of_token = None if merger.norm is None else _norm(source, merger.norm)
    pool = _load_pool(source, merger.pool)
    newline = source.get(merger.newline) if merger.newline else None
    before, behind = (None if of is None else _norm(source, of) for of in embedding.around)
    around = before, behind
    return TowerWeights(body, first, bias, deep, joined, pool, newline, of_token, around)


def _load_pool(source: WeightSource, spec: PoolSpec | None) -> PoolWeights | None:
    if spec is None:
        return None
    shift, scale = (source.get(name) if name else None for name in (spec.shift, spec.scale))
    return PoolWeights(_norm(source, spec.norm), shift, scale)


def _load_dense(folder: Path, device: torch.device) -> tuple[VectorDense, ...]:
    """Read sentence-transformers' products, of files of their own. Raises CheckpointError."""
    found = []
    for form in dense_forms(folder):
        path = folder / form.path / DENSE_WEIGHTS
        try:
            tensors = {name: t.float().to(device) for name, t in load_file(path).items()}
        except (SafetensorError, OSError) as error:
            raise CheckpointError(f"{path}: cannot be read ({error})") from None
        weight, bias = tensors.get("linear.weight"), tensors.get("linear.bias")
        shape = (form.out_features, form.in_features)
        if weight is None or weight.shape != shape or form.bias is (bias is None):
            raise CheckpointError(
                f"{path}: expected linear.weight {list(shape)}, as config.json says"
            )
        found.append(VectorDense(DenseLinear(weight, bias), form.activation))
    return tuple(found)


def _load_biases(source: WeightSource, model: ModelSpec) -> torch.Tensor | None:
    if model.biases is None:
        return None
    table = source.mapped(model.biases.tensor).float()
    return distance_biases(table, model.biases, model.max_context).to(source.device)


def _load_distances(source: WeightSource, model: ModelSpec) -> torch.Tensor | None:
    if model.distances is None:
        return None
    table = source.get(model.distances.tensor)
    if model.distances.norm is None:
        return table
    norm = _norm(source, model.distances.norm)
    assert isinstance(norm, LayerNorm)
    return functional.layer_norm(table, table.shape[1:], norm.weight, norm.bias, norm.epsilon)


def _load_scores(source: WeightSource, model: ModelSpec) -> ScoreTensors:
    of_labels = model.own_score.tensors(0, 0) if model.own_score is not None else ()
    names = dict.fromkeys((*(name for name, _ in of_labels), *model.optional_tensors()))
    return {name: source.get(name) for name in names if source.has(name)}


def _load_embedding(source: WeightSource, spec: EmbeddingSpec) -> EmbeddingWeights:
    places, types = spec.positions, spec.types
    added = None if places is None else source.get(places.tensor)[places.first :]
    if types is not None:
        of_types = source.get(types.tensor)[:, None]
        added = (of_types if added is None else of_types + added).flatten(0, 1)
    norm = None if spec.norm is None else _norm(source, spec.norm)
    projection = None if spec.projection is None else source.linear(spec.projection)
    return EmbeddingWeights(added, norm, projection, _load_inputs(source, spec.inputs))


def _load_inputs(source: WeightSource, spec: LayerInputs | None) -> InputWeights | None:
    if spec is None:
        return None
    piece = Span(spec.own_size).piece(source.shard)
    stored = source.mapped(spec.tensor).view(spec.rows, spec.layers, spec.own_size)[..., piece]
    table = torch.empty(stored.shape, dtype=source.dtype, device=source.device).copy_(stored)
    return InputWeights(spec, table, source.linear(spec.linear), _norm(source, spec.norm), piece)


def _load_layer(source: WeightSource, model: ModelSpec, index: int) -> LayerWeights:
    def optional(norm: NormSpec | None) -> Norm | None:
        return None if norm is None else _norm(source, norm, index)

    steps = (
        StepWeights(
            tuple(_load_branch(source, branch, index) for branch in step.branches),
            optional(step.pre),
            optional(step.post),
            tuple((optional(norms.pre), optional(norms.post)) for norms in step.own),
            source.number(layer_path(index, step.scalar)) if step.scalar else 1.0,
            optional(step.after),
        )
        for step in model.layers[index].steps
    )
    return LayerWeights(tuple(steps))


def _norm(source: WeightSource, spec: NormSpec, layer: int | None = None) -> Norm:
    if not spec.has_weight:
        ones = torch.ones(spec.size, dtype=source.dtype, device=source.device)
        is_rms = spec.kind == "rms"
        return RmsNorm(ones, spec.epsilon) if is_rms else LayerNorm(ones, None, spec.epsilon)
    path = path_in(spec.path, layer)
    name = f"{path}.{spec.name}"
    if spec.is_listed:
        weight = torch.stack([source.get(each) for each in spec.listed(path)])
    else:
        weight = source.get(name)
    if spec.offset or spec.factor != 1.0:  # which the model's dtype would round
        weight = source.mapped(name).float().to(source.device) * spec.factor + spec.offset
    if spec.kind == "rms":
        return RmsNorm(weight, spec.epsilon)
    if spec.kind == "scale":
        return LayerNorm(weight, None, spec.epsilon, scales=True)
    weight = weight.to(source.dtype)
    return LayerNorm(weight, source.get(f"{path}.bias") if spec.bias else None, spec.epsilon)


def _load_branch(source: WeightSource, spec: Branch, index: int) -> BranchWeights:
    match spec:
        case LatentSpec():
            of_q, of_latents = spec.q_a_norm, _norm(source, spec.latent_norm, index)
            q_norm = None if of_q is None else _norm(source, of_q, index)
            return load_latents(source, spec, index, q_norm, of_latents)
        case AttentionSpec():
            path, sinks = layer_path(index, "self_attn"), None
            if spec.sinks:
                sinks = source.heads(source.get(layer_path(index, SINKS)).float())
            return AttentionWeights(
                source.linear(spec.qkv, index),
                source.linear(spec.o, index),
                None if spec.has_layer_norms else _qk_norm(source, spec, index),
                sinks,
                KvScales(*(source.kv_scale(path, of) for of in "kv")),
                None if spec.gate is None else source.linear(spec.gate, index),
                _qk_layer_norm(source, spec, index) if spec.has_layer_norms else None,
                None if spec.distances is None else source.linear(spec.distances, index),
            )
        case MlpSpec():
            gate_up, down = source.linear(spec.gate_up, index), source.linear(spec.down, index)
            out = spec.out_gate
            gate = None if out is None else _chooser(source, out, index)
            return MlpWeights(spec, gate_up, down, _xielu(source, spec, index), gate)
        case MoeSpec():
            return MoeWeights(
                spec,
                _chooser(source, spec.router, index),
                source.experts(spec.gate_up, index),
                source.experts(spec.down, index),
                _numbers(source, spec.correction and spec.correction[0], index),
                None if spec.router_norm is None else _norm(source, spec.router_norm, index),
                _numbers(source, spec.scales, index),
                tuple(source.linear(each, index) for each in spec.latent),
            )
        case _:
            return load_states(source, spec, index)


def _xielu(source: WeightSource, spec: MlpSpec, index: int) -> torch.Tensor | None:
    if spec.activation != "xielu":
        return None
    alpha_p, alpha_n, beta, epsilon = (
        source.mapped(layer_path(index, f"{XIELU}.{name}")).float().view(1)
        for name in XIELU_TENSORS
    )
    numbers = (functional.softplus(alpha_p), beta + functional.softplus(alpha_n), beta, epsilon)
    return torch.cat(numbers).to(source.device)


def _numbers(source: WeightSource, path: str | None, index: int) -> torch.Tensor | None:
    """The numbers of a layer's experts, float32 `[experts]`. path: "" or None = there are none."""
    if not path:
        return None
    return source.mapped(layer_path(index, path)).float().flatten().to(source.device)


def _chooser(source: WeightSource, spec: LinearSpec, index: int) -> DenseLinear:
    (part,) = spec.parts
    path, cut = layer_path(index, part.path), cut_of(spec, part, WHOLE)
    bias = source.get(f"{path}.bias") if spec.bias else None
    weight = torch.empty(cut.shape, dtype=source.dtype, device=source.device)
    source.fill(path, cut, weight)
    return DenseLinear(weight, bias)


def _qk_norm(
    source: WeightSource, spec: AttentionSpec, index: int, part: str = "weight"
) -> torch.Tensor | None:
    """A tensor of the norms of q and k, `[heads + kv_heads, head_dim]`. part: of their tensors."""
    loaded = (
        (getattr(_norm(source, norm, index), part), heads)
        for norm, heads in ((spec.q_norm, spec.num_heads), (spec.k_norm, spec.num_kv_heads))
        if norm is not None
    )
    of_heads = [
        source.heads(tensor.view(-1, spec.head_dim)[:heads].expand(heads, -1))
        for tensor, heads in loaded
        if tensor is not None
    ]
    return torch.cat(of_heads) if of_heads else None


def _qk_layer_norm(source: WeightSource, spec: AttentionSpec, index: int) -> LayerNorm:
    weight, bias = (_qk_norm(source, spec, index, part) for part in ("weight", "bias"))
    assert weight is not None
    return LayerNorm(weight, bias, spec.qk_epsilon)
