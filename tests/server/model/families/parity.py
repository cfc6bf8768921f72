"""How parity with transformers and PEFT is measured: float32, logprobs within 1e-4."""

from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, PeftModel
from transformers import PreTrainedModel

from loraplex.server.protocol import SamplingParams
from tests.server.model.adapter_zoo import with_zoo, zoo_of
from tests.server.model.driver import EVERY_LOGPROB, Driver, Stream, by_token, generate
from tests.server.model.families.variants import VARIANTS
from tests.server.model.hub_models import VOCAB, make_model, reference_logprobs, save_model
from tests.server.model.slabs import pack

TOLERANCE = 1e-4
_NEVER = -1e4
LISTED = (60, 3, 7)
GREEDY = SamplingParams(
    temperature=0.0, logprobs=EVERY_LOGPROB, prompt_logprobs=2, logprob_token_ids=LISTED
)


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


def assert_parity(
    model: PreTrainedModel | PeftModel, adapter: str | None, stream: Stream, accepted: int = 0
) -> None:
    """Prompt logprobs and the whole distribution at every place decoded here.

    accepted: tokens of output that the stream began with.
    """
    expected = reference_logprobs(model, adapter, stream.tokens)
    try:
        _assert_near(expected, stream, accepted, TOLERANCE)
    except AssertionError:
        wider = TOLERANCE + 10 * rounding(model, adapter, stream.tokens, expected)
        _assert_near(expected, stream, accepted, wider)


def _assert_near(expected: torch.Tensor, stream: Stream, accepted: int, tolerance: float) -> None:
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
        listed = expected[place, list(LISTED)].tolist()
        assert found.listed == pytest.approx(listed, abs=tolerance)
    assert len(stream.logprobs) == len(stream.output) - accepted
    for i, found in enumerate(stream.logprobs, accepted):
        row = expected[stream.prompt_len - 1 + i]
        got = by_token(found, max(VOCAB, len(found.top)))
        assert (got[: len(row)] - row).abs().max().item() < tolerance
        assert (got[len(row) :] < _NEVER).all()  # tokens that the oracle does not have
        assert found.listed == pytest.approx(row[list(LISTED)].tolist(), abs=tolerance)
        assert found.token_id == stream.output[i]
        assert row[found.token_id].item() > row.max().item() - tolerance


class Served:
    """A base with every adapter of the zoo on the device, and the oracle beside it.

    stored: what the adapters' files hold; PEFT then has the values that are stored, in float32.
    make_driver: of the base's folder. shards: devices of the driver.
    adapters: others than those of the zoo.
    """

    def __init__(
        self,
        name: str,
        folder: Path,
        stored: torch.dtype | None = None,
        make_driver: Callable[[Path], Driver] = Driver,
        shards: int = 1,
        adapters: Mapping[str, LoraConfig] | None = None,
    ) -> None:
        base = make_model(name)
        self.driver = make_driver(save_model(base, folder))
        self.adapters = zoo_of(VARIANTS[name]) if adapters is None else adapters
        self.oracle = with_zoo(base, self.adapters)
        self.slabs = {
            each: pack(self.oracle, each, stored=stored, shards=shards) for each in self.adapters
        }
        if stored is not None:
            round_adapters(self.oracle, stored)
        self.slots: dict[str | None, int] = {None: -1}
        first = 0
        for slot, (adapter, (layout, slab)) in enumerate(self.slabs.items()):
            assert self.driver.load(slot, layout, slab, first).error is None
            self.slots[adapter] = slot
            first += sum(layout.runs)
        self.next_extent = first

    def streams(self, lengths: tuple[int, ...], times: int = 2) -> list[tuple[str | None, Stream]]:
        names = [*self.slots] * times
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

    def assert_together(
        self, lengths: tuple[int, ...], count: int, chunk: int, times: int = 2
    ) -> None:
        """Each adapter and the base so often in one batch, for `count` tokens, as the oracle."""
        pairs = self.streams(lengths, times)
        generate(self.driver, [stream for _, stream in pairs], count, chunk)
        for adapter, stream in pairs:
            assert_parity(self.oracle, adapter, stream)
            stream.free()

    def assert_adapters_change_the_answer(self) -> None:
        """Guards the others: an adapter that did nothing would agree with nothing."""
        ids = prompt(12, 5)
        base = reference_logprobs(self.oracle, None, ids)
        for adapter in self.adapters:
            found = reference_logprobs(self.oracle, adapter, ids)
            assert (found - base).abs().max() > 0.05, adapter

    def assert_alone(self) -> None:
        """One after the other, as the oracle."""
        for adapter, slot in self.slots.items():
            stream = Stream(self.driver, 0, prompt(11, 2), slot=slot, sampling=GREEDY)
            generate(self.driver, [stream], 4, 4)
            assert_parity(self.oracle, adapter, stream)
            stream.free()


def round_adapters(model: PeftModel, dtype: torch.dtype) -> None:
    """Every LoRA weight becomes the nearest value of this dtype."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.copy_(parameter.to(dtype).to(parameter.dtype))


def assert_parity_with(
    base: PreTrainedModel, adapters: Mapping[str, LoraConfig], driver: Driver
) -> None:
    """The base and each adapter in one batch; the driver is closed."""
    oracle, first = with_zoo(base, adapters), 0
    for slot, name in enumerate(adapters):
        layout, slab = pack(oracle, name)
        assert driver.load(slot, layout, slab, first).error is None
        first += sum(layout.runs)
    streams = [
        Stream(driver, row, prompt(3 + 7 * row, row), slot=row - 1, sampling=GREEDY)
        for row in range(1 + len(adapters))
    ]
    generate(driver, streams, 4, 5)
    for adapter, stream in zip((None, *adapters), streams, strict=True):
        assert_parity(oracle, adapter, stream)
    driver.close()
