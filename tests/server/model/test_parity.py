"""The executor computes what transformers and PEFT compute: float32, logprobs within 1e-4."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM, PreTrainedModel

from adapters.manifest import SlabDtype
from server.protocol import SamplingParams
from tests.server.model.adapter_zoo import ZOO, with_zoo
from tests.server.model.driver import EVERY_LOGPROB, Driver, Stream, generate, step
from tests.server.model.hub_models import (
    VARIANTS,
    VOCAB,
    make_model,
    reference_logprobs,
    save_model,
)
from tests.server.model.slabs import pack

TOLERANCE = 1e-4
GREEDY = SamplingParams(temperature=0.0, logprobs=EVERY_LOGPROB, prompt_logprobs=2)
# PEFT says what it does about fan_in_fan_out and tied weights; that is what we compare with.
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")


def prompt(length: int, seed: int) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, VOCAB, (length,), generator=generator).tolist()


def rounding(
    model: PreTrainedModel | PeftModel, adapter: str | None, ids: list[int], found: torch.Tensor
) -> float:
    """How far float32 alone takes the oracle from itself: some weights and prompts are such that
    any two ways of adding up differ by more than others do."""
    exact = reference_logprobs(model.double(), adapter, ids)
    model.float()  # as it was, to the bit
    return float((found - exact).abs().max())


def assert_parity(model: PreTrainedModel | PeftModel, adapter: str | None, stream: Stream) -> None:
    """Prompt logprobs and the whole distribution at every decoded place."""
    expected = reference_logprobs(model, adapter, stream.tokens)
    tolerance = TOLERANCE + 10 * rounding(model, adapter, stream.tokens, expected)
    assert len(stream.prompt_logprobs) == stream.prompt_len - 1
    for place, found in enumerate(stream.prompt_logprobs):
        assert found.token_id == stream.tokens[place + 1]
        assert found.logprob == pytest.approx(expected[place, found.token_id].item(), abs=tolerance)
        value = expected[place, found.token_id].item()
        least, most = (
            1 + int((expected[place] > value + shift).sum()) for shift in (tolerance, -tolerance)
        )
        assert found.rank is not None
        assert least <= found.rank <= most
        best = expected[place].topk(2)
        assert [v for _, v in found.top] == pytest.approx(best.values.tolist(), abs=tolerance)
    assert len(stream.logprobs) == len(stream.output)
    for i, found in enumerate(stream.logprobs):
        row = expected[stream.prompt_len - 1 + i]
        got = torch.full((VOCAB,), float("nan"))
        got[[token for token, _ in found.top]] = torch.tensor([value for _, value in found.top])
        assert (got - row).abs().max().item() < tolerance
        assert found.token_id == stream.output[i]
        assert row[found.token_id].item() > row.max().item() - tolerance


@pytest.mark.parametrize("name", VARIANTS)
def test_base_models(name: str, tmp_path: Path) -> None:
    model = make_model(name)
    driver = Driver(save_model(model, tmp_path))
    for chunk in (1, 5, 64):
        streams = [
            Stream(driver, row, prompt(length, length), sampling=GREEDY)
            for row, length in enumerate((1, 4, 17, 40))
        ]
        generate(driver, streams, 9, chunk)
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


class Served:
    """A base with every adapter of the zoo on the device, and the oracle beside it.

    stored: what the adapters' files hold; PEFT then has the values that are stored, in float32.
    """

    def __init__(self, name: str, folder: Path, stored: torch.dtype | None = None) -> None:
        base = make_model(name)
        self.driver = Driver(save_model(base, folder))
        self.oracle = with_zoo(base)
        self.slabs = {adapter: pack(self.oracle, adapter, stored=stored) for adapter in ZOO}
        if stored is not None:
            round_adapters(self.oracle, stored)
        self.slots: dict[str | None, int] = {None: -1}
        first = 0
        for slot, (adapter, (layout, slab)) in enumerate(self.slabs.items()):
            assert self.driver.load(slot, layout, slab, first).error is None
            self.slots[adapter] = slot
            first += sum(layout.runs)
        self.next_extent = first

    def streams(self, lengths: tuple[int, ...]) -> list[tuple[str | None, Stream]]:
        names = [*self.slots, *self.slots]
        return [
            (
                name,
                Stream(
                    self.driver,
                    row,
                    prompt(lengths[row % len(lengths)], row),
                    slot=self.slots[name],
                    sampling=GREEDY,
                ),
            )
            for row, name in enumerate(names)
        ]


def round_adapters(model: PeftModel, dtype: torch.dtype) -> None:
    """Every LoRA weight becomes the nearest value of this dtype."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.copy_(parameter.to(dtype).to(parameter.dtype))


# One of each family, tied and untied, with and without biases and q/k norm.
ADAPTED = ("llama3", "llama-biases-tied", "mistral-window", "qwen2", "qwen3")


@pytest.fixture(scope="module", params=ADAPTED)
def served(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Served]:
    found = Served(request.param, tmp_path_factory.mktemp("base"))
    yield found
    found.driver.close()


@pytest.mark.parametrize("chunk", [3, 64])
def test_every_adapter_in_one_batch(served: Served, chunk: int) -> None:
    pairs = served.streams((9, 2, 23, 14))
    generate(served.driver, [stream for _, stream in pairs], 5, chunk)
    for adapter, stream in pairs:
        assert_parity(served.oracle, adapter, stream)
        stream.free()


FLOAT8 = (torch.float8_e4m3fn, torch.float8_e5m2)


@pytest.mark.parametrize("stored", FLOAT8, ids=str)
@pytest.mark.parametrize("name", ["llama3", "qwen2"])
def test_adapters_stored_in_float8(name: str, stored: torch.dtype, tmp_path: Path) -> None:
    """As PEFT with the stored values in float32, to the same bound as any other adapter."""
    served = Served(name, tmp_path, stored)
    unrounded = with_zoo(make_model(name))
    ids = prompt(9, 1)
    pairs = served.streams((9, 2, 23))
    generate(served.driver, [stream for _, stream in pairs], 4, 5)
    for adapter, stream in pairs:
        assert_parity(served.oracle, adapter, stream)
        stream.free()
    for adapter in ZOO:  # to round shows: else this would be no test of it
        off = reference_logprobs(served.oracle, adapter, ids) - reference_logprobs(
            unrounded, adapter, ids
        )
        assert off.abs().max() > 10 * TOLERANCE, adapter
    served.driver.close()


@pytest.mark.parametrize("stored", FLOAT8, ids=str)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_float8_is_packed_without_rounding(stored: torch.dtype, dtype: SlabDtype) -> None:
    """Every worker's dtype holds every value of either format."""
    model = with_zoo(make_model("llama3"))
    found = {name: pack(model, name, dtype=dtype, stored=stored) for name in ZOO}
    round_adapters(model, stored)
    assert found == {name: pack(model, name, dtype=dtype) for name in ZOO}


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


def test_evicted_and_reloaded_elsewhere(served: Served) -> None:
    """Slots and extents change hands; a running neighbour keeps its own weights."""
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
    generate(driver, [neighbour, *streams], 6, 64)
    for adapter, stream in (("rank1", neighbour), (one, streams[0]), (other, streams[1])):
        assert_parity(served.oracle, adapter, stream)
        stream.free()


def test_adapters_change_the_answer(served: Served) -> None:
    """Guards the tests above: an adapter that did nothing would agree with nothing."""
    ids = prompt(12, 5)
    base = reference_logprobs(served.oracle, None, ids)
    for adapter in ZOO:
        assert (reference_logprobs(served.oracle, adapter, ids) - base).abs().max() > 0.05
