"""A base model guessed from an adapter's own tensors, to check a folder without its base. Pure."""

import re
from collections.abc import Iterable, Iterator
from math import prod

from loraplex.adapters.base import (
    LAYER_SITES,
    MODEL_SITES,
    BaseNorm,
    BaseSpec,
    LayerModules,
    ModuleShape,
    layer_stem,
)
from loraplex.adapters.classes import HEAD_OF_CLASSES
from loraplex.adapters.peft.config import is_norm
from loraplex.adapters.peft.tensor_names import (
    Naming,
    TensorName,
    parse_tensor_name,
    spelling_of,
)
from loraplex.adapters.safetensors.header import TensorInfo

_LAYER = re.compile(
    r"model\.layers\.(?P<layer>0|[1-9][0-9]{0,3})\.(?P<path>(?:self_attn|mlp)\.(?P<name>[a-z]+_proj))"
)
_TABLE = re.compile(r"(?P<path>(?:model\.)?(?P<name>embed_tokens|lm_head))")
_KNOWN = frozenset((*MODEL_SITES, *(name for names in LAYER_SITES.values() for name in names)))


def infer_base(trained_for: str, tensors: Iterable[TensorInfo]) -> BaseSpec:
    """The smallest base that the first tensors of each module fit, LoRA before copies of the base.

    Tensors of modules that are unknown or contradict each other stay for validation to refuse.
    """
    paths: dict[str, str] = {}
    sizes: dict[tuple[str, str], int] = {}
    num_layers = score_width = 0
    named = [(name, tensor.shape) for tensor in tensors if (name := parse_tensor_name(tensor.name))]
    naming = spelling_of(name for name, _ in named).naming
    for tensor, shape in sorted(named, key=lambda pair: not pair[0].side):
        path = naming.meant(tensor.path) or ""
        found = _LAYER.fullmatch(path) if tensor.side or tensor.is_bias else None
        if found:
            num_layers = max(num_layers, int(found["layer"]) + 1)
        else:
            found = _TABLE.fullmatch(path)
        if found and found["name"] in _KNOWN and len(shape) == (1 if tensor.is_bias else 2):
            paths.setdefault(found["name"], found["path"])
            for side, size in _sizes(found["name"], tensor, shape):
                sizes.setdefault((found["name"], side), size)
        elif path == HEAD_OF_CLASSES and len(shape) == 2:
            score_width = shape[1]
    modules = {
        module: ModuleShape(path, sizes.get((module, "A"), 0), sizes.get((module, "B"), 0))
        for module, path in paths.items()
    }
    head, embedding = modules.get("lm_head"), modules.get("embed_tokens")
    vocab = head.out_features if head else embedding.in_features if embedding else 0
    hidden = head.in_features if head else embedding.out_features if embedding else score_width
    of_layers = {k: v for k, v in modules.items() if k.endswith("_proj")}
    return BaseSpec(
        digest="",
        names=(trained_for,),
        hidden_size=hidden,
        vocab_size=vocab,
        layers=tuple(
            LayerModules(layer_stem(layer), of_layers, LAYER_SITES) for layer in range(num_layers)
        ),
        model_modules={k: v for k, v in modules.items() if not k.endswith("_proj")},
        norms=tuple(_norms(named, naming)),
    )


def _norms(
    named: Iterable[tuple[TensorName, tuple[int, ...]]], naming: Naming
) -> Iterator[BaseNorm]:
    """Yields the norms of the file; only a known base says which are served."""
    shapes, biased = dict[str, tuple[int, ...]](), set[str]()
    for name, shape in named:
        path = naming.meant(name.path) or ""
        if is_norm(path) and len(shape) in (1, 2):  # of all features, or of each head
            shapes.setdefault(path, shape)
            biased.update([path] if name.is_bias else [])
    for place, (path, shape) in enumerate(shapes.items()):
        bias, head = place + len(shapes) if path in biased else -1, sum(shape[1:])
        yield BaseNorm(path, prod(shape), place, bias, head)


def _sizes(name: str, tensor: TensorName, shape: tuple[int, ...]) -> Iterable[tuple[str, int]]:
    """A module's sizes by one tensor: its input (side `A`), its output (`B`, and a bias), or both
    for a copy of the base's own weights."""
    if tensor.is_bias:
        return [("B", shape[0])]
    if tensor.side:
        return [(tensor.side, shape[1 if tensor.side == "A" else 0])]
    return zip("AB" if name == "embed_tokens" else "BA", shape, strict=True)
