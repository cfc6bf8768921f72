"""The parts of a model that adapters may change, as its ModelSpec says. Pure."""

import re
from collections.abc import Iterator, Mapping
from itertools import chain

from msgspec.structs import replace

from loraplex.adapters.base import (
    UNGROUPED,
    BaseNorm,
    BaseSpec,
    ExpertWeight,
    LayerModules,
    ModuleShape,
    ScoreParts,
    layer_path,
    layer_stem,
)
from loraplex.adapters.peft.tensor_names import is_of_images
from loraplex.server.model.spec.linear_spec import LinearSpec
from loraplex.server.model.spec.model_spec import AttentionSpec, LayerSpec, ModelSpec, NormSpec
from loraplex.server.model.spec.moe_spec import MoeSpec
from loraplex.server.model.spec.picture_spec import PictureSpec


def base_spec(
    model: ModelSpec,
    digest: str,
    names: tuple[str, ...],
    embedding_digests: Mapping[str, str] | None = None,
    tokens: dict[str, int] | None = None,
    eos_token_ids: tuple[int, ...] = (),
) -> BaseSpec:
    """The module table that adapters for this model are validated against."""
    embedding, pictures = model.embedding, model.pictures
    tower = () if pictures is None else tuple(_tower_layers(pictures))
    return BaseSpec(
        digest=digest,
        names=names,
        hidden_size=model.output_size,
        vocab_size=model.vocab_size,
        layers=(*_layers(model), *tower),
        model_modules={
            "embed_tokens": ModuleShape(
                embedding.path, embedding.vocab_size, embedding.size, sharding="row"
            ),
            **{linear.role: _only_module(linear) for linear in model.beside},
            "lm_head": _only_module(model.head.linear),
        },
        embedding_digests=dict(embedding_digests or {}),
        tokens=tokens,
        eos_token_ids=eos_token_ids,
        is_tied=model.head.tied,
        norms=_norms(model),
        num_classes=0 if model.classes is None else len(model.classes.labels),
        score_heads=() if model.is_decoder else tuple(_score_parts(model)),
        unread=model.unread_modules,
        unread_tensors="" if pictures is None else _unread(pictures),
        tower_layer=-1 if pictures is None else model.num_layers,
    )


def _only_module(linear: LinearSpec) -> ModuleShape:
    (shape,) = linear.modules().values()
    return shape


def _score_parts(model: ModelSpec) -> Iterator[ScoreParts]:
    for score in model.scores:
        tensors = tuple(score.tensors(0, model.output_size))
        yield ScoreParts(tensors, score.pooling == "all")


def _norms(model: ModelSpec) -> tuple[BaseNorm, ...]:
    """List all norms."""
    placed, found = model.placed_norms, dict[str, BaseNorm]()
    layers = [index for index, layer in enumerate(model.layers) for _ in layer.steps]
    for place, norm in enumerate(placed):
        if norm is not None:
            step = place % (len(layers) + 1)
            path = norm.path if step == len(layers) else layer_path(layers[step], norm.path)
            bias = place + len(placed) if norm.bias else -1
            attention = model.attentions.get(layers[step]) if step < len(layers) else None
            is_inner = attention and norm in attention.inner_norms
            is_shared = attention and (attention.norms_all_heads or norm.heads)
            head = attention.head_dim if attention and is_inner and is_shared else 0
            found[path] = BaseNorm(path, norm.numbers, place, bias, head)
    for path, norm in _named_norms(model):
        found.setdefault(path, BaseNorm(path, norm.numbers, -1))
    return tuple(found.values())


def _named_norms(model: ModelSpec) -> Iterator[tuple[str, NormSpec]]:
    """Yield norms of any kind, with their whole names."""
    for index, layer in enumerate(model.layers):
        for step in layer.steps:
            attentions = (each for each in step.branches if isinstance(each, AttentionSpec))
            inner = chain.from_iterable(each.inner_norms for each in attentions)
            for norm in (step.pre, *step.other_norms, *inner):
                if norm is not None:
                    yield layer_path(index, norm.path), norm
    inputs = model.embedding.inputs
    for other in (model.norm, model.embedding.norm, None if inputs is None else inputs.norm):
        if other is not None:
            yield other.path, other


def _layers(model: ModelSpec) -> Iterator[LayerModules]:
    made: dict[LayerSpec, LayerModules] = {}
    for index, layer in enumerate(model.layers):
        if layer not in made:
            made[layer] = _layer(layer)
        yield replace(made[layer], path=layer_stem(index))


def _layer(layer: LayerSpec) -> LayerModules:
    """The matrices of a layer that adapters may change, in the order of a step. Without a path."""
    linears = [linear for linear in layer.linears if linear.takes_lora]
    return LayerModules(
        path="",
        modules={name: shape for linear in linears for name, shape in linear.modules().items()},
        sites={linear.role: linear.names for linear in linears},
        expert_weights=tuple(_expert_weight(linear) for linear in linears if linear.stored),
        aliases=dict(_aliases(layer)),
    )


def _tower_layers(pictures: PictureSpec) -> Iterator[LayerModules]:
    """The layers of an encoder of pictures, which each device has whole, then its other products in
    the order of their sites (`TowerSites`)."""
    for index, layer in enumerate(pictures.tower.layers):
        of_layer = _layer(layer)
        shapes = {
            name: replace(_whole(shape), path=shape.path + pictures.wrapped)
            for name, shape in of_layer.modules.items()
        }
        path = f"{pictures.path}.{index}"
        yield replace(of_layer, path=path, modules=shapes, others=_older(path))
    for linear in pictures.merger.linears:
        alone = _lone(pictures, _whole(_only_module(linear)))
        # One that is stored the other way round is a bare tensor, and no module.
        yield replace(alone, modules={}, sites={}) if linear.transposed else alone
    of, kernel = pictures.embedding, pictures.embedding.kernel
    kernel = kernel if len(kernel) > 1 else ()  # else it is a linear module
    patches = ModuleShape(of.path, of.vocab_size, of.size, has_bias=of.bias, kernel=kernel)
    yield _lone(pictures, patches)


def _whole(shape: ModuleShape) -> ModuleShape:
    return replace(shape, sharding="none", spans=(), groups=UNGROUPED)


def _lone(pictures: PictureSpec, shape: ModuleShape) -> LayerModules:
    """A layer of one module."""
    root = pictures.path.partition(".")[0]
    whole = shape.path if is_of_images(shape.path) else f"{root}.{shape.path}"
    head, _, name = whole.rpartition(".")
    of_module = {whole: replace(shape, path=name)}
    return LayerModules(head, of_module, {"merger": (whole,)}, others=_older(head))


def _older(path: str) -> tuple[str, ...]:
    """Other names of what a tower holds, in earlier versions of transformers."""
    head, dot, rest = path.partition(".")
    return (f"{head}.vision_model{dot}{rest}",) if head == "vision_tower" else ()


def _unread(pictures: PictureSpec) -> str:
    """A pattern of an encoder's weights whose result nobody asks for."""
    root, _, layers = pictures.path.partition(".")
    own = pictures.tower.unread.replace(r"model\.layers\.", re.escape(f"{layers}."))
    return rf"{root}\.(?:vision_model\.)?(?:{own})"


def _expert_weight(linear: LinearSpec) -> ExpertWeight:
    assert linear.stored is not None
    stored = linear.stored
    return ExpertWeight(stored.path, linear.names, stored.interleaved, stored.transposed)


def _aliases(layer: LayerSpec) -> Iterator[tuple[str, str]]:
    """Yields other paths of routers, with their own: where transformers has a router now, and
    beside modules of each expert, where these differ.
    """
    for branch in layer.feed_forwards:
        if not isinstance(branch, MoeSpec) or branch.gate_up.stored is None:
            continue
        if not branch.gate_up.takes_lora:
            continue
        (router,) = branch.router.parts
        yield from ((alias, router.path) for alias in router.aliases)
        stored, of_each = branch.gate_up.stored.path, branch.gate_up.parts[0].path
        blocks = stored.rsplit(".", 2)[0], of_each.rsplit(".", 3)[0]
        own = next((block for block in blocks if router.path.startswith(f"{block}.")), "")
        for block in blocks:
            if own and block != own:
                yield block + router.path.removeprefix(own), router.path
