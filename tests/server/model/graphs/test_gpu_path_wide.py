"""The GPU path's largest steps on the CPU, as in test_gpu_path: one layer, three heads a group."""

from collections.abc import Iterator

import pytest
from peft import LoraConfig

from loraplex.server.protocol import SamplingParams
from tests.kernels.batches import interpreted
from tests.server.model import fake_flashinfer
from tests.server.model.driver import Stream, generate
from tests.server.model.gpu_pair import Pair, prompt
from tests.server.model.hub_models import make_model

pytestmark = [
    pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning"),
    interpreted,
]
SEVEN = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
ADAPTERS = {
    "odd": LoraConfig(r=5, lora_alpha=5, target_modules=SEVEN),
    "wide": LoraConfig(r=200, lora_alpha=50, target_modules=["q_proj", "o_proj", "up_proj"]),
}
PLAIN = SamplingParams(temperature=0.0)


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    model = make_model(
        "llama3",
        num_hidden_layers=1,
        hidden_size=48,
        intermediate_size=40,
        num_attention_heads=6,
    )
    with pytest.MonkeyPatch.context() as patch:
        folder = tmp_path_factory.mktemp("base")
        found = Pair(model, ADAPTERS, folder, patch, max_running=270, max_step_tokens=1100)
        yield found
        found.close()
    fake_flashinfer.forget()


def outputs(pair: Pair, lengths: list[int], slots: list[int], tokens: int) -> list[list[int]]:
    """As both say; of prompts of these lengths, each of them one step."""
    found = []
    for driver in (pair.gpu, pair.reference):
        streams = [
            Stream(driver, row, prompt(length, row), slot=slot, sampling=PLAIN)
            for row, (length, slot) in enumerate(zip(lengths, slots, strict=True))
        ]
        generate(driver, streams, tokens, 1100)
        for stream in streams:
            stream.free()
        found.append([stream.output for stream in streams])
    assert found[0] == found[1]
    return found[0]


@pytest.mark.exhaustive
def test_hundreds_of_decodes(pair: Pair) -> None:
    """They run in one graph as few do, whatever their adapters."""
    pair.graphs.clear()
    found = outputs(pair, [1] * 264, [row % 3 - 1 for row in range(264)], 1)
    assert pair.graphs == [264]
    assert len({tuple(output) for output in found}) > 3


@pytest.mark.exhaustive
def test_prompts_that_fill_a_step_whose_graph_is_larger(pair: Pair) -> None:
    pair.graphs.clear()
    outputs(pair, [210] * 5, [0, -1, 1, 0, 1], 2)
    assert pair.graphs == [-1050, 5]
