"""The decoder: one forward over a flat batch of tokens, for every model with a ModelSpec."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial, reduce
from typing import Generic, NamedTuple, TypeVar

import torch

from loraplex.adapters.base import (
    BEFORE,
    BEFORE_FEED,
    BEHIND,
    BEHIND_FEED,
    LAYER_INPUTS,
    OF_K,
    OF_Q,
    ON_SUM,
    Role,
    feed_place,
    norm_place,
)
from loraplex.server.model.latent_weights import LatentWeights
from loraplex.server.model.linear.linear import Linear, MoeWeights
from loraplex.server.model.lora.own_rows import Owning, own_heads
from loraplex.server.model.lora.sites import BranchSites, Sites
from loraplex.server.model.ops.ops import DistanceProduct, Ops, Positioned
from loraplex.server.model.ops.products_torch import layer_normed_heads
from loraplex.server.model.spec.model_spec import ModelSpec, StepSpec
from loraplex.server.model.weights import (
    AttentionWeights,
    MixerWeights,
    MlpWeights,
    ModelWeights,
    Norm,
    StepWeights,
)

P = TypeVar("P", bound=Positioned)
L = TypeVar("L", bound=Owning)
Y = TypeVar("Y")


@dataclass(frozen=True, slots=True)
class Wanted(Generic[P, L]):
    """The tokens whose result somebody needs: no others go through what follows the last mixer that
    writes keys, values or states. rows: int64 `[rows]`, ascending, the last of them perhaps several
    times; lora: of these. plan: makes theirs, once all before is launched."""

    rows: torch.Tensor
    lora: L | None
    plan: Callable[[], P]


class Stream(NamedTuple):
    """Tensors that go from layer to layer. hidden: `[tokens, hidden]`, to which steps add. inputs:
    of the layers, or the last ones of them, which read them beside it, `[tokens, layers,
    features]`; None = they have none."""

    hidden: torch.Tensor
    inputs: torch.Tensor | None = None

    def rows(self, index: torch.Tensor) -> "Stream":
        """The stream of some tokens. index: integers `[rows]`."""
        inputs = None if self.inputs is None else self.inputs.index_select(0, index)
        return Stream(self.hidden.index_select(0, index), inputs)

    def first(self, tokens: int) -> "Stream":
        """The stream of the first tokens, where that lies."""
        inputs = None if self.inputs is None else self.inputs[:tokens]
        return Stream(self.hidden[:tokens], inputs)

    def copy_(self, other: "Stream") -> None:
        """Take the values of as many tokens, and of the last layers that there is room for."""
        self.hidden.copy_(other.hidden)
        if self.inputs is not None and other.inputs is not None:
            self.inputs.copy_(other.inputs[:, -self.inputs.shape[1] :])


@dataclass(frozen=True, slots=True)
class Embedded:
    """The embedding of a captured step's tokens, which adapters may change outside the graph.
    hidden: `[tokens, hidden]`. is_given: bool `[1, 1]`; where it is false the graph embeds."""

    hidden: torch.Tensor
    is_given: torch.Tensor


@dataclass(frozen=True, slots=True)
class Pictured:
    """Results of pictures, in place of some tokens' embeddings. places: int64 `[n]`, of the tokens
    in the batch. results: `[n, parts * hidden]`: those, then what each first layer adds."""

    places: torch.Tensor
    results: torch.Tensor

    def into(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden.index_copy(0, self.places, self._part(hidden, 0))

    def reaches(self, hidden: torch.Tensor, layer: int) -> bool:
        """Whether something is added to what the layer gives. hidden: `[tokens, hidden]`."""
        return (layer + 1) * hidden.shape[1] < self.results.shape[1]

    def onto(self, hidden: torch.Tensor, layer: int) -> torch.Tensor:
        return hidden.index_add(0, self.places, self._part(hidden, layer + 1))

    def _part(self, hidden: torch.Tensor, number: int) -> torch.Tensor:
        size = hidden.shape[1]
        return self.results[:, number * size : (number + 1) * size]


@dataclass(frozen=True, slots=True)
class PreparedMixer:
    """The mixer of a layer, which lets tokens see others. layer: 0-based. sites: of its products,
    the last of which takes what was mixed."""

    layer: int
    weights: MixerWeights
    sites: BranchSites


@dataclass(frozen=True, slots=True)
class PreparedStep(Generic[L, Y]):
    """A step of a layer. feed_forwards: give the output of a branch for normed rows and the
    stream, with its adapters. own: norms of each of these. The others are those of StepSpec and
    StepWeights."""

    mixer: PreparedMixer | None
    feed_forwards: tuple[Callable[[torch.Tensor, Stream, L | None], Y], ...]
    pre: Norm | None
    post: Norm | None
    own: tuple[tuple[Norm | None, Norm | None], ...]
    factors: tuple[float, float]
    reads_last: bool
    after: Norm | None

    @property
    def sums_normed(self) -> bool:
        """Whether a norm lies behind each branch, before their sum."""
        return any(post is not None for _, post in self.own)


class Decoder(Generic[P, L, Y]):
    """Decoder of any model that is served. spec: what differs between models, and nothing else
    does. Runs the first layers where weights has fewer.

    mixers: one for each step that has one, in order. What lies between two of them is computed at
    once. last_writer: the last of these that writes keys and values, or states; those behind read
    what others wrote.
    """

    def __init__(
        self, spec: ModelSpec, weights: ModelWeights, sites: Sites, ops: Ops[P, L, Y]
    ) -> None:
        self.spec = spec
        self.weights = weights
        self.sites = sites
        self.ops = ops
        of_layers = ((n, step) for n, layer in enumerate(weights.layers) for step in layer.steps)
        self._steps = tuple(
            self._prepared(layer, of_step, step, of_branches)
            for (layer, step), of_step, of_branches in zip(
                of_layers, spec.steps, sites.branches, strict=False
            )
        )
        self._num_steps = len(spec.steps)
        self._mixing = [n for n, step in enumerate(self._steps) if step.mixer is not None]
        self.mixers = tuple(step.mixer for step in self._steps if step.mixer)
        writers = (n for n, mixer in enumerate(self.mixers) if not self._reads_others(mixer))
        self.last_writer = max(writers, default=-1)
        # As the residual stream holds it: a factor of another precision would round otherwise.
        self._embedding_scale = torch.tensor(spec.embedding.scale, dtype=weights.embed.dtype).item()

    def _reads_others(self, mixer: PreparedMixer) -> bool:
        attention = self.spec.attentions.get(mixer.layer)
        return attention is not None and attention.keys_of is not None

    def _prepared(
        self, layer: int, spec: StepSpec, weights: StepWeights, sites: Sequence[BranchSites]
    ) -> PreparedStep[L, Y]:
        """Choose what runs each branch of a step."""
        mixer, feed_forwards = None, []
        for branch, of_branch in zip(weights.branches, sites, strict=True):
            match branch:
                case MlpWeights():
                    at = layer - len(self.weights.layers)
                    feed_forwards.append(partial(self._mlp, branch, of_branch, at))
                case MoeWeights():
                    feed_forwards.append(partial(self._moe, branch, of_branch))
                case _:
                    mixer = PreparedMixer(layer, branch, of_branch)
        own = (weights.own or ((None, None),) * len(weights.branches))[int(mixer is not None) :]
        norms = weights.pre, weights.post, own
        # The sum's number multiplies both terms.
        rule = (spec.factor * weights.scalar, weights.scalar), spec.reads_last
        return PreparedStep(mixer, tuple(feed_forwards), *norms, *rule, after=weights.after)

    @property
    def mixes_behind(self) -> bool:
        """Whether mixers lie behind the last that writes."""
        return self.last_writer + 1 < len(self.mixers)

    def forward(
        self,
        token_ids: torch.Tensor,
        plan: P,
        lora: L | None,
        wanted: Wanted[P, L] | None = None,
        meanwhile: Callable[[], None] | None = None,
        pictured: Pictured | None = None,
    ) -> torch.Tensor:
        """Compute a step from token ids to hidden states. token_ids: int64 `[tokens]`, in the
        plan's order -> normed hidden states `[tokens, hidden]`, or `[rows, hidden]` of those
        wanted. Writes the tokens' keys, values and states. meanwhile: called at each mixer.
        pictured: None = every token has its own embedding.
        """
        mixed, stream = self.up_to_end(token_ids, plan, lora, meanwhile, pictured=pictured)
        if wanted is not None:
            if not len(wanted.rows):
                return stream.hidden[:0]
            mixed, stream, lora = mixed[wanted.rows], stream.rows(wanted.rows), wanted.lora
            plan = wanted.plan() if self.mixes_behind else plan
        return self.end(mixed, stream, lora, plan)

    def up_to_end(
        self,
        token_ids: torch.Tensor,
        plan: P,
        lora: L | None,
        meanwhile: Callable[[], None] | None = None,
        embedded: Embedded | None = None,
        pictured: Pictured | None = None,
    ) -> tuple[torch.Tensor, Stream]:
        """Compute a step up to what the last mixer that writes gives: that, and the stream."""
        normed, stream = self.begin(token_ids, plan.positions, lora, embedded, pictured)
        for number in range(self.last_writer + 1):
            mixed = self._mixed(plan, number, normed, lora)
            if meanwhile is not None:
                meanwhile()
            if number < self.last_writer:
                normed, stream = self.after_mixer(number, mixed, stream, lora, normed)
                layer = self.mixers[number].layer
                if pictured is not None and pictured.reaches(stream.hidden, layer):
                    stream = stream._replace(hidden=pictured.onto(stream.hidden, layer))
                    normed = self._normed(self._mixing[number + 1], stream.hidden, lora)
        return mixed, stream

    def _mixed(self, plan: P, number: int, normed: torch.Tensor, lora: L | None) -> torch.Tensor:
        """Compute a mixer's products but the last, and mix. number: in `mixers`."""
        mixer = self.mixers[number]
        if isinstance(mixer.weights, LatentWeights):
            return self._attend_latents(plan, number, mixer.weights, normed, lora)
        if self.weights.distances is not None:
            return self._attend_distances(plan, mixer, self.weights.distances, normed, lora)
        of_each = zip(mixer.weights.linears[:-1], mixer.sites, strict=False)
        products = [self.ops.linear(normed, linear, lora, site) for linear, site in of_each]
        return self.mix(plan, number, products, lora)

    def mix(
        self, plan: P, number: int, products: Sequence[Y], lora: L | None = None
    ) -> torch.Tensor:
        """Mix tokens, in one of `mixers`. products: of all its matrices but the last. lora: whose
        norms of q and k may be adapters' own; None = all are the base's."""
        layer, weights = self.mixers[number].layer, self.mixers[number].weights
        if isinstance(weights, AttentionWeights):
            qkv, *gates = products
            if lora is not None and lora.own:
                weights = self._with_own_heads(number, weights, lora, len(plan.positions))
            if weights.qk_layer_norm is not None:
                whole = self.ops.complete(qkv)
                qkv = self.ops.completed(layer_normed_heads(whole, weights.qk_layer_norm))
            mixed = self.ops.attend(plan, layer, qkv, weights)
            return self.ops.let_through(mixed, gates[0]) if gates else mixed
        if isinstance(weights, LatentWeights):
            raise TypeError("attention to latents begins with the normed rows")
        return self.ops.mix_states(plan, layer, products, weights)

    def _with_own_heads(
        self, number: int, weights: AttentionWeights, lora: L, tokens: int
    ) -> AttentionWeights:
        """The weights with adapters' own norms of q and k. number: in `mixers`."""
        step, of_q = self._mixing[number], self.spec.attentions[self.mixers[number].layer].num_heads
        places = self._place(OF_Q, step), self._place(OF_K, step)
        own = partial(own_heads, lora.own, places, of_q=of_q, tokens=tokens)
        norm = weights.qk_layer_norm
        if norm is not None:
            bias = None if norm.bias is None else own(norm.bias, part="bias")
            return replace(weights, qk_layer_norm=norm._replace(weight=own(norm.weight), bias=bias))
        of_base = weights.qk_norm
        return weights if of_base is None else replace(weights, qk_norm=own(of_base))

    def _attend_latents(
        self,
        plan: P,
        number: int,
        weights: LatentWeights,
        normed: torch.Tensor,
        lora: L | None,
    ) -> torch.Tensor:
        mixer, ops = self.mixers[number], self.ops
        *of_q_a, kv_a, q_b, kv_b, _ = mixer.sites
        kept = ops.linear(normed, weights.kv_a, lora, kv_a)
        if weights.q_a is not None and weights.q_norm is not None:
            q = ops.complete(ops.linear(normed, weights.q_a, lora, of_q_a[0]))
            place = self._place(OF_Q, self._mixing[number])
            normed = self._norm(q, weights.q_norm, lora, place)
        products = (ops.linear(normed, weights.q_b, lora, q_b), kept)
        return ops.attend_latents(plan, mixer.layer, products, weights, lora, kv_b)

    def _attend_distances(
        self,
        plan: P,
        mixer: PreparedMixer,
        table: torch.Tensor,
        normed: torch.Tensor,
        lora: L | None,
    ) -> torch.Tensor:
        ops, weights, (of_qkv, *of_others, _) = self.ops, mixer.weights, mixer.sites
        assert isinstance(weights, AttentionWeights)
        qkv = ops.complete(ops.linear(normed, weights.qkv, lora, of_qkv))
        linear = weights.qkv if weights.distances is None else weights.distances
        vectors = DistanceProduct(table, linear, (of_others or [of_qkv])[-1])
        return ops.attend_distances(plan, mixer.layer, qkv, vectors, lora)

    def end(
        self, mixed: torch.Tensor, stream: Stream, lora: L | None, plan: P | None = None
    ) -> torch.Tensor:
        """Compute from the last mixer that writes to normed hidden states, of any tokens; where the
        model has a product with these, to that. plan: of these tokens, where `mixes_behind`."""
        normed, stream = self.after_mixer(self.last_writer, mixed, stream, lora)
        for number in range(self.last_writer + 1, len(self.mixers)):
            assert plan is not None
            mixed = self._mixed(plan, number, normed, lora)
            normed, stream = self.after_mixer(number, mixed, stream, lora, normed)
        output = self.weights.output
        return normed if output is None else self._beside(normed, output, lora, "project_out")

    def _beside(self, x: torch.Tensor, linear: Linear, lora: L | None, role: Role) -> torch.Tensor:
        """Compute a product outside of layers."""
        return self.ops.complete(self.ops.linear(x, linear, lora, self.sites.beside[role]))

    def room(self, tokens: int, layers: int) -> Stream:
        """Room for a stream of so many tokens, and for what so many layers read beside it."""
        embed, spec = self.weights.embed, self.spec.embedding
        hidden = embed.new_zeros(tokens, self.spec.hidden_size)
        if spec.inputs is None:
            return Stream(hidden)
        return Stream(hidden, embed.new_zeros(tokens, layers, spec.inputs.own_size))

    def embed(self, token_ids: torch.Tensor, lora: L | None) -> torch.Tensor:
        """Embed tokens, `[tokens, hidden]`, without the model's factor."""
        return self.ops.embed(token_ids, self.weights.embed, lora, self.sites.embed)

    def begin(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        lora: L | None,
        embedded: Embedded | None = None,
        pictured: Pictured | None = None,
    ) -> tuple[torch.Tensor, Stream]:
        """Compute up to the first mixer's products. positions: of the tokens, int64 `[tokens]`.
        Returns normed hidden states and the stream."""
        hidden = self.embed(token_ids, lora)
        if embedded is not None:
            hidden = torch.where(embedded.is_given, embedded.hidden, hidden)
        if self._embedding_scale != 1.0:
            hidden = hidden * self._embedding_scale
        if pictured is not None:
            hidden = pictured.into(hidden)
        beside, projection = self.weights.embedding, self.weights.embedding.projection
        first = self.spec.embedding.projects_first
        if projection is not None and first:
            hidden = self._beside(hidden, projection, lora, "project_in")
        if beside.positions is not None:
            hidden = hidden + beside.positions[positions]
        if beside.norm is not None:
            hidden = self._norm(hidden, beside.norm, lora, self._place(ON_SUM, self._num_steps))
        if projection is not None and not first:
            hidden = self._beside(hidden, projection, lora, "project_in")
        of = self.spec.pictures
        if pictured is not None and of is not None and of.stand_in is not None:
            token_ids = token_ids.index_fill(0, pictured.places, of.stand_in)
        return self.enter(hidden, self._inputs(token_ids, hidden, lora), lora)

    def enter(
        self, hidden: torch.Tensor, inputs: torch.Tensor | None, lora: L | None
    ) -> tuple[torch.Tensor, Stream]:
        """Compute from embedded tokens up to the first mixer's products, as `begin` does. inputs:
        as of `Stream`."""
        normed = self._normed(0, hidden, lora)
        return self._up_to_mixer(0, normed, Stream(hidden, inputs), lora)

    def _inputs(
        self, token_ids: torch.Tensor, embedded: torch.Tensor, lora: L | None
    ) -> torch.Tensor | None:
        """Compute the inputs of each layer that runs, as of `Stream`."""
        weights = self.weights.embedding.inputs
        if weights is None:
            return None
        spec, layers = weights.spec, len(self.weights.layers)
        product = self._beside(embedded, weights.linear, lora, LAYER_INPUTS)
        normed = self.ops.norm(product.view(-1, spec.size), weights.norm)
        of_layers = normed.view(len(product), spec.layers, spec.size)[:, :layers, weights.mine]
        return torch.add(of_layers, weights.table[token_ids, :layers], alpha=spec.scale)

    def after_mixer(
        self,
        number: int,
        mixed: torch.Tensor,
        stream: Stream,
        lora: L | None,
        last: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, Stream]:
        """Compute from one mixer to the next one's products, or to the end. number: in `mixers`.
        last: what the mixer read, where the next step reads the same."""
        at, mixer = self._mixing[number], self.mixers[number]
        delta = self.ops.linear(mixed, mixer.weights.linears[-1], lora, mixer.sites[-1])
        if self._steps[at].feed_forwards:
            reads_own = all(pre is not None for pre, _ in self._steps[at].own)
            read = stream.hidden if reads_own else self._normed(at, stream.hidden, lora)
            delta = self.ops.plus(delta, self._fed_forward(at, read, stream, lora))
        normed, hidden = self._summed(at, delta, stream.hidden, lora, last)
        return self._up_to_mixer(at + 1, normed, stream._replace(hidden=hidden), lora)

    def _up_to_mixer(
        self, begin: int, normed: torch.Tensor, stream: Stream, lora: L | None
    ) -> tuple[torch.Tensor, Stream]:
        """Run the steps from `begin` on that come before the next mixer."""
        for number in range(begin, len(self._steps)):
            if self._steps[number].mixer is not None:
                break
            delta = self._fed_forward(number, normed, stream, lora)
            normed, hidden = self._summed(number, delta, stream.hidden, lora)
            stream = stream._replace(hidden=hidden)
        return normed, stream

    def _fed_forward(self, number: int, normed: torch.Tensor, stream: Stream, lora: L | None) -> Y:
        """The sum of a step's feed-forwards; where norms lie behind these, over all devices.
        normed: what those read that have no norm of their own."""
        step, ops = self._steps[number], self.ops

        def read(n: int, pre: Norm | None) -> torch.Tensor:
            if pre is None:
                return normed
            place = self._place(feed_place(BEFORE_FEED, n), number)
            return self._norm(stream.hidden, pre, lora, place)

        deltas = (
            run(read(n, pre), stream, lora)
            for n, (run, (pre, _)) in enumerate(zip(step.feed_forwards, step.own, strict=True))
        )
        if not step.sums_normed:
            return reduce(ops.plus, deltas)
        total = None
        for n, (delta, (_, post)) in enumerate(zip(deltas, step.own, strict=True)):
            place = self._place(feed_place(BEHIND_FEED, n), number)
            delta, post = self._behind(ops.reduce(delta), post, stream.hidden, lora, place)
            if total is not None:
                _, total = ops.add_norm(delta, total, None, post)
            else:
                total = ops.complete(delta)
                total = total if post is None else ops.norm(total, post)
        assert total is not None
        return ops.completed(total)

    def _behind(
        self, delta: Y, norm: Norm | None, hidden: torch.Tensor, lora: L | None, place: int
    ) -> tuple[Y, Norm | None]:
        """A delta and the norm behind it, which is over where adapters have their own. hidden: of
        the stream, as large."""
        if norm is None or lora is None or not any(place in each.norms for each in lora.own):
            return delta, norm
        _, whole = self.ops.add_norm(delta, torch.zeros_like(hidden), None)
        return self.ops.completed(self._norm(whole, norm, lora, place)), None

    def _summed(
        self,
        number: int,
        delta: Y,
        hidden: torch.Tensor,
        lora: L | None,
        last: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Add what a step's branches give to the residual stream, and norm for the next step."""
        step, is_last = self._steps[number], number + 1 == len(self._steps)
        norm = self.weights.norm if is_last else self._steps[number + 1].pre
        if not step.sums_normed:
            delta = self.ops.reduce(delta)
        delta, post = self._behind(delta, step.post, hidden, lora, self._place(BEHIND, number))
        if step.after is not None:
            of_sum, total = self.ops.add_norm(delta, hidden, step.after, post, step.factors)
            hidden = self._with_own(of_sum, total, lora, self._place(ON_SUM, number), step.after)
            normed = hidden if norm is None else self.ops.norm(hidden, norm)
        else:
            normed, hidden = self.ops.add_norm(delta, hidden, norm, post, step.factors)
        if last is not None and self._reads_last(number + 1):
            return last, hidden
        if norm is not None:
            normed = self._with_own(normed, hidden, lora, self._place(BEFORE, number + 1), norm)
        # The next sum may write to where this one lies.
        return normed.clone() if self._reads_last(number + 2) else normed, hidden

    def _reads_last(self, number: int) -> bool:
        return number < len(self._steps) and self._steps[number].reads_last

    def _normed(self, number: int, hidden: torch.Tensor, lora: L | None) -> torch.Tensor:
        """The input of a step's branches."""
        norm = self._steps[number].pre
        if norm is None:
            return hidden
        return self._norm(hidden, norm, lora, self._place(BEFORE, number))

    def _place(self, where: int, step: int) -> int:
        return norm_place(where, step, self._num_steps)

    def _norm(self, hidden: torch.Tensor, norm: Norm, lora: L | None, place: int) -> torch.Tensor:
        return self._with_own(self.ops.norm(hidden, norm), hidden, lora, place, norm)

    def _with_own(
        self, normed: torch.Tensor, hidden: torch.Tensor, lora: L | None, place: int, norm: Norm
    ) -> torch.Tensor:
        """Norm again where adapters have a norm of their own. place: as of `norm_place`."""
        if lora is not None:
            self.ops.norm_own(normed, hidden, lora, place, norm)
        return normed

    def _mlp(
        self,
        weights: MlpWeights,
        sites: BranchSites,
        at: int,
        normed: torch.Tensor,
        stream: Stream,
        lora: L | None,
    ) -> Y:
        """at: the layer's place in what layers read beside the stream."""
        ops, spec, (*of_gate, gate_up, down) = self.ops, weights.spec, sites
        y = ops.linear(normed, weights.gate_up, lora, gate_up)
        if spec.is_gated:
            inner = ops.gated(y, spec.activation, spec.gate_factor)
        else:
            inputs = stream.inputs if spec.takes_inputs else None
            factors = None if inputs is None else inputs[:, at]
            inner = ops.activated(y, spec.activation, weights.xielu, factors)
        found = ops.linear(inner, weights.down, lora, down)
        if weights.out_gate is None:
            return found
        gate = ops.linear(normed, weights.out_gate, lora, of_gate[0])
        return ops.scaled(found, gate)

    def _moe(
        self,
        weights: MoeWeights,
        sites: BranchSites,
        normed: torch.Tensor,
        stream: Stream,
        lora: L | None,
    ) -> Y:
        norm = weights.router_norm
        routed_by = normed if norm is None else self.ops.norm(stream.hidden, norm)
        if not weights.latent:
            return self.ops.moe(normed, routed_by, weights, lora, sites)
        ops, (router, of_in, *of_experts, of_out) = self.ops, sites
        before, behind = weights.latent
        inner = ops.complete(ops.linear(normed, before, lora, of_in))
        found = ops.moe(inner, routed_by, weights, lora, (router, *of_experts))
        return ops.linear(ops.complete(found), behind, lora, of_out)

    def logits(
        self,
        normed: torch.Tensor,
        lora: L | None,
        out: torch.Tensor | None = None,
        width: int | None = None,
    ) -> torch.Tensor:
        """Compute logits. Some rows of `forward`'s result `[rows, hidden]` -> `[rows, vocab]`, in
        `out` where that is given, or `[rows, width]`. lora: of them. width: as of `Ops.logits`;
        what lies behind the base's ids means nothing in rows whose adapter has none there.
        Nothing else computes logits.
        """
        head, weight = self.spec.head, self.weights.lm_head
        logits = self.ops.logits(normed, weight, lora, self.sites.lm_head, out, width)
        if head.scale != 1.0:
            logits.mul_(head.scale)
        if head.softcap is not None:
            logits.div_(head.softcap).tanh_().mul_(head.softcap)
        if lora is not None:
            self.ops.forbid_others(logits, lora, self.sites.lm_head)
        return logits
