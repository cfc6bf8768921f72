"""LongRoPE: sequences on both sides of the original context, and those that cross it.

The reference for a token is transformers' forward of all tokens before it, which takes the factors
of that length for all positions, as its `generate` does.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from loraplex.server.engine.messages import SequenceEvent, SlabStaged
from loraplex.server.engine.scheduling.scheduler import Scheduler
from loraplex.server.engine.scheduling.scheduler_config import SchedulerConfig
from loraplex.server.model.families.registry import read_model
from loraplex.server.model.ops.rope import inverse_frequencies
from loraplex.server.protocol import GenerateRequest, SamplingParams
from tests.server.model.adapter_zoo import zoo_of
from tests.server.model.driver import Driver
from tests.server.model.families.parity import TOLERANCE, prompt, rounding
from tests.server.model.families.variants import VARIANTS
from tests.server.model.hub_models import (
    VOCAB,
    add_adapter,
    make_model,
    reference_logprobs,
    save_model,
)
from tests.server.model.slabs import pack

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")
SHORT = 24
NAME = "phi3-long"
ADAPTER = "rank24_patterns"


def make_long(**changes: Any) -> Any:
    return make_model(NAME, original_max_position_embeddings=SHORT, **changes)


class Engine:
    """A scheduler that drives a real executor, with one adapter on the device."""

    def __init__(self, folder: Path, max_step_tokens: int) -> None:
        model = make_long()
        self.driver = Driver(save_model(model, folder), max_step_tokens=max_step_tokens)
        self.oracle = add_adapter(model, ADAPTER, zoo_of(VARIANTS[NAME])[ADAPTER], 0)
        self.slab = pack(self.oracle, ADAPTER)
        self.scheduler = Scheduler(self.driver.executor.limits, SchedulerConfig())
        self.events: dict[int, list[SequenceEvent]] = {}
        self.requests: dict[int, GenerateRequest] = {}

    def submit(
        self, ids: list[int], max_tokens: int, adapter: str | None = None, **changes: Any
    ) -> int:
        key = len(self.requests)
        sampling = SamplingParams(
            max_tokens=max_tokens, temperature=0.0, logprobs=VOCAB, ignore_eos=True
        )
        settings = {"adapter": adapter, "accepted_ids": [], "sampling": sampling, **changes}
        self.requests[key] = GenerateRequest(
            request_id=str(key), attempt=1, choice=0, prompt_ids=ids, seed=0, **settings
        )
        self.scheduler.submit(key, self.requests[key], 0.0)
        return key

    def run(self) -> None:
        while self.scheduler.num_unfinished:
            self._load()
            plan = self.scheduler.plan(0.0)
            if plan is not None:
                self.scheduler.commit(plan.step, self.driver.run(plan))
            for event in self.scheduler.take_events():
                self.events.setdefault(event.key, []).append(event)

    def _load(self) -> None:
        wishes, size = self.scheduler.loads.take(), self.driver.config.extent_bytes
        for digest in wishes.needed:
            layout, data = self.slab
            assert digest == layout.digest
            self.driver.arena[: len(data)] = data
            first = (sum(layout.runs[:i]) for i in range(len(layout.runs)))
            self.scheduler.slab_staged(SlabStaged(layout, tuple(first)), 0.0)
            assert len(data) == sum(layout.runs) * size
        for copy in wishes.copies:
            self.driver.executor.start_copy(copy)
        for news in self.driver.executor.poll_copies():
            self.scheduler.copy_news(news, 0.0)

    def check(self, key: int) -> None:
        """Each token's whole distribution."""
        request = self.requests[key]
        adapter = ADAPTER if request.adapter else None
        ids = [*request.prompt_ids, *request.accepted_ids]
        for event in self.events[key]:
            for token_id, found in zip(
                event.event.token_ids, event.event.logprobs or (), strict=True
            ):
                expected = reference_logprobs(self.oracle, adapter, ids)
                tolerance = TOLERANCE + 10 * rounding(self.oracle, adapter, ids, expected)
                got = torch.full_like(expected[-1], torch.nan)
                for token, value in found.top:
                    got[token] = value
                assert (got - expected[-1]).abs().max() < tolerance, len(ids)
                ids.append(token_id)
        assert len(ids) == len(request.prompt_ids) + request.sampling.max_tokens


@pytest.fixture(scope="module", params=[64, 7])
def engine(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Engine]:
    found = Engine(tmp_path_factory.mktemp("phi"), request.param)
    yield found
    found.driver.close()


def test_sequences_on_both_sides_and_across(engine: Engine) -> None:
    lengths = (5, SHORT - 3, SHORT, SHORT + 1, 40)
    adapters = (None, engine.slab[0].digest)
    before = engine.scheduler.stats().preemptions
    keys = [engine.submit(prompt(n, n), 6, adapters[i % 2]) for i, n in enumerate(lengths)]
    engine.run()
    for key in keys:
        engine.check(key)
    assert engine.scheduler.stats().preemptions - before == 2


def test_prefixes_and_resumed_answers(engine: Engine) -> None:
    """Long and short sequences that begin alike, and one that another worker began."""
    ids = prompt(40, 3)
    for length in (20, 40, 20, 30, 22):
        key = engine.submit(ids[:length], 6)
        engine.run()
        engine.check(key)
    for accepted in (3, 5):
        key = engine.submit(ids[:20], 8, accepted_ids=ids[20 : 20 + accepted])
        engine.run()
        engine.check(key)


def test_frequencies_are_those_of_transformers() -> None:
    config = make_long().config
    model = read_model(json.loads(config.to_json_string()))
    rope = model.layers[0].attention.rope
    assert rope is not None
    rotary: Any = make_long().model.rotary_emb
    for length, long in ((SHORT, False), (SHORT + 1, True)):
        rotary(torch.zeros(1), torch.arange(length)[None])
        found = inverse_frequencies(rope, model.layers[0].attention.head_dim, long=long)
        assert torch.equal(found, rotary.inv_freq)
    assert rope.attention_factor == pytest.approx(rotary.attention_scaling)
    assert model.short_context == SHORT
    assert model.within(SHORT).short_context is None


def test_the_two_forms_differ() -> None:
    """Else the tests above would hold without the long factors."""
    ids = prompt(40, 0)
    table = make_long().config.rope_parameters
    same = {**table, "long_factor": table["short_factor"]}
    ours, theirs = (
        reference_logprobs(make_long(rope_parameters=rope), None, ids) for rope in (table, same)
    )
    assert (ours - theirs).abs().max() > 0.05
