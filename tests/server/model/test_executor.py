"""The executor's promises to the scheduler: limits, rows, copies, isolation, invariance."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from peft import LoraConfig

from loraplex.adapters.manifest import SlabLayout
from loraplex.server.config import ConfigError
from loraplex.server.engine.executor import Executor
from loraplex.server.engine.plan import StepPlan
from loraplex.server.model.checkpoint.checkpoint import read_config
from loraplex.server.model.executor import TorchExecutor
from loraplex.server.model.ops.memory import executor_limits, page_bytes
from loraplex.server.model.sampling.results import StepTicket
from loraplex.server.model.spec.model_spec import Activation
from loraplex.server.protocol import SamplingParams, TokenLogprob
from tests.server.model.driver import EXTENT, Driver, Stream, engine_config, generate, step
from tests.server.model.hub_models import VOCAB, add_adapter, make_model, save_model
from tests.server.model.slabs import pack

GREEDY = SamplingParams(temperature=0.0)
RANDOM = SamplingParams(temperature=1.1, top_p=0.95, repetition_penalty=1.1)
pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")
LORA = LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj", "down_proj"])


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(make_model("llama3"), tmp_path_factory.mktemp("base"))


@pytest.fixture(scope="module")
def slab() -> tuple[SlabLayout, bytes]:
    return pack(add_adapter(make_model("llama3"), "one", LORA, 1), "one")


@pytest.fixture
def driver(folder: Path) -> Iterator[Driver]:
    found = Driver(folder)
    yield found
    found.close()


def prompt(length: int, seed: int) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, VOCAB, (length,), generator=generator).tolist()


def answer(driver: Driver, tokens: int = 8, chunk: int = 64, **stream: Any) -> list[int]:
    """One request alone on the driver."""
    found = Stream(driver, 0, stream.pop("ids"), **stream)
    generate(driver, [found], tokens, chunk)
    found.free()
    return found.output


def test_implements_the_protocol(driver: Driver) -> None:
    executor: Executor[StepTicket] = driver.executor
    limits = executor.limits
    model = read_config(Path(driver.config.model_path))
    assert limits.num_pages == driver.config.kv_memory // page_bytes(model, driver.config)
    assert page_bytes(model, driver.config) == 2 * 3 * 4 * 2 * 16 * 4
    assert limits.arena_extents == driver.config.adapter_memory // EXTENT
    assert (limits.max_context, limits.vocab_size, limits.eos_token_ids) == (256, VOCAB, (2,))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"kv_memory": 100}, "--kv-memory is 100"),
        ({"adapter_memory": 100}, "--adapter-memory is 100"),
        ({"max_context": 257}, "--max-context is 257"),
        ({"max_context": 200, "kv_memory": 8 * 3072}, "--kv-memory"),
    ],
)
def test_too_little_memory_names_the_option(
    folder: Path, changes: dict[str, Any], words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        TorchExecutor(engine_config(folder, **changes), memoryview(b""))


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (
            torch.OutOfMemoryError("CUDA out of memory. Tried 2 GiB"),
            r"Tried 2 GiB\. Raise --gpu-mem",
        ),
        (RuntimeError("Triton Error [CUDA]: out of memory"), "lower --adapter-memory"),
        (RuntimeError("CUBLAS_STATUS_ALLOC_FAILED when calling"), "lower --adapter-memory"),
        (RuntimeError("CUDA error: an illegal memory access"), None),
    ],
)
def test_memory_that_runs_out_at_start_is_told_with_advice(
    folder: Path, error: RuntimeError, told: str | None
) -> None:
    def load(*_: Any) -> Any:
        raise error

    with pytest.raises(ConfigError if told else RuntimeError, match=told or str(error)[:10]):
        TorchExecutor(engine_config(folder), memoryview(b""), weights=load)


@pytest.mark.parametrize(
    ("prompt_logprobs", "last"), [(None, ([], [], [2])), (1, ([16], [16], [16]))]
)
def test_only_what_gives_logits_goes_through_the_end_of_the_last_layer(
    driver: Driver,
    monkeypatch: pytest.MonkeyPatch,
    prompt_logprobs: int | None,
    last: tuple[list[int], ...],
) -> None:
    """Prompts of 40 and 8 tokens: the chunk that ends the first comes with the whole second."""
    decoder, rows = driver.executor._decoder, list[int]()
    gated: Any = decoder.ops.gated

    def noted(gate_up: torch.Tensor, activation: Activation, factor: float) -> Any:
        rows.append(len(gate_up))
        return gated(gate_up, activation, factor)

    monkeypatch.setattr(decoder.ops, "gated", noted)
    sampling = SamplingParams(temperature=0.0, prompt_logprobs=prompt_logprobs)
    long, short = (
        Stream(driver, row, prompt(length, row), sampling=sampling)
        for row, length in ((0, 40), (1, 8))
    )
    others = [16] * (len(decoder.weights.layers) - 1)
    for work, width in zip(
        ([(long, 16)], [(long, 16)], [(long, 8), (short, 8)]), last, strict=True
    ):
        rows.clear()
        step(driver, work)
        assert rows == others + width


def test_hundreds_of_special_rows_are_drawn_as_few_are(folder: Path) -> None:
    """Their logits are computed with some rows at a time."""
    each = [
        SamplingParams(typical_p=0.9, logprobs=2),
        SamplingParams(repetition_penalty=1.3, logprobs=1),
        SamplingParams(top_p=0.9),
    ]

    def first_tokens(at_once: int) -> list[tuple[list[int], list[TokenLogprob]]]:
        driver = Driver(folder, max_running=150)
        streams = [
            Stream(driver, row, prompt(3, row), seed=row, sampling=each[row % 3])
            for row in range(150)
        ]
        for first in range(0, 150, at_once):
            step(driver, [(stream, 3) for stream in streams[first : first + at_once]])
        driver.close()
        return [(stream.output, stream.logprobs) for stream in streams]

    for many, few in zip(first_tokens(150), first_tokens(10), strict=True):
        assert many[0] == few[0]
        assert [found.token_id for found in many[1]] == [found.token_id for found in few[1]]
        for ours, theirs in zip(many[1], few[1], strict=True):
            assert ours.logprob == pytest.approx(theirs.logprob, abs=1e-5)


def test_context_is_cut_to_memory_when_not_asked_for(folder: Path) -> None:
    limits = executor_limits(read_config(folder), engine_config(folder, kv_memory=10 * 3072))
    assert (limits.num_pages, limits.max_context) == (10, 40)


def test_no_windows_where_contexts_are_no_longer(tmp_path: Path) -> None:
    """So that short contexts of a model with windows need no reference attention on a GPU."""
    folder = save_model(make_model("mistral-window"), tmp_path)
    for max_context, windows in ((7, {None}), (8, {7})):
        driver = Driver(folder, max_context=max_context)
        assert set(driver.executor._decoder.spec.windows) == windows
        driver.close()


def test_empty_plan(driver: Driver) -> None:
    assert driver.run(StepPlan(0, [], [], [], [])) == []


def test_results_come_in_the_order_of_the_plan(driver: Driver) -> None:
    """Decodes and chunks are reordered inside; each slice gets its own answer."""
    prompts = [prompt(n, n) for n in (9, 1, 14, 2, 1)]
    expected = [answer(driver, ids=ids) for ids in prompts]
    streams = [Stream(driver, row, ids, sampling=GREEDY) for row, ids in enumerate(prompts)]
    generate(driver, streams[:2], 3, 64)
    generate(driver, [streams[i] for i in (3, 0, 4, 1, 2)], 8, 5)
    assert [s.output for s in streams] == expected


@pytest.mark.parametrize("sampling", [GREEDY, RANDOM])
def test_thirty_two_streams_equal_each_alone(
    driver: Driver, slab: tuple[SlabLayout, bytes], sampling: SamplingParams
) -> None:
    assert driver.load(3, *slab, first=0).error is None
    requests: list[dict[str, Any]] = [
        {"ids": prompt(1 + row * 3 % 37, row), "slot": 3 if row % 3 else -1, "seed": row}
        for row in range(32)
    ]
    alone = [answer(driver, sampling=sampling, **r) for r in requests]
    streams = [
        Stream(driver, row, r.pop("ids"), sampling=sampling, **r) for row, r in enumerate(requests)
    ]
    generate(driver, streams, 8, 7)
    assert [s.output for s in streams] == alone


@pytest.mark.parametrize("sampling", [GREEDY, RANDOM])
@pytest.mark.parametrize("accepted", [1, 4, 7])
def test_resumed_elsewhere_goes_on_with_the_same_tokens(
    folder: Path, driver: Driver, sampling: SamplingParams, accepted: int
) -> None:
    ids = prompt(13, 3)
    whole = answer(driver, ids=ids, seed=5, sampling=sampling)
    other = Driver(folder, page_size=8, max_running=3)
    resumed = answer(other, ids=ids, seed=5, sampling=sampling, accepted=whole[:accepted], chunk=6)
    other.close()
    assert resumed == whole


def test_preempted_row_starts_again(driver: Driver) -> None:
    """Its pages and row go to another; later it takes a row with all tokens known so far."""
    ids = prompt(10, 4)
    expected = answer(driver, ids=ids, seed=9, sampling=RANDOM)
    first = Stream(driver, 1, ids, seed=9, sampling=RANDOM)
    generate(driver, [first], 4, 64)
    first.free()
    answer(driver, ids=prompt(30, 5))
    again = Stream(driver, 2, ids, seed=9, sampling=RANDOM, accepted=first.output)
    generate(driver, [again], 8, 4)
    assert again.output == expected


def test_inputs_given_or_taken_from_the_device_agree(driver: Driver) -> None:
    ids = prompt(6, 6)
    expected = answer(driver, ids=ids, tokens=3)
    stream = Stream(driver, 0, ids, sampling=GREEDY)
    step(driver, [(stream, 6)])
    carried = stream.slice(1)
    given = stream.slice(1, inline=True)
    assert (carried.token_ids, given.token_ids) == ([], stream.output)
    grants = stream.grant(1)
    for piece in (carried, given):
        [result] = driver.run(StepPlan(1, [piece], [], grants, []))
        assert result.token_ids == (expected[1],)


def test_prompt_logprobs_across_chunks(driver: Driver) -> None:
    sampling = SamplingParams(temperature=0.0, prompt_logprobs=1)
    ids = prompt(150, 7)  # more than one piece of logits
    found = []
    for row, chunk in enumerate((150, 64, 11, 1)):
        stream = Stream(driver, row, ids, sampling=sampling)
        generate(driver, [stream], 1, chunk)
        assert [p.token_id for p in stream.prompt_logprobs] == ids[1:]
        for p in stream.prompt_logprobs:
            assert (p.rank == 1) == (p.logprob == p.top[0][1])
        found.append([p.logprob for p in stream.prompt_logprobs])
        stream.free()
    for other in found[1:]:
        assert other == pytest.approx(found[0], abs=1e-4)


def test_end_of_sequence_is_suppressed(driver: Driver) -> None:
    bias = SamplingParams(temperature=0.0, logit_bias={2: 99.0, 9: 98.0})
    assert answer(driver, 3, ids=[5, 6], sampling=bias) == [2, 2, 2]
    assert answer(driver, 3, ids=[5, 6], sampling=bias, suppressed_until=2) == [9, 9, 2]


def test_ends_of_sequences_in_one_step_are_suppressed_apart(driver: Driver) -> None:
    """Each by its own least number of tokens, and in its own row alone."""
    bias = SamplingParams(temperature=0.0, logit_bias={2: 400.0, 7: 300.0, 8: 200.0, 9: 100.0})
    streams = [
        Stream(
            *(driver, row, [5, 6]),
            sampling=msgspec.structs.replace(bias, end_token_ids=ends),
            suppressed_until=until,
        )
        for row, (ends, until) in enumerate([((), 0), ((7,), 3), ((7, 8), 2), ((), 2)])
    ]
    generate(driver, streams, 4, 8)
    found = [stream.output for stream in streams]
    assert found == [[2, 2, 2, 2], [8, 8, 8, 2], [9, 9, 2, 2], [7, 7, 2, 2]]
    for stream in streams:
        stream.free()


def test_broken_adapter_fails_alone_and_leaves_nothing_behind(
    driver: Driver, slab: tuple[SlabLayout, bytes]
) -> None:
    """Its NaN reach its own pages only; whoever gets those pages next is not hurt."""
    layout, data = slab
    broken = torch.full((len(data) // 4,), float("inf")).numpy().tobytes()
    assert driver.load(0, layout, broken, 0).error is None
    ids = [prompt(9, 1), prompt(11, 2)]
    expected = [answer(driver, ids=i) for i in ids]
    bad = Stream(driver, 2, prompt(19, 3), slot=0, sampling=GREEDY)
    neighbour = Stream(driver, 1, ids[0], sampling=GREEDY)
    generate(driver, [neighbour, bad], 8, 5)
    assert (bad.failed, bad.output, neighbour.failed) == (True, [], False)
    assert neighbour.output == expected[0]
    used = set(bad.pages[0].pages)
    bad.free()
    after = Stream(driver, 2, ids[1], sampling=GREEDY)
    generate(driver, [after], 8, 4)
    assert used & set(after.pages[0].pages)
    assert after.output == expected[1]


def test_padding_never_follows_a_former_sequence_s_pages(
    driver: Driver, slab: tuple[SlabLayout, bytes]
) -> None:
    """A row's table still names older pages; a longer neighbour pads up to them."""
    layout, data = slab
    broken = torch.full((len(data) // 4,), float("inf")).numpy().tobytes()
    assert driver.load(0, layout, broken, 0).error is None
    short, long = prompt(9, 1), prompt(13, 2)  # 3 and 4 pages
    expected = [answer(driver, 3, ids=ids) for ids in (short, long)]
    bad = Stream(driver, 5, prompt(16, 3), slot=0, sampling=GREEDY)
    generate(driver, [bad], 1, 64)
    streams = [Stream(driver, row, ids, sampling=GREEDY) for row, ids in ((5, short), (6, long))]
    generate(driver, streams, 3, 64)
    assert not set(bad.pages[0].pages) & {page for s in streams for page in s.pages[0].pages}
    assert [s.output for s in streams] == expected


def test_half_precision_agrees_roughly(folder: Path, driver: Driver) -> None:
    sampling = SamplingParams(temperature=0.0, logprobs=0, prompt_logprobs=0)
    exact = Stream(driver, 0, prompt(20, 8), sampling=sampling)
    generate(driver, [exact], 1, 64)
    for dtype in ("bfloat16", "float16"):
        half = Driver(folder, dtype=dtype)
        stream = Stream(half, 0, prompt(20, 8), sampling=sampling)
        generate(half, [stream], 1, 64)
        half.close()
        for a, b in zip(stream.prompt_logprobs, exact.prompt_logprobs, strict=True):
            assert a.logprob == pytest.approx(b.logprob, abs=0.5)


def test_the_summary_tells_what_serves_and_where_the_start_went(driver: Driver) -> None:
    operations, start = driver.executor.summary[-2:]
    assert operations.startswith("operations: plain torch")
    phases = r"reading weights \d+\.\d s, making caches \d+\.\d s, host memory \d+\.\d s"
    assert re.fullmatch(rf"start: \d+\.\d s \({phases}\)", start)
