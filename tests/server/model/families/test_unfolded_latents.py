"""Prompts whose keys and values are made of latents, by the GPU's kernels in Triton's interpreter:
as the reference operations, which parity's table holds to transformers and PEFT.
"""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from peft import LoraConfig

from tests.kernels.batches import interpreted
from tests.server.model.adapter_zoo import zoo_of
from tests.server.model.families.test_gpu_path import SERVED, SMALL
from tests.server.model.families.variants import VARIANTS
from tests.server.model.gpu_pair import assert_same, small_pair
from tests.server.model.hub_models import make_model

pytestmark = [
    pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore:The following .*_pattern keys:RuntimeWarning"),
    interpreted,
]
ALL, SOME = 1, 2
# A row of parity's table, every how many-th prompt is unfolded, and devices.
ROWS = [
    ("youtu", SOME, 1),
    *(
        pytest.param(*row, marks=pytest.mark.exhaustive)
        for row in (
            ("youtu", ALL, 2),
            ("mistral4", ALL, 1),
            ("mistral4", SOME, 1),
            ("deepseek-v3", ALL, 1),
            ("deepseek-v2", SOME, 2),
        )
    ),
]


@pytest.mark.parametrize(("name", "every", "shards"), ROWS)
def test_same_as_the_reference(
    name: str, every: int, shards: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Steps leave the graphs, contexts are cut into pieces of few keys, and some prompts are not
    unfolded. Every adapter changes kv_b, one of them the base's part of it."""
    config: dict[str, Any] = {"use_dora": True, "target_modules": ["kv_b_proj", "o_proj"]}
    adapters = {
        "everything": zoo_of(VARIANTS[name])["rank64_everything"],
        "dora": LoraConfig(r=4, lora_alpha=8, **config),
    }
    model = make_model(name, **{**SMALL, **SERVED[name, "fa3"]})
    prefixes = set[int]()

    def saved(spec: Any, starts: np.ndarray, num_new: np.ndarray) -> np.ndarray:
        prefixes.update(starts.tolist())
        return np.where(num_new % every == 0, 1e12, -1.0)

    options: dict[str, Any] = {"backend": "fa3", "shards": shards}
    with small_pair(model, adapters, tmp_path, monkeypatch, **options) as pair:
        from loraplex.server.model.ops.attention import unfolding
        from loraplex.server.model.ops.cuda.latents_cuda import Unfolder

        monkeypatch.setattr(unfolding, "saved_by_unfolding", saved)
        plan = Unfolder.plan

        def planned(self: Unfolder, layout: Any) -> Any:
            self._room = 4
            return plan(self, layout)

        monkeypatch.setattr(Unfolder, "plan", planned)
        assert_same(pair, [0, -1, 1], in_graphs=False)
        assert len(prefixes) > 1
