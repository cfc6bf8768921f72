"""A model that several devices share computes what transformers and PEFT compute."""

import json
from functools import partial
from pathlib import Path

import pytest

from loraplex.server.config import ConfigError
from loraplex.server.model.checkpoint.checkpoint import read_config
from loraplex.server.model.devices.sharding import shard_counts, sharded
from loraplex.server.model.families.registry import read_model
from tests.grids import beyond
from tests.server.model.adapter_zoo import few_of, zoo_of
from tests.server.model.driver import Stream, generate
from tests.server.model.families.parity import GREEDY, Served, assert_parity, prompt
from tests.server.model.families.variants import VARIANTS
from tests.server.model.hub_models import make_model, save_model
from tests.server.model.sharding.lockstep import ShardedDriver

# PEFT says what it does about fan_in_fan_out and tied weights; that is what we compare with.
pytestmark = [
    pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning"),
    # PEFT compares patterns with modules alone, though they hold for parameters too.
    pytest.mark.filterwarnings("ignore:The following .*_pattern keys:RuntimeWarning"),
]


# One of each cut of matrices, heads, experts, states, tables and biases. Other rows differ in their
# rotations, windows and names, which no device shares.
CUT = (
    *("qwen3.5", "qwen3.5-even", "qwen3.5-moe", "qwen3-next", "olmo-hybrid", "nemotron-h"),
    *("gemma4", "gemma4-values", "gemma4-moe", "gemma4-inputs", "gemma4-wide-mlp", "gemma3-images"),
    *("lfm2", "lfm2-biases", "falcon-h1", "falcon-h1-gated", "granite-hybrid", "gemma2", "gemma3"),
    *("gpt-oss", "mixtral", "qwen3-moe", "qwen3-moe-dense-layer", "llama3", "llama-biases-tied"),
    *("qwen2", "qwen3-biases", "olmo2", "olmo2-biases", "phi", "phi3", "glm4", "ernie", "exaone"),
)


@pytest.mark.parametrize("chunk", beyond(1, [5, 64]))
@pytest.mark.parametrize("shards", beyond(1, [2, 4]))
@pytest.mark.parametrize("name", beyond(len(CUT), sorted(VARIANTS, key=lambda n: n not in CUT)))
def test_base_models(name: str, shards: int, chunk: int, tmp_path: Path) -> None:
    model = make_model(name)
    folder = save_model(model, tmp_path)
    if shards not in shard_counts(read_config(folder)):
        with pytest.raises(ConfigError, match=f"--tp {shards}"):
            sharded(read_config(folder), shards)
        return
    driver = ShardedDriver(folder, shards)
    streams = [
        Stream(driver, row, prompt(length, length), sampling=GREEDY)
        for row, length in enumerate((1, 40))
    ]
    generate(driver, streams, 5, chunk)
    for stream in streams:
        assert_parity(model, None, stream)
        stream.free()
    driver.close()


ADAPTED = [name for name, variant in VARIANTS.items() if variant.is_adapted]
# Biases and tied tables; norms of all heads; matrices of several modules; a part of text.
BY_TWO = ["llama-biases-tied", "gpt-oss", "olmo2", "phi3-long", "gemma3-images"]
# More devices than KV heads; experts.
BY_FOUR = ["qwen2", "qwen3-moe"]


@pytest.mark.parametrize(
    ("name", "shards", "whole"),
    [
        *((name, 2, False) for name in BY_TWO),
        *((name, 4, name == "qwen2") for name in BY_FOUR),
        *beyond(0, [(name, 2, True) for name in ADAPTED]),
        *beyond(0, [(name, 4, True) for name in ADAPTED if name != "qwen2"]),
    ],
)
def test_adapters_in_one_batch(name: str, shards: int, whole: bool, tmp_path: Path) -> None:
    """whole: with every adapter of the zoo, and not only a few."""
    folder = tmp_path / "base"
    if shards not in shard_counts(read_model(json.loads(make_model(name).config.to_json_string()))):
        return  # test_base_models shows that it is refused
    zoo = (zoo_of if whole else few_of)(VARIANTS[name])
    served = Served(name, folder, None, partial(ShardedDriver, shards=shards), shards, zoo)
    served.assert_together((9, 2, 23, 14), 3, 64)
    served.driver.close()
