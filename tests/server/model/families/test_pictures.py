"""Pictures in prompts, against transformers' model with PEFT: fp32, every logprob within 1e-4."""

from collections.abc import Iterator
from functools import partial
from pathlib import Path

import msgspec
import pytest
import torch

from loraplex.server.protocol import GenerateRequest
from tests.server.model.driver import Driver
from tests.server.model.families.pictured import (
    KINDS,
    PICTURES,
    Pictured,
    make_pictured,
    reference,
    text,
)
from tests.server.model.hub_models import save_model

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")
PARTS: list[list[list[int] | str]] = [
    [text(3, 0), "a", text(4, 1)],
    [text(1, 2), "b", "c", text(2, 3)],
    ["d", text(6, 4), "e", text(1, 5), "b"],
    [text(9, 6)],
    [text(2, 7), "a", text(7, 8), "a", text(3, 9)],
    ["e", text(3, 10)],
]


# Another kind in the short run is nearly as they are.
LONG = (
    *("gemma4_shared", "gemma4_small", "gemma4_unified", "llava_next", "llava_next_siglip"),
    *("llava_pixtral", "smolvlm"),
)
PARAMS = [pytest.param(k, marks=[pytest.mark.exhaustive] * (k in LONG)) for k in KINDS]


@pytest.fixture(scope="module", params=PARAMS)
def served(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Pictured]:
    folder = tmp_path_factory.mktemp("pictured")
    found = Pictured(
        folder, partial(Driver, max_draft=4, snapshot_memory=1 << 20), kind=request.param
    )
    yield found
    found.driver.close()


@pytest.mark.parametrize("step_tokens", [9, 22, 400])
def test_mixed_prompts_and_adapters_at_any_borders(served: Pictured, step_tokens: int) -> None:
    engine = served.engine(max_step_tokens=step_tokens)
    names = [None, "one", "two"]
    requests = [
        served.pictured(parts, adapter=served.digest(names[(i + shift) % 3]), max_tokens=5)
        for shift in range(2)
        for i, parts in enumerate(PARTS)
    ]
    served.assert_answers(engine, requests)


@torch.inference_mode()
def greedy(served: Pictured, request: GenerateRequest, output: list[int]) -> list[int]:
    """What transformers draws where the engine has drawn its output."""
    expected = reference(served.oracle, None, request, [*request.prompt_ids, *output])
    expected[:, list(request.sampling.logit_bias)] = -torch.inf
    places = range(len(request.prompt_ids) - 1, len(expected) - 1)
    return [int(expected[place].argmax()) for place in places]


def test_prefixes_with_the_same_and_with_other_pictures(served: Pictured) -> None:
    engine = served.engine()
    begin, hits, times = text(5, 20), list[int](), 3 if served.has_states else 2
    for name, seed in [(name, seed) for name in "de" for seed in range(times)]:
        request = served.pictured([begin, name, text(9, seed)], prompt_logprobs=None, max_tokens=3)
        key, before = engine.submit(request), engine.hits
        engine.run()
        hits.append(engine.hits - before)
        assert engine.tokens(key) == greedy(served, request, engine.tokens(key))
    first, second = (
        (len(begin) + 2 + len(PICTURES[served.name(name)].ids)) // 4 * 4 for name in "de"
    )
    before = (len(begin) + 1) // 4 * 4
    if served.has_states:  # what has no snapshot yet is computed again, and saved
        assert hits == [0, 0, first, 0, before, second]
    else:
        assert hits == [0, first, before, second]
    assert engine.segments == 2


def test_preempted_sequences_read_their_pictures_again(served: Pictured) -> None:
    limits = served.driver.executor.limits.pictures
    assert limits is not None
    few = msgspec.structs.replace(limits, num_blocks=1)
    engine = served.engine(num_pages=24, pictures=few)
    requests = [
        served.pictured([text(3, i), "ab"[i % 2], text(2, i)], max_tokens=30, prompt_logprobs=None)
        for i in range(4)
    ]
    keys = {engine.submit(request): request for request in requests}
    engine.run()
    assert engine.scheduler.stats().preemptions > 0
    assert engine.segments > 2
    for key, request in keys.items():
        assert engine.tokens(key) == greedy(served, request, engine.tokens(key))
    engine.assert_at_rest()


def test_resumption_and_drafts(served: Pictured) -> None:
    whole = served.pictured([text(4, 30), "e", text(3, 31)], max_tokens=24, drafts="", seed=5)
    engine = served.engine(max_draft=4)
    key = engine.submit(whole)
    engine.run()
    output = engine.tokens(key)
    assert len(output) == 24
    served.assert_right(engine, {key: whole})
    again = engine.submit(msgspec.structs.replace(whole, request_id="again"))
    engine.run()
    assert engine.tokens(again) == output
    assert engine.scheduler.stats().accepted_draft_tokens > 0
    engine = served.engine()
    resumed = msgspec.structs.replace(whole, accepted_ids=output[:9], attempt=2)
    key = engine.submit(resumed)
    engine.run()
    assert engine.tokens(key) == output[9:]
    served.assert_right(engine, {key: resumed})


def test_a_model_without_room_for_pictures_serves_text(tmp_path: Path) -> None:
    model = make_pictured()
    driver = Driver(save_model(model, tmp_path), picture_memory=0)
    assert driver.executor.limits.pictures is None
    assert driver.executor._rows.offsets is None
    driver.close()
