"""The base model as an adapter sees it: which modules exist, and their shapes. Pure."""

from collections.abc import Iterator
from typing import Literal

import msgspec

SiteKind = Literal["qkv", "o", "gate_up", "down", "embed_tokens", "lm_head"]

# A *site* is one fused matrix product of the base; its projections share the input. These are of
# Llama and of models after it.
SITE_PROJECTIONS: dict[SiteKind, tuple[str, ...]] = {
    "qkv": ("q_proj", "k_proj", "v_proj"),
    "o": ("o_proj",),
    "gate_up": ("gate_proj", "up_proj"),
    "down": ("down_proj",),
    "embed_tokens": ("embed_tokens",),
    "lm_head": ("lm_head",),
}
MODEL_SITES: tuple[SiteKind, ...] = ("embed_tokens", "lm_head")


class ModuleShape(msgspec.Struct, frozen=True):
    """A linear module `y = x W^T`. path: as in the checkpoint, e.g. `self_attn.q_proj`."""

    path: str
    in_features: int
    out_features: int


def module_path(shape: ModuleShape, layer: int) -> str:
    """A module's name in the whole model. layer: 0-based, or -1 outside the layers."""
    return shape.path if layer < 0 else f"model.layers.{layer}.{shape.path}"


class BaseSpec(msgspec.Struct, frozen=True):
    """What adapters are validated against.

    digest: identity of the base (sha256 hex); "" = it was inferred from an adapter's tensors.
    names: what it is called; `adapters.base_names` says which other names mean the same.
    layer_modules: short name (`q_proj`, …) -> shape; the same in every layer.
    model_modules: `embed_tokens` (in = vocabulary, out = hidden) and `lm_head` -> shape.
    embedding_digests: `embed_tokens` and `lm_head` -> `float_digest` of the base's weights
        (`adapters.safetensors.floats`). An adapter that brings an equal copy of them, as PEFT
        saves it, is then accepted.
    sites: the modules of each site, in the order of a step within a layer.
    tokens: text -> id, all that the base's tokenizer knows; None = not known.
    eos_token_ids: ids that its files name as the end of an answer.
    """

    digest: str
    names: tuple[str, ...]
    num_layers: int
    hidden_size: int
    vocab_size: int
    layer_modules: dict[str, ModuleShape]
    model_modules: dict[str, ModuleShape]
    sites: dict[SiteKind, tuple[str, ...]] = msgspec.field(
        default_factory=lambda: dict(SITE_PROJECTIONS)
    )
    embedding_digests: dict[str, str] = {}
    tokens: dict[str, int] | None = None
    eos_token_ids: tuple[int, ...] = ()

    @property
    def is_inferred(self) -> bool:
        return not self.digest


class BaseModule(msgspec.Struct, frozen=True):
    """One module of the base. layer: 0-based, -1 outside the layers. path: its whole name."""

    layer: int
    name: str
    path: str
    shape: ModuleShape


def base_modules(base: BaseSpec) -> Iterator[BaseModule]:
    """By layer, then those outside the layers."""
    for layer in range(base.num_layers):
        for name, shape in base.layer_modules.items():
            yield BaseModule(layer, name, module_path(shape, layer), shape)
    for name, shape in base.model_modules.items():
        yield BaseModule(-1, name, shape.path, shape)
