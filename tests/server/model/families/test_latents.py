"""Attention to latents: bytes of the cache, prefixes, drafts, and what is refused."""

from pathlib import Path

import pytest
from peft import LoraConfig

from loraplex.adapters.errors import AdapterError
from loraplex.launcher.known_models import served_families
from loraplex.server.config import ConfigError
from loraplex.server.model.devices.sharding import sharded
from loraplex.server.model.families.registry import read_model
from loraplex.server.model.ops.kernel_limits import unsupported
from loraplex.server.model.ops.memory import page_token_bytes
from tests.server.model.adapter_zoo import few_of
from tests.server.model.driver import Driver
from tests.server.model.families.drafted import with_drafts
from tests.server.model.families.parity import Served, assert_parity, prompt
from tests.server.model.families.test_snapshots import TWO, Tried
from tests.server.model.families.variants import VARIANTS
from tests.server.model.hub_models import add_adapter, make_model, save_model
from tests.server.model.slabs import pack

pytestmark = [
    pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore:The following .*_pattern keys:RuntimeWarning"),
]


@pytest.mark.parametrize(
    ("name", "numbers"),
    [
        ("deepseek_v2", 27 * (512 + 64)),
        ("deepseek_v3", 61 * (512 + 64)),
        ("glm4_moe_lite", 47 * (512 + 64)),
        ("kimi_k2", 61 * (512 + 64)),
        ("minicpm3", 62 * (256 + 32)),
        ("mistral4", 36 * (256 + 64)),
    ],
)
def test_a_token_keeps_one_row_for_all_heads(name: str, numbers: int) -> None:
    model = read_model(served_families()[name].config)
    assert page_token_bytes(model, "bfloat16", "auto") == 2 * numbers
    assert page_token_bytes(sharded(model, 2), "bfloat16", "auto") == 2 * numbers
    assert unsupported(model, "bfloat16", (9, 0)) is None


def test_latents_in_eight_bits_are_refused(tmp_path: Path) -> None:
    save_model(make_model("youtu"), tmp_path)
    with pytest.raises(ConfigError, match="--kv-dtype int8: the model keeps latents"):
        Driver(tmp_path, kv_dtype="int8")


def test_odd_latents_and_fewer_keys_are_refused() -> None:
    config = served_families()["deepseek_v2"].config
    with pytest.raises(ValueError, match=r"num_key_value_heads must be .*; kv_lora_rank must be e"):
        read_model({**config, "kv_lora_rank": 511, "num_key_value_heads": 4})


def test_activated_adapters_of_the_absorbed_product_are_refused() -> None:
    config = {"target_modules": ["kv_b_proj"], "alora_invocation_tokens": [5, 6]}
    model = add_adapter(make_model("youtu"), "one", LoraConfig(r=2, **config), 1)
    with pytest.raises(AdapterError, match="alora_invocation_tokens with kv_b_proj targeted"):
        pack(model, "one")


@pytest.mark.exhaustive
def test_prompts_go_on_from_cached_pages(tmp_path: Path) -> None:
    tried = Tried(tmp_path, "deepseek-v3")
    engine, shared = tried.engine(), prompt(45, 1)
    for tail in (0, 7):
        ids = [*shared, *prompt(tail, tail)]
        tried.ask(engine, *(tried.wish(ids, name) for name in (None, *TWO)))
    assert engine.hits > 0
    tried.driver.close()


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", ["deepseek-v3", "minicpm3"])
def test_drafts_change_no_answer(name: str, tmp_path: Path) -> None:
    served = Served(name, tmp_path, adapters=few_of(VARIANTS[name]))
    for adapter, stream in with_drafts(served.driver, served.slots):
        assert_parity(served.oracle, adapter, stream)
    served.driver.close()
