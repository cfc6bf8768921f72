"""Granite 3 and 4: Llama with factors of embedding, scores, branches and logits. Pure."""

from msgspec.structs import replace

from loraplex.adapters.base import Span
from loraplex.server.model.families import experts, family
from loraplex.server.model.families.fields import Fields
from loraplex.server.model.families.readers import llama, mamba
from loraplex.server.model.families.rope import read_rope
from loraplex.server.model.spec.linear_spec import ExpertStorage, LinearSpec, Part
from loraplex.server.model.spec.model_spec import LayerSpec, MlpSpec, ModelSpec
from loraplex.server.model.spec.moe_spec import MoeSpec

_BLOCK = "block_sparse_moe"
_NAMES = experts.ExpertNames(
    router=f"{_BLOCK}.router",
    other_router=f"{_BLOCK}.router.layer",
    of=f"{_BLOCK}.experts.{{}}",
    gate="gate_proj",
    up="up_proj",
    down="down_proj",
    stacked=f"{_BLOCK}.experts",
)
# As checkpoints name tensors, and as transformers does.
_STORED = (
    (rf"{_BLOCK}\.input_linear\.weight$", f"{_BLOCK}.experts.gate_up_proj"),
    (rf"{_BLOCK}\.output_linear\.weight$", f"{_BLOCK}.experts.down_proj"),
    (rf"{_BLOCK}\.router\.layer\.weight$", f"{_BLOCK}.router.weight"),
)


def read(fields: Fields) -> ModelSpec:
    """Granite 3 and 4.1: dense."""
    sizes = family.read_sizes(fields)
    biases = llama.read_biases(fields)
    return _scaled(fields, llama.assembled(fields, sizes, biases))


def read_moe(fields: Fields) -> ModelSpec:
    """Granite 3 with experts, and with an MLP beside them where `config.json` says its size."""
    sizes = family.read_sizes(fields)
    branches: tuple[MoeSpec | MlpSpec, ...] = (_read_experts(fields, sizes),)
    if fields.config.get("shared_intermediate_size", 0) != 0:
        branches = (*branches, _read_shared(fields, sizes, is_alone=False))
    model = llama.assembled(fields, sizes, family.attention_biases(fields))
    model = experts.with_experts(_scaled(fields, model), branches)
    return replace(model, stored_names=_STORED)


def read_hybrid(fields: Fields) -> ModelSpec:
    """Granite 4.0: Mamba-2 between layers that attend, or the latter alone; experts and a shared
    MLP in one step, or that alone."""
    config = fields.config
    sizes = family.read_sizes(fields)
    kinds = mamba.current_kinds(config.get("layer_types", [mamba.LINEAR] * sizes.layers))
    named = family.read_mixed_kinds(fields, sizes, kinds, mamba.LINEAR)
    rope, max_context = read_rope(fields, sizes)
    turns = config.get("position_embedding_type") == "rope"
    biases = family.attention_biases(fields)
    of = family.attention(sizes, rope if turns else None, biases=biases)
    attend, feed = family.layer(sizes, of).steps
    feed = replace(feed, branches=_read_branches(fields, sizes))
    mixers = {family.FULL: LayerSpec((attend, feed))}
    if mamba.LINEAR in named:
        mixer = mamba.mixer(fields, sizes, mamba.read_mamba_sizes(fields, sizes))
        mixers[mamba.LINEAR] = LayerSpec((replace(attend, branches=(mixer,)), feed))
    layers = [mixers[kind] for kind in named]
    model = family.model(fields, sizes, layers, max_context, eos=2, stored_names=_STORED)
    return _scaled(fields, model)


def _read_branches(fields: Fields, sizes: family.ModelSizes) -> tuple[MoeSpec | MlpSpec, ...]:
    if fields.config.get("num_local_experts", 8) == 0:
        return (_read_shared(fields, sizes, is_alone=True),)
    return _read_experts(fields, sizes), _read_shared(fields, sizes, is_alone=False)


def _read_experts(fields: Fields, sizes: family.ModelSizes) -> MoeSpec:
    experts.refuse_other_activation(fields)
    counts = experts.read_counts(fields, default=8, default_of_token=2)
    moe = experts.moe(sizes.hidden, sizes.inner, counts, _NAMES, "top_k_softmax")
    gate_up, down = (_stacked(linear) for linear in (moe.gate_up, moe.down))
    return replace(moe, gate_up=gate_up, down=down)


def _stacked(linear: LinearSpec) -> LinearSpec:
    assert linear.stored is not None
    return replace(linear, stored=ExpertStorage(linear.stored.path, "stacked"))


def _read_shared(fields: Fields, sizes: family.ModelSizes, *, is_alone: bool) -> MlpSpec:
    hidden, inner = sizes.hidden, fields.positive("shared_intermediate_size", 1024)
    gate_up = Part("shared_mlp.input_linear", 2 * inner, (Span(inner), Span(inner)))
    down = Part("shared_mlp.output_linear", hidden)
    return MlpSpec(
        LinearSpec("gate_up" if is_alone else "shared_gate_up", hidden, (gate_up,), "column"),
        LinearSpec("down" if is_alone else "shared_down", inner, (down,), "row"),
        sizes.activation,
    )


def _scaled(fields: Fields, model: ModelSpec) -> ModelSpec:
    """Return the model with the factors that `config.json` states."""
    model = llama.with_attention(model, scale=fields.factor("attention_multiplier"))
    residual = fields.factor("residual_multiplier")
    layers = (
        LayerSpec(tuple(replace(step, factor=residual) for step in layer.steps))
        for layer in model.layers
    )
    return replace(
        model,
        layers=tuple(layers),
        embedding=replace(model.embedding, scale=fields.factor("embedding_multiplier")),
        head=replace(model.head, scale=1.0 / fields.factor("logits_scaling")),
    )
