"""A base model guessed from an adapter's own tensors, to check a folder without its base. Pure."""

import re
from collections.abc import Iterable

from adapters.base import SITE_PROJECTIONS, BaseSpec, ModuleShape
from adapters.header import TensorInfo

_LAYER_TENSOR = re.compile(
    r"base_model\.model\.model\.layers\.(?P<layer>0|[1-9][0-9]{0,3})\.(?P<path>(?:self_attn|mlp)\.(?P<name>[a-z]+_proj))"
    r"\.lora_(?P<side>[AB])(?:\.default)?\.weight"
)
_MODEL_TENSOR = re.compile(
    r"base_model\.model\.(?P<path>(?:model\.)?(?P<name>embed_tokens|lm_head))"
    r"\.lora_(?:embedding_)?(?P<side>[AB])(?:\.default)?(?:\.weight)?"
)
_KNOWN = frozenset(name for names in SITE_PROJECTIONS.values() for name in names)


def infer_base(name: str, tensors: Iterable[TensorInfo]) -> BaseSpec:
    """The smallest base that the first tensors of each module fit.

    Tensors of modules that are unknown or contradict each other stay for validation to refuse.
    """
    paths: dict[str, str] = {}
    sizes: dict[tuple[str, str], int] = {}
    num_layers = 0
    for tensor in tensors:
        found = _LAYER_TENSOR.fullmatch(tensor.name)
        if found:
            num_layers = max(num_layers, int(found["layer"]) + 1)
        else:
            found = _MODEL_TENSOR.fullmatch(tensor.name)
        if found and found["name"] in _KNOWN and len(tensor.shape) == 2:
            size = tensor.shape[1 if found["side"] == "A" else 0]
            paths.setdefault(found["name"], found["path"])
            sizes.setdefault((found["name"], found["side"]), size)
    modules = {
        module: ModuleShape(path, sizes.get((module, "A"), 0), sizes.get((module, "B"), 0))
        for module, path in paths.items()
    }
    head, embedding = modules.get("lm_head"), modules.get("embed_tokens")
    vocab = head.out_features if head else embedding.in_features if embedding else 0
    hidden = head.in_features if head else embedding.out_features if embedding else 0
    return BaseSpec(
        digest="",
        names=(name,),
        num_layers=num_layers,
        hidden_size=hidden,
        vocab_size=vocab,
        layer_modules={k: v for k, v in modules.items() if k.endswith("_proj")},
        model_modules={k: v for k, v in modules.items() if not k.endswith("_proj")},
    )
