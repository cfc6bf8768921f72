"""The GPU path's steps, plans, columns and kernels, on the CPU and compared with the reference."""

from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from peft import LoraConfig

from loraplex.server.protocol import SamplingParams
from tests.grids import beyond
from tests.kernels.batches import interpreted
from tests.server.model import fake_flashinfer
from tests.server.model.driver import EVERY_LOGPROB
from tests.server.model.gpu_pair import TOKENS, Pair, answer, ordinary
from tests.server.model.hub_models import make_model

pytestmark = [
    pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning"),
    interpreted,
]
SIZES: dict[str, Any] = {"num_hidden_layers": 2, "hidden_size": 32, "intermediate_size": 48}
LAYERS = LoraConfig(r=3, lora_alpha=6, target_modules=["q_proj", "v_proj", "o_proj", "down_proj"])
EVERYWHERE = LoraConfig(r=8, lora_alpha=8, target_modules=["gate_proj", "embed_tokens", "lm_head"])
PLAIN = SamplingParams(temperature=0.0)
SCORED = SamplingParams(temperature=0.0, logprobs=EVERY_LOGPROB, prompt_logprobs=1)


BIASED, BIASED_FA3 = ("llama-biases-tied", "fa2"), ("llama-biases-tied", "fa3")
QWEN3 = ("qwen3", "fa3")


def pairs(*always: tuple[str, str]) -> pytest.MarkDecorator:
    """These pairs in an ordinary run, the others with `make test-all`."""
    each = ordinary((BIASED, BIASED_FA3, QWEN3), always)
    return pytest.mark.parametrize("pair", each, indirect=True, scope="module")


@pytest.fixture(scope="module")
def pair(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Pair]:
    with pytest.MonkeyPatch.context() as patch:
        name, backend = request.param
        model = make_model(name, **SIZES)
        adapters = {"layers": LAYERS, "everywhere": EVERYWHERE}
        folder = tmp_path_factory.mktemp("base")
        found = Pair(model, adapters, folder, patch, backend=backend, max_running=6)
        yield found
        found.close()
    fake_flashinfer.forget()


@pairs(BIASED)
@pytest.mark.parametrize("chunk", [1, pytest.param(2, marks=pytest.mark.exhaustive)])
def test_steps_of_prompts_without_prompts(pair: Pair, chunk: int) -> None:
    """A slice of one token is a decode."""
    streams = answer(pair.gpu, [0], SCORED, chunk)
    expected = answer(pair.reference, [0], SCORED, chunk)
    assert [s.output for s in streams] == [s.output for s in expected]


@pytest.mark.parametrize("max_context", [2, 16, 17, 31, 100])
def test_examples_are_prompts_of_which_a_graph_takes_as_many(max_context: int) -> None:
    from loraplex.server.model.graphs.warm_up import prompts_of
    from loraplex.server.model.steps.rows import Rows

    rows = Rows(2, max_context, 16, torch.device("cpu"))
    for tokens in [n for n in range(32, 2049, 32) if n <= 64 * max_context]:
        layout = prompts_of(rows, max_context, tokens)
        assert layout.num_decodes == 0
        assert layout.num_new.sum() == tokens
        assert len(layout.num_new) <= 64
        assert layout.num_new.max() <= max_context


@pairs(BIASED)
@pytest.mark.parametrize("slots", [[-1, -1, -1], [0, -1, 0], [1, 0, -1]])
def test_same_as_the_reference(pair: Pair, slots: list[int]) -> None:
    """Chunks, mixed steps and decodes; with adapters of the head decodes are where prompts are."""
    pair.graphs.clear()
    streams = answer(pair.gpu, slots, SCORED, 4)
    expected = answer(pair.reference, slots, SCORED, 4)
    for ours, theirs in zip(streams, expected, strict=True):
        assert ours.output == theirs.output
        places = [*zip(ours.logprobs, theirs.logprobs, strict=True)]
        places += zip(ours.prompt_logprobs, theirs.prompt_logprobs, strict=True)
        for found, wanted in places:
            assert found.token_id == wanted.token_id
            assert found.logprob == pytest.approx(wanted.logprob, abs=1e-3)
    assert (len(slots) in pair.graphs) == (1 not in slots)
    assert (-len(slots) in pair.graphs) == (1 in slots)
    assert any(taken < -len(slots) for taken in pair.graphs)


@pairs(BIASED)
@pytest.mark.parametrize("slots", [[-1, -1], [0, 0, -1, 0, -1]])
def test_greedy_ids_stay_in_the_graph(pair: Pair, slots: list[int]) -> None:
    pair.graphs.clear()
    outputs = [s.output for s in answer(pair.gpu, slots, PLAIN, 64)]
    assert pair.graphs[1:] == [len(slots)] * (TOKENS - 1)
    assert pair.graphs[0] == -sum(2 + 3 * row for row in range(len(slots)))
    assert outputs == [s.output for s in answer(pair.reference, slots, PLAIN, 64)]


RANDOM = [
    SamplingParams(temperature=0.7, top_k=30, repetition_penalty=1.2),
    SamplingParams(top_p=0.9, logprobs=2),
    SamplingParams(temperature=1.5, typical_p=0.8),
    SamplingParams(min_p=0.1, logit_bias={5: 3.0}, logprobs=0, processed_logprobs=True),
    SamplingParams(temperature=0.0, presence_penalty=0.5),
    SamplingParams(),
]


@pairs(BIASED)
@pytest.mark.parametrize("each", beyond(1, [RANDOM, RANDOM[1:2]]))
def test_random_rows_draw_what_the_reference_draws(pair: Pair, each: list[SamplingParams]) -> None:
    """In steps of decodes alone behind the graph, and in steps with prompts."""
    slots = [(0, -1)[row % 2] for row in range(len(each))]
    found, expected = (answer(driver, slots, each, 4) for driver in (pair.gpu, pair.reference))
    assert [s.output for s in found] == [s.output for s in expected]
    for ours, theirs in zip(found, expected, strict=True):
        for a, b in zip(ours.logprobs, theirs.logprobs, strict=True):
            assert a.token_id == b.token_id
            assert a.logprob == pytest.approx(b.logprob, abs=1e-3)


@pairs(BIASED)
@pytest.mark.parametrize("rows", beyond(1, [4, 6]))
def test_masked_rows_draw_what_the_reference_draws(pair: Pair, rows: int) -> None:
    """Behind the graph that has chosen for them already, and in steps with prompts."""

    def few(tokens: list[int]) -> list[int]:
        return [3 + (tokens[-1] * 7 + 5 * i) % 90 for i in range(4)]

    slots = [(0, -1)[row % 2] for row in range(rows)]
    each = [PLAIN, PLAIN, RANDOM[1], RANDOM[0], RANDOM[2], RANDOM[2]][:rows]
    pair.graphs.clear()
    found, expected = (
        answer(driver, slots, each, 6, few, tokens=4) for driver in (pair.gpu, pair.reference)
    )
    assert [s.output for s in found] == [s.output for s in expected]
    assert rows in pair.graphs
    free = answer(pair.reference, slots, each, 6, tokens=4)
    same = [ours.output == theirs.output for ours, theirs in zip(found, free, strict=True)]
    assert same == [True, False] * (rows // 2)


@pairs(BIASED)
def test_warm_steps_reach_embedding_and_head(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """No graph has these products' LoRA: its kernels must be compiled before somebody needs it, for
    as many rows as may want logits. A step may have more tokens than one context."""
    from loraplex.server.model.graphs import warm_up
    from loraplex.server.model.ops.cuda import lora_linear

    module: Any = lora_linear
    decoder, rows = pair.gpu.executor._decoder, pair.gpu.executor._rows
    ops: Any = decoder.ops
    expand, tokens = module.expand, defaultdict[int, set[int]](set)

    def noted(y: Any, widths: Any, table: Any, site: int, *rest: Any, **options: Any) -> None:
        tokens[site].add(len(y))
        expand(y, widths, table, site, *rest, **options)

    monkeypatch.setattr(module, "expand", noted)
    with torch.inference_mode():
        warm_up.run_step(decoder, ops, rows, 8, max_context=3, adapters=True)
    assert tokens[decoder.sites.embed.number] == {8}
    assert tokens[decoder.sites.lm_head.number] == {1, 8}


@pairs(BIASED)
def test_a_failed_product_leaves_nothing_running_beside(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What its LoRA reads is given to the next step, which must come after it."""
    ops: Any = pair.gpu.executor._decoder.ops
    waits: list[object] = []
    monkeypatch.setattr(fake_flashinfer.Stream, "wait_stream", lambda _, other: waits.append(other))

    def fail(*_: Any, **__: Any) -> None:
        raise RuntimeError("out of memory")

    monkeypatch.setattr(ops.products, "linear", fail)
    with pytest.raises(RuntimeError, match="out of memory"):
        answer(pair.gpu, [0], PLAIN, 64)
    assert waits[-1] is ops._lora_linear._side
