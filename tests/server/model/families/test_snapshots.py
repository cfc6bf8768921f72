"""Prompts that go on from snapshots of states, and sequences that come back, against the oracle."""

from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest
import torch
from peft import PeftModel
from torch import Tensor

from loraplex.server.protocol import BACKGROUND_PRIORITY, GenerateRequest
from tests.server.engine.harness import make_request
from tests.server.model.adapter_zoo import with_zoo, zoo_of
from tests.server.model.driver import Driver
from tests.server.model.engine import Engine
from tests.server.model.families.drafted import with_drafts
from tests.server.model.families.parity import TOLERANCE, assert_parity, prompt, rounding
from tests.server.model.families.variants import VARIANTS
from tests.server.model.hub_models import make_model, reference_logprobs, save_model
from tests.server.model.sharding.lockstep import ShardedDriver
from tests.server.model.slabs import pack

pytestmark = [
    pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore:The following .*_pattern keys:RuntimeWarning"),
]
TWO = ("rank3_rslora", "rank16")
SNAPSHOTS = 1 << 20


class Packed(NamedTuple):
    layout: Any
    slab: bytes


class Tried:
    """A base with two adapters. `made` gives engines of their own on one executor."""

    def __init__(self, folder: Any, row: str = "qwen3.5", shards: int = 1, **changes: Any) -> None:
        base = make_model(row)
        save_model(base, folder)
        zoo = zoo_of(VARIANTS[row])
        self.oracle = with_zoo(base, {name: zoo[name] for name in TWO})
        self.slabs = {name: Packed(*pack(self.oracle, name, shards=shards)) for name in TWO}
        self.names = {packed.layout.digest: name for name, packed in self.slabs.items()}
        changes = {"snapshot_memory": SNAPSHOTS, "max_step_tokens": 24, **changes}
        self.driver = (
            Driver(folder, **changes) if shards == 1 else ShardedDriver(folder, shards, **changes)
        )

    def engine(self, max_draft: int = 0, **less: Any) -> Engine:
        return Engine(self.driver, self.slabs, 2, max_draft, **less)

    def wish(self, tokens: list[int], name: str | None = None, **wish: Any) -> GenerateRequest:
        adapter = None if name is None else self.slabs[name].layout.digest
        wish = {"max_tokens": 6, "ignore_eos": True, "temperature": 0.0, "logprobs": 2, **wish}
        return make_request(tokens, adapter=adapter, **wish)

    def check(self, engine: Engine, key: int, request: GenerateRequest) -> None:
        """The answer is transformers' and PEFT's. adapter_from: must be 0."""
        name = None if request.adapter is None else self.names[request.adapter]
        ids = [*request.prompt_ids, *engine.tokens(key)]
        expected = reference_logprobs(self.oracle, name, ids)
        found = [p for event in engine.events[key] for p in event.logprobs or ()]
        assert len(found) == request.sampling.max_tokens
        rows = expected[len(request.prompt_ids) - 1 : -1]
        wanted = rows[range(len(found)), [each.token_id for each in found]]
        near = TOLERANCE
        off = (wanted - torch.tensor([each.logprob for each in found])).abs().max().item()
        if off >= near:
            near += 10 * rounding(self.oracle, name, ids, expected)
        assert off < near
        assert (wanted > rows.max(1).values - near).all()

    def ask(self, engine: Engine, *requests: GenerateRequest) -> None:
        keys = [engine.submit(request) for request in requests]
        engine.run()
        for key, request in zip(keys, requests, strict=True):
            self.check(engine, key, request)


# Whose single steps transformers computes as prompts: it limits time steps of the latter alone.
OTHERS = ("olmo-hybrid", "lfm2", "granite-h", "falcon-h1")


@pytest.fixture(
    scope="module",
    params=["qwen3.5", *(pytest.param(row, marks=pytest.mark.exhaustive) for row in OTHERS)],
)
def tried(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Tried]:
    found = Tried(tmp_path_factory.mktemp("base"), request.param)
    yield found
    found.driver.close()


def test_prompts_go_on_from_snapshots(tried: Tried) -> None:
    """The base and adapters share a batch, cut at odd places, and within a slice."""
    engine = tried.engine()
    shared = prompt(45, 1)
    names = (None, *TWO)
    tried.ask(engine, *(tried.wish(shared, name) for name in names))
    assert engine.hits == 0
    tried.ask(engine, *(tried.wish(shared, name) for name in names))
    assert engine.hits == 3 * 44
    tails = [prompt(n, n) for n in (1, 7, 30)]
    requests = [
        tried.wish([*shared[:44], *tail], name) for name, tail in zip(names, tails, strict=True)
    ]
    tried.ask(engine, *requests)
    assert engine.hits == 6 * 44


def test_the_state_within_a_slice_is_that_of_its_tokens(tried: Tried) -> None:
    """The second visitor's slices save where the prompts part, in the middle of a slice."""
    engine = tried.engine()
    shared = prompt(19, 2)
    for seed in (3, 4, 5):
        tried.ask(engine, tried.wish([*shared, *prompt(14, seed)], "rank16"))
    saves = [(s.start, s.num_new, s.saves) for plan in engine.plans for s in plan.slices if s.saves]
    assert any(start < saves[0].position < start + n for start, n, saves in saves)
    assert engine.hits == 16


def test_a_sequence_comes_back_to_its_state(tried: Tried) -> None:
    """Its row was another's; its last page was not full."""
    engine = tried.engine(max_rows=1)
    batch = tried.wish(prompt(13, 6), "rank16", max_tokens=12, priority=BACKGROUND_PRIORITY)
    key = engine.submit(batch)
    while len(engine.tokens(key)) < 4:
        engine.cycle()
    tried.ask(engine, tried.wish(prompt(9, 7), "rank3_rslora"))
    tried.check(engine, key, batch)
    assert engine.scheduler.stats().preemptions == 1
    restored = [copy for plan in engine.plans for copy in plan.restores]
    starts = [s.start for plan in engine.plans for s in plan.slices if s.start > 13]
    assert len(restored) == 1
    assert len(starts) == len(set(starts)), "no token is computed twice"


def test_few_pages_and_many_sequences(tried: Tried) -> None:
    """Rows lose their pages and begin again, from snapshots or from their beginnings."""
    engine = tried.engine(num_pages=14)
    requests = [
        tried.wish(prompt(10, seed % 3), name, max_tokens=11)
        for seed, name in enumerate((None, *TWO, None, *TWO))
    ]
    tried.ask(engine, *requests)
    assert engine.scheduler.stats().preemptions > 0


def activated_logprobs(oracle: PeftModel, name: str, prefix: list[int], rest: list[int]) -> Tensor:
    """Log-softmax after each token of `rest`, on which alone the adapter acts."""
    rows = []
    with torch.no_grad():
        with oracle.disable_adapter():
            cache = oracle(input_ids=torch.tensor([prefix]), use_cache=True).past_key_values
        oracle.set_adapter(name)
        for token in rest:
            inputs = {"input_ids": torch.tensor([[token]]), "past_key_values": cache}
            rows.append(oracle(**inputs, use_cache=True).logits[0, -1].float().log_softmax(-1))
    return torch.stack(rows)


def test_an_activated_adapter_goes_on_from_the_bases_state(tried: Tried) -> None:
    """The base's prompt saved it, and so does the adapter's own prompt where the adapter begins."""
    engine = tried.engine()
    for seed, base_first in ((8, True), (9, False)):
        shared, before, rest = prompt(38, seed), engine.hits, [5, seed]
        wish = tried.wish([*shared, *rest], "rank16", adapter_from=38)
        of_base = tried.wish([*shared, *([] if base_first else [1, 2, 3])])
        keys = []
        for request in (of_base, wish) if base_first else (wish, of_base):
            keys.append(engine.submit(request))
            engine.run()
        assert engine.hits - before == 36
        key = keys[base_first]
        answer = engine.tokens(key)
        expected = activated_logprobs(tried.oracle, "rank16", shared, [*rest, *answer[:-1]])
        found = [p for event in engine.events[key] for p in event.logprobs or ()]
        for place, each in enumerate(found, start=1):
            assert each.logprob == pytest.approx(expected[place, each.token_id].item(), abs=1e-4)
            assert expected[place, each.token_id] > expected[place].max() - 1e-4


def test_devices_that_share_the_model_have_parts_of_states(tmp_path: Any) -> None:
    tried = Tried(tmp_path, shards=2, max_draft=4)
    engine = tried.engine()
    shared = prompt(29, 1)
    for seed in (1, 2, 3):
        requests = [tried.wish([*shared, *prompt(5, seed)], name) for name in (None, "rank16")]
        tried.ask(engine, *requests)
    assert engine.hits == 2 * 28
    tried.driver.free_pages.extend(range(tried.driver.executor.limits.num_pages))
    [(_, stream)] = with_drafts(tried.driver, {None: -1})
    assert_parity(tried.oracle, None, stream)
    tried.driver.close()
