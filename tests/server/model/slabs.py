"""Slabs packed straight from a PEFT model in memory, following SlabLayout's description."""

from typing import Any

import torch
from peft import PeftModel

from adapters.base import LAYER_SITES, SITE_PROJECTIONS, SiteKind
from adapters.manifest import SiteLayout, SlabDtype, SlabLayout
from server.model.lora import DTYPES

_ALIGN = 256
_PARENTS = {"qkv": "self_attn", "o": "self_attn", "gate_up": "mlp", "down": "mlp"}
_Weights = tuple[torch.Tensor, torch.Tensor, float]


class SlabBuilder:
    """Places tensors: none crosses an extent's border unless larger than one."""

    def __init__(self, extent_bytes: int, dtype: SlabDtype) -> None:
        self.extent_bytes = extent_bytes
        self.dtype = dtype
        self.runs: list[int] = []
        self.data = bytearray()
        self.cursor = 0

    def place(self, tensor: torch.Tensor) -> int:
        raw = tensor.detach().to(DTYPES[self.dtype]).contiguous().view(torch.uint8)
        payload = raw.numpy().tobytes()
        offset = -(-self.cursor // _ALIGN) * _ALIGN
        room = len(self.data) - offset
        if len(payload) > room:
            offset = len(self.data)
            run = -(-len(payload) // self.extent_bytes)
            self.runs.append(run)
            self.data.extend(bytes(run * self.extent_bytes))
        self.data[offset : offset + len(payload)] = payload
        self.cursor = offset + len(payload)
        return offset


def pack(
    model: PeftModel, adapter: str, *, extent_bytes: int = 4096, dtype: SlabDtype = "float32"
) -> tuple[SlabLayout, bytes]:
    builder = SlabBuilder(extent_bytes, dtype)
    inner: Any = model.get_base_model()
    sites = []
    for index, layer in enumerate(inner.model.layers):
        for kind in LAYER_SITES:
            modules = [
                getattr(getattr(layer, _PARENTS[kind]), name) for name in SITE_PROJECTIONS[kind]
            ]
            sites.append(_site(builder, index, kind, [_weights(m, adapter) for m in modules]))
    sites.append(_site(builder, -1, "embed_tokens", [_weights(inner.model.embed_tokens, adapter)]))
    sites.append(_site(builder, -1, "lm_head", [_weights(inner.lm_head, adapter)]))
    layout = SlabLayout(
        digest=adapter.ljust(64, "0"),
        base_digest="0" * 64,
        dtype=dtype,
        tp_rank=0,
        tp_size=1,
        extent_bytes=extent_bytes,
        runs=tuple(builder.runs),
        sites=tuple(site for site in sites if site is not None),
    )
    return layout, bytes(builder.data)


def _weights(module: Any, adapter: str) -> _Weights | None:
    if adapter in getattr(module, "lora_A", {}):
        a, b = module.lora_A[adapter].weight, module.lora_B[adapter].weight
    elif adapter in getattr(module, "lora_embedding_A", {}):
        a, b = module.lora_embedding_A[adapter], module.lora_embedding_B[adapter]
    else:
        return None
    return a, b, float(module.scaling[adapter])


def _site(
    builder: SlabBuilder, layer: int, kind: SiteKind, parts: list[_Weights | None]
) -> SiteLayout | None:
    if not any(parts):
        return None
    stacked = torch.cat([part[0] for part in parts if part is not None])
    a_offset = builder.place(stacked.T if kind == "embed_tokens" else stacked)
    return SiteLayout(
        layer=layer,
        kind=kind,
        ranks=tuple(0 if p is None else p[0].shape[0] for p in parts),
        scales=tuple(0.0 if p is None else p[2] for p in parts),
        a_offset=a_offset,
        b_offsets=tuple(0 if p is None else builder.place(p[1]) for p in parts),
    )
