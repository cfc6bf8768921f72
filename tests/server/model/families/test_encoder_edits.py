"""No edit of an encoder's config.json is silently wrong: it is refused, or means what transformers
says."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModel

from loraplex.server.config import ConfigError
from loraplex.server.model.checkpoint.checkpoint import CheckpointError
from loraplex.server.protocol import VectorParams
from tests.server.model.driver import Driver, Stream, generate
from tests.server.model.families.config_edits import Edit, edits
from tests.server.model.families.encoders import ENCODERS
from tests.server.model.hub_models import random_model

pytestmark = [
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.exhaustive,
]
IDS = list(range(3, 25))
MOST_PARAMETERS = 10_000_000


def expected(edit: Edit, folder: Path) -> np.ndarray[Any, Any] | None:
    """The mean of hidden states by transformers, whose weights are then in the folder. None where
    transformers refuses the edit, or cannot run it."""
    (folder / "config.json").write_text(json.dumps(edit.config))
    build: Any = AutoModel.from_config
    try:
        made = AutoConfig.from_pretrained(folder)
        with torch.device("meta"):
            if sum(each.numel() for each in build(made).parameters()) > MOST_PARAMETERS:
                return None
        model = random_model(lambda: made, build)
        with torch.inference_mode():
            found: np.ndarray[Any, Any] = (
                model(torch.tensor([IDS])).last_hidden_state[0].double().mean(0).numpy()
            )
        model.config = type(made)()
        model.save_pretrained(folder)
    except Exception:
        return None
    (folder / "config.json").write_text(json.dumps(edit.config))
    return found


def difference(edit: Edit, folder: Path) -> float:
    wanted = expected(edit, folder)
    if wanted is None:
        return 0.0
    try:
        driver = Driver(folder)
    except (CheckpointError, ConfigError):
        return 0.0
    stream = Stream(driver, 0, IDS).read_for(VectorParams(pooling="mean"))
    generate(driver, [stream], 0, 64)
    driver.close()
    if stream.vector is None:  # numbers that are not finite
        return 0.0 if not np.isfinite(wanted).all() else float("inf")
    return float(np.abs(stream.vector - wanted).max()) / max(1.0, float(np.abs(wanted).max()))


@pytest.mark.parametrize("name", [*ENCODERS])
def test_every_edit(name: str, tmp_path: Path) -> None:
    written = json.loads(ENCODERS[name].make().to_json_string())
    written["architectures"] = [
        f"{type(ENCODERS[name].make()).__name__.removesuffix('Config')}Model"
    ]
    tried = list(edits(written))
    found = {each.name: difference(each, tmp_path) for each in tried}
    assert {name: off for name, off in found.items() if off > 1e-4} == {}
