"""The executor computes what transformers and PEFT compute: float32, logprobs within 1e-4."""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import torch
from peft import LoraConfig
from transformers import AutoModelForCausalLM

from loraplex.adapters.manifest import SlabDtype
from tests.grids import sparse
from tests.server.model.adapter_zoo import ZOO, few_of, with_zoo
from tests.server.model.driver import Driver, Stream, generate, step
from tests.server.model.families.parity import (
    GREEDY,
    TOLERANCE,
    Served,
    assert_parity,
    prompt,
    round_adapters,
)
from tests.server.model.families.variants import VARIANTS, rows
from tests.server.model.hub_models import make_model, reference_logprobs, save_model
from tests.server.model.slabs import pack

# PEFT says what it does about fan_in_fan_out and tied weights; that is what we compare with.
pytestmark = [
    pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning"),
    # PEFT compares patterns with modules alone, though they hold for parameters too.
    pytest.mark.filterwarnings("ignore:The following .*_pattern keys:RuntimeWarning"),
]


# Norms over heads and windows; experts; biases and tied tables.
AT_EVERY_CHUNK = ("gemma3", "qwen3-moe", "llama-biases-tied")


@pytest.mark.parametrize("name", VARIANTS)
def test_base_models(name: str, tmp_path: Path) -> None:
    assert_base(name, (1, 5, 64) if name in AT_EVERY_CHUNK else (5,), tmp_path)


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", [name for name in VARIANTS if name not in AT_EVERY_CHUNK])
def test_base_models_by_token_and_whole(name: str, tmp_path: Path) -> None:
    assert_base(name, (1, 64), tmp_path)


def assert_base(name: str, chunks: Sequence[int], folder: Path) -> None:
    model = make_model(name)
    driver = Driver(save_model(model, folder))
    for chunk in chunks:
        streams = [
            Stream(driver, row, prompt(length, length), sampling=GREEDY)
            for row, length in enumerate((1, 17, 40))
        ]
        generate(driver, streams, 5, chunk)
        for stream in streams:
            assert_parity(model, None, stream)
            stream.free()
    driver.close()


def test_windows_by_layer(tmp_path: Path) -> None:
    """Mistral with `layer_types` is what transformers calls Ministral."""
    folder = save_model(make_model("mistral-window"), tmp_path)
    config = json.loads((folder / "config.json").read_text())
    config["layer_types"] = ["full_attention", "sliding_attention", "full_attention"]
    (folder / "config.json").write_text(json.dumps(config))
    model = AutoModelForCausalLM.from_pretrained(folder)
    driver = Driver(folder)
    stream = Stream(driver, 0, prompt(17, 0), sampling=GREEDY)
    generate(driver, [stream], 9, 5)
    assert_parity(model, None, stream)
    driver.close()


def test_sharded_checkpoint(tmp_path: Path) -> None:
    model = make_model("qwen3-biases")
    folder = save_model(model, tmp_path, max_shard_size="100KB")
    assert len(list(folder.glob("*.safetensors"))) > 1
    driver = Driver(folder)
    stream = Stream(driver, 0, prompt(11, 0), sampling=GREEDY)
    generate(driver, [stream], 4, 64)
    assert_parity(model, None, stream)
    driver.close()


ADAPTED = [name for name, variant in VARIANTS.items() if variant.is_adapted]
# What no family has code of its own for is tried with a few.
A_FEW = [
    name if name in AT_EVERY_CHUNK else pytest.param(name, marks=pytest.mark.exhaustive)
    for name in ADAPTED
]
of_every_family = pytest.mark.parametrize("served", rows(ADAPTED), indirect=True, scope="module")
of_a_few = pytest.mark.parametrize("served", A_FEW, indirect=True, scope="module")


@pytest.fixture(scope="module")
def served(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Served]:
    found = Served(request.param, tmp_path_factory.mktemp("base"))
    yield found
    found.driver.close()


@pytest.mark.parametrize("name", rows([name for name in ADAPTED if name not in AT_EVERY_CHUNK]))
def test_adapters_in_one_batch(name: str, tmp_path: Path) -> None:
    """A few adapters of each family, which reach every module, and not every layer."""
    served = Served(name, tmp_path, adapters=few_of(VARIANTS[name]))
    served.assert_together((9, 2, 23), 3, 5, times=1)
    served.assert_adapters_change_the_answer()
    served.driver.close()


@of_a_few
def test_every_adapter_in_one_batch(served: Served) -> None:
    served.assert_together((9, 2, 23, 14), 3, 5, times=1)


@pytest.mark.exhaustive
@of_every_family
@pytest.mark.parametrize("chunk", [3, 64])
def test_every_adapter_in_smaller_chunks_and_whole(served: Served, chunk: int) -> None:
    served.assert_together((9, 2, 23, 14), 5, chunk)


FLOAT8 = (torch.float8_e4m3fn, torch.float8_e5m2)


@pytest.mark.parametrize(("name", "stored"), sparse(["llama3", "qwen2"], FLOAT8))
def test_adapters_stored_in_float8(name: str, stored: torch.dtype, tmp_path: Path) -> None:
    """As PEFT with the stored values in float32, to the same bound as any other adapter."""
    served = Served(name, tmp_path, stored)
    unrounded = with_zoo(make_model(name))
    ids = prompt(9, 1)
    served.assert_together((9, 2, 23), 4, 5)
    for adapter in ZOO:  # to round shows: else this would be no test of it
        off = reference_logprobs(served.oracle, adapter, ids) - reference_logprobs(
            unrounded, adapter, ids
        )
        assert off.abs().max() > 10 * TOLERANCE, adapter
    served.driver.close()


@pytest.mark.parametrize(("stored", "dtype"), sparse(FLOAT8, ["float32", "bfloat16", "float16"]))
def test_float8_is_packed_without_rounding(stored: torch.dtype, dtype: SlabDtype) -> None:
    """Every worker's dtype holds every value of either format."""
    model = with_zoo(make_model("llama3"))
    found = {name: pack(model, name, dtype=dtype, stored=stored) for name in ZOO}
    round_adapters(model, stored)
    assert found == {name: pack(model, name, dtype=dtype) for name in ZOO}


@pytest.mark.exhaustive
def test_magnitudes_of_products_outside_layers(tmp_path: Path) -> None:
    targets = ["fc2", "project_in", "project_out"]
    dora = {"dora": LoraConfig(r=3, lora_alpha=7, target_modules=targets, use_dora=True)}
    served = Served("opt-narrow", tmp_path, adapters=dora)
    served.assert_together((9, 2, 23), 3, 5)
    served.driver.close()


@of_a_few
def test_prefills_between_decodes(served: Served) -> None:
    """Streams start one after another: every step mixes decodes, chunks and adapters."""
    pairs = served.streams((13, 6))
    streams = [stream for _, stream in pairs]
    for arrived in range(1, len(streams) + 1):
        step(served.driver, [(stream, 4) for stream in streams[:arrived]])
    generate(served.driver, streams, 4, 4)
    for adapter, stream in pairs:
        assert_parity(served.oracle, adapter, stream)
        stream.free()


@of_a_few
def test_evicted_and_reloaded_elsewhere(served: Served) -> None:
    """Slots and extents change hands; a running neighbour keeps its own weights. A stream that
    begins again with the tokens accepted so far goes on as the neighbour does."""
    driver = served.driver
    slots = served.slots
    neighbour = Stream(driver, 0, prompt(12, 1), slot=slots["rank1"], sampling=GREEDY)
    generate(driver, [neighbour], 2, 64)
    one, other = "rank3_rslora", "rank24_patterns"
    # The slot of one gets the other's weights and the reverse, in extents not used so far.
    first = served.next_extent
    for adapter, slot in ((other, slots[one]), (one, slots[other])):
        layout, slab = served.slabs[adapter]
        assert driver.load(slot, layout, slab, first).error is None
        first += sum(layout.runs)
    slots[one], slots[other] = slots[other], slots[one]
    streams = [
        Stream(driver, row, prompt(10, row), slot=slots[adapter], sampling=GREEDY)
        for row, adapter in ((1, one), (2, other))
    ]
    resumed = Stream(
        driver,
        3,
        prompt(12, 1),
        slot=slots["rank1"],
        sampling=GREEDY,
        accepted=neighbour.output,
    )
    generate(driver, [neighbour, *streams, resumed], 6, 5)
    for adapter, stream in (("rank1", neighbour), (one, streams[0]), (other, streams[1])):
        assert_parity(served.oracle, adapter, stream)
        stream.free()
    assert_parity(served.oracle, "rank1", resumed, accepted=2)
    assert resumed.output == neighbour.output
    resumed.free()


@of_a_few
def test_adapters_change_the_answer(served: Served) -> None:
    served.assert_adapters_change_the_answer()
