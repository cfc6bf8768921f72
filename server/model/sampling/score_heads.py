"""Score heads of a model and of its adapters, from hidden states to scores of labels."""

from typing import Any

import numpy as np
import torch
from torch.nn import functional

from loraplex.server.model.decoder import Decoder
from loraplex.server.model.linear.dense import DenseLinear
from loraplex.server.model.lora.lora import AdapterTable
from loraplex.server.model.ops.products_torch import activated, layer_norm
from loraplex.server.model.spec.model_spec import ScoreSpec
from loraplex.server.model.weights import LayerNorm, ScoreTensors


class ScoreHeads:
    """Computes scores by the base's head, or by parts of it that an adapter has of its own."""

    def __init__(self, decoder: Decoder[Any, Any, Any], table: AdapterTable) -> None:
        self._decoder, self._table = decoder, table

    def scores(self, slot: int, hidden: torch.Tensor, *, of_tokens: bool) -> torch.Tensor:
        """Compute the scores of hidden states, `[n, hidden]` -> `[n, labels]`. slot: of their
        adapter, -1 = none. of_tokens: by the head that gives each token scores. Without a head no
        number is finite.
        """
        spec, own = self._decoder.spec.score(of_tokens=of_tokens), self._table.head(slot)
        tensors = self._decoder.weights.score | own
        needed = (f"{spec.path}.weight", *(name for name, _ in spec.inner_tensors()))
        if not all(name in tensors for name in needed):
            return hidden.new_full((len(hidden), 1), float("nan"))
        inner = self._inner(spec, slot, hidden, tensors)
        bias = tensors.get(f"{spec.path}.bias")
        return functional.linear(inner, tensors[f"{spec.path}.weight"], bias)

    def vectors(self, pooled: torch.Tensor) -> torch.Tensor:
        """Make vectors of pooled ones, `[n, hidden]` -> `[n, size]`, as the model's files say."""
        for dense in self._decoder.weights.dense:
            pooled = dense.linear.run(pooled.float())
            if dense.activation is not None:
                pooled = activated(pooled, dense.activation)
        return pooled

    def _inner(
        self, spec: ScoreSpec, slot: int, hidden: torch.Tensor, tensors: ScoreTensors
    ) -> torch.Tensor:
        """Compute the input of the labels' matrix."""
        if spec.dense is not None and spec.activation is not None:
            path, ops = spec.dense.parts[0].path, self._decoder.ops
            dense = DenseLinear(tensors[f"{path}.weight"], tensors.get(f"{path}.bias"))
            slots = np.full(len(hidden), slot)
            lora = ops.lora(slots) if self._table.changes_model(slots) else None
            y = ops.logits(hidden, dense, lora, self._decoder.sites.lm_head)
            hidden = activated(y, spec.activation)
        if spec.norm is not None:
            path = spec.norm.path
            of_norm = tensors[f"{path}.weight"], tensors.get(f"{path}.bias"), spec.norm.epsilon
            hidden = layer_norm(hidden, LayerNorm(*of_norm))
        return hidden
