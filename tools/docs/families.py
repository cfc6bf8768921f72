"""The page docs/reference/families.md, made from the registry."""

from loraplex.launcher.known_models import KnownModel, served_families
from loraplex.server.model.families.registry import architectures, read_model
from loraplex.server.model.ops.kernel_limits import unsupported
from loraplex.server.model.ops.memory import layer_token_bytes, weights_bytes
from loraplex.server.model.spec.latent_spec import LatentSpec
from loraplex.server.model.spec.model_spec import AttentionSpec, MlpSpec, ModelSpec, StepSpec
from loraplex.server.model.spec.moe_spec import MoeSpec
from loraplex.server.model.spec.state_spec import DeltaNetSpec, Mamba2Spec, ShortConvSpec

_HEAD = """\
# Families of models

<!-- Written by `python -m tools.docs`; a test holds it fresh. -->

A model is served if its `config.json` names one of these types, and says nothing that its family
cannot compute. [Models](models.md) has the rules; `loraplex info MODEL` tries any `config.json`.

The last column lists what is not as in Llama: each is a block that other families may use, too.

| `model_type` | architecture | models | blocks |
| --- | --- | --- | --- |
"""
_KNOWN = """
## On a GPU

One known model of each family, in bfloat16, on a GPU of compute capability 9.0. What the kernels do
not compute is computed by torch, on the GPU, too: right, and slower. One missing part leaves the
whole model to torch, with LoRA and sampling, and without CUDA graphs. Keys and values are those of
one token; GB are 10^9 bytes.

| model | weights | keys and values | computed by |
| --- | --: | --: | --- |
"""
_CAPABILITY = (9, 0)
# Of what mixes tokens by a state.
_STATES = {
    "Gated DeltaNet": DeltaNetSpec,
    "Mamba-2": Mamba2Spec,
    "short convolutions": ShortConvSpec,
}


def render() -> str:
    """The whole page."""
    families, served = served_families(), architectures()
    rows = [
        f"| `{name}` | `{served[name]}` | {known.covers} | {_blocks(known)} |\n"
        for name, known in families.items()
    ]
    examples = [_example(known) for known in families.values() if known.example]
    return "".join([_HEAD, *rows, _KNOWN, *examples])


def listed() -> str:
    """All types, in the words of the README's list."""
    *names, last = (f"`{name}`" for name in sorted(architectures()))
    return f"{', '.join(names)} and {last}"


def _blocks(known: KnownModel) -> str:
    """List the parts of a known model that Llama has not, or has in another form."""
    try:
        model = read_model(known.config)
    except ValueError:
        return ""
    attentions = set(model.attentions.values())
    feeds = {feed for layer in model.layers for feed in layer.feed_forwards}
    mixers = {branch for layer in model.layers for branch in layer.branches}
    ropes = {of.rope for of in attentions}
    turned = [rope for rope in ropes if rope is not None]
    mlps = [feed for feed in feeds if isinstance(feed, MlpSpec) and not feed.takes_inputs]
    found: dict[str, bool] = {
        "LayerNorm": model.norm.kind == "layer" and model.norm.has_weight,
        "LayerNorm without weights": not model.norm.has_weight,
        "norms before and behind branches": any(
            step.pre is not None and step.post is not None for step in model.steps
        ),
        "tokens that see all others": not model.is_causal,
        "norms of residual sums": any(step.after is not None for step in model.steps),
        "norms behind branches": all(
            step.pre is None and step.post is not None for step in model.steps
        ),
        "parallel branches": any(len(step.branches) > 1 and _attends(step) for step in model.steps),
        "attention and Mamba-2 side by side": any(step.reads_last for step in model.steps),
        "a norm for each branch": any(step.own for step in model.steps if _attends(step)),
        "norms of q and k": any(
            of.q_norm is not None and not of.norms_rotated for of in attentions
        ),
        "norms of q and k behind the rotation": any(of.norms_rotated for of in attentions),
        **{name: any(isinstance(each, kind) for each in mixers) for name, kind in _STATES.items()},
        "latent attention": any(isinstance(of, LatentSpec) for of in attentions),
        "gated attention": any(of.is_gated for of in attentions),
        "windows": any(window is not None for window in model.windows),
        "sinks": any(of.sinks for of in attentions),
        "layers without rotation": any(of.rope is None and not of.slopes for of in attentions),
        "rotation of a part of heads": any(rope.rotary_dim is not None for rope in turned),
        "rotation of neighbours": any(rope.interleaved for rope in turned),
        "queries that grow": any(of.q_scale is not None for of in attentions),
        "soft caps": model.head.softcap is not None
        or any(of.softcap is not None for of in attentions),
        "biases of scores by distance": model.biases is not None,
        "scores of tokens with vectors of distances": model.distances is not None,
        "ALiBi": any(of.slopes for of in attentions),
        "learned positions": model.embedding.positions is not None,
        "two types of tokens": model.embedding.num_types > 1,
        "a scaled embedding": model.embedding.scale != 1.0,
        "an MLP without gate": any(not feed.is_gated for feed in mlps),
        **{of.activation: of.activation != "silu" for of in mlps},
        "embeddings of each layer": model.embedding.inputs is not None,
        "keys and values of other layers": any(of.keys_of is not None for of in attentions),
        "experts": any(isinstance(feed, MoeSpec) for feed in feeds),
        "a shared MLP": any(len(step.branches) > 1 and not _attends(step) for step in model.steps),
    }
    return ", ".join(block for block, has in found.items() if has)


def _attends(step: StepSpec) -> bool:
    return any(isinstance(branch, AttentionSpec) for branch in step.branches)


def _example(known: KnownModel) -> str:
    try:
        model = read_model(known.config)
    except ValueError as error:
        return f"| {known.example} | | | {error} |\n"
    reason = unsupported(model, "bfloat16", _CAPABILITY)
    ways = "the project's kernels" if reason is None else f"torch: {reason}"
    weights = weights_bytes(model, "bfloat16", packed=True) / 1e9
    return f"| {known.example} | {weights:.1f} GB | {_kv_bytes(model):,} bytes | {ways} |\n"


def _kv_bytes(model: ModelSpec) -> int:
    attentions = model.attentions.values() if model.is_causal else ()
    own = (of for of in attentions if of.keys_of is None)
    return sum(layer_token_bytes(attention, "bfloat16", "auto") for attention in own)
