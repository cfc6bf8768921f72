"""An adapter with tables of its own, on the GPU path and beside the reference."""

from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig

from tests.grids import beyond
from tests.server.model.gpu_pair import Pair, small_pair
from tests.server.model.hub_models import make_model, save_model

FORMS: list[dict[str, Any]] = [
    {"trainable_token_indices": {"embed_tokens": [*range(3, 90, 2)], "lm_head": [4, 8]}},
    {"modules_to_save": ["embed_tokens", "lm_head"]},
]


def own_tables(count: int) -> pytest.MarkDecorator:
    """The forms as `tables`: so many in an ordinary run, the others with `make test-all`."""
    return pytest.mark.parametrize("tables", beyond(count, FORMS), ids=["tokens", "whole"])


def own_tables_pair(
    tables: dict[str, Any],
    sizes: dict[str, Any],
    folder: Path,
    patch: pytest.MonkeyPatch,
    family: str = "qwen3",
    **options: Any,
) -> AbstractContextManager[Pair]:
    """One adapter, whose tables differ from the base's. sizes: of the model. options: of
    `small_pair`."""
    model = make_model(family, **sizes)
    save_model(model, folder)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "embed_tokens" in name or "lm_head" in name:
                parameter.add_(torch.randn_like(parameter), alpha=0.3)  # the adapter's
    adapters = {"own": LoraConfig(r=4, target_modules=["q_proj"], **tables)}
    return small_pair(model, adapters, folder, patch, **options)
