"""Products of attention to latents on a GPU: `kv_b` absorbed in queries and in results, with LoRA.

`latents_torch.py` defines what is computed.
"""

from dataclasses import dataclass

import torch

from loraplex.server.kernels.lora.latent_lora import HeadRows, add_latent_lora
from loraplex.server.kernels.lora.scale_outputs import scale_outputs
from loraplex.server.kernels.lora.table import LoraTable
from loraplex.server.model.latent_weights import LatentWeights
from loraplex.server.model.lora.sites import Site
from loraplex.server.model.ops.cuda.device_lora import DeviceLora


@dataclass(frozen=True, slots=True)
class AbsorbedProducts:
    """A layer's `kv_b` with a batch's adapters. site: of kv_b."""

    weights: LatentWeights
    lora: DeviceLora | None
    table: LoraTable
    site: Site

    @property
    def _rows(self) -> HeadRows:
        return HeadRows(self.weights.spec.nope, self.weights.spec.value_dim)

    def queries(self, q: torch.Tensor, scales: torch.Tensor | None) -> torch.Tensor:
        """Compute queries, `[tokens, heads, latent + turned]`, whose rotated part is still to come.
        q: `[tokens, heads * (nope + turned)]`. scales: factors of tokens, float32 `[tokens]`.
        """
        spec, keys = self.weights.spec, self.weights.keys
        plain = q.view(len(q), len(keys), -1)[..., : spec.nope]
        scaled = plain
        if self.lora is not None and self.lora.vectors is not None:
            scaled = self._scaled(plain, self.lora)
        found = q.new_empty(len(q), len(keys), spec.head_dim)
        latents = found[..., : spec.latent]
        torch.bmm(scaled.transpose(0, 1), keys, out=latents.transpose(0, 1))
        if self.lora is not None:
            context = (self.lora.slots, self.table, self.site.number, self._rows)
            add_latent_lora(plain, latents, *context, "keys")
        if scales is not None:
            latents.mul_(scales[:, None, None])
        return found

    def values(self, read: torch.Tensor, out: torch.Tensor) -> None:
        """Compute heads' results. read: `[tokens, heads, latent]`; out: `[tokens, heads,
        value_dim]`.
        """
        values = self.weights.values
        torch.bmm(read.transpose(0, 1), values.transpose(1, 2), out=out.transpose(0, 1))
        if self.lora is None:
            return
        if self.lora.vectors is not None:
            nope = self.weights.spec.nope
            whole = out.new_zeros(*out.shape[:2], sum(self._rows))
            whole[..., nope:] = out
            out.copy_(self._changed(whole, self.lora)[..., nope:])
        context = (self.lora.slots, self.table, self.site.number, self._rows)
        add_latent_lora(read, out, *context, "values")

    def _scaled(self, q: torch.Tensor, lora: DeviceLora) -> torch.Tensor:
        """Queries times the factors of keys. What is added to all keys alike changes no score."""
        whole = q.new_zeros(*q.shape[:2], sum(self._rows))
        added = self._changed(whole.clone(), lora)
        whole[..., : q.shape[2]] = q
        return (self._changed(whole, lora) - added)[..., : q.shape[2]]

    def _changed(self, whole: torch.Tensor, lora: DeviceLora) -> torch.Tensor:
        """Apply factors and addends to outputs of kv_b, `[tokens, heads, nope + value_dim]`."""
        assert lora.vectors is not None
        scale_outputs(whole.flatten(1), lora.slots, lora.vectors, self.site.number)
        return whole
