"""Vectors and scores of prompts are those of transformers and PEFT: float32, within 1e-4."""

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from peft import LoraConfig, PeftModel
from transformers import AutoModel, AutoModelForSequenceClassification, PreTrainedModel

from loraplex.server.model.checkpoint.checkpoint import read_config
from loraplex.server.protocol import Pooling, SamplingParams, VectorParams
from tests.grids import sparse
from tests.server.model.adapter_zoo import ZOO, with_zoo
from tests.server.model.driver import Driver, Stream, generate, step
from tests.server.model.families.parity import TOLERANCE, prompt
from tests.server.model.families.variants import SEVEN
from tests.server.model.hub_models import VOCAB, add_adapter, make_model, save_model
from tests.server.model.sharding.lockstep import ShardedDriver
from tests.server.model.slabs import pack

pytestmark = pytest.mark.filterwarnings(
    "ignore::UserWarning", "ignore::FutureWarning", "ignore:The following:RuntimeWarning"
)
# One of each kind of norm, window, rotation, head and MLP; text parts of larger models have
# another way to their hidden states in transformers.
FAMILIES = (
    *("llama3", "mistral-window", "gemma2", "gemma3", "qwen2-window", "qwen3", "granite"),
    *(
        "phi3-long",
        "olmo3",
        "mixtral",
        "gpt-oss",
        "glm4",
        "smollm3",
        "exaone",
        "helium",
        "gpt2",
        "falcon",
    ),
)
# Those that PEFT can add to a decoder alone: it finds no layers' numbers in one.
_WITHOUT_HEAD = ("rank1", "rank3_rslora", "rank16", "fan_in_fan_out", "embed_only")
WISHES: tuple[Pooling, ...] = ("last", "mean")
LENGTHS = (1, 2, 9, 31)


def decoder_of(model: Any) -> Any:
    return model.get_decoder()


def hidden_of(model: torch.nn.Module, ids: Sequence[int]) -> torch.Tensor:
    """Of a decoder without a head: float64 `[tokens, hidden]`."""
    with torch.inference_mode():
        states: torch.Tensor = model(input_ids=torch.tensor([list(ids)])).last_hidden_state
    return states[0].double()


def pooled(states: torch.Tensor, pooling: Pooling) -> np.ndarray:
    values: np.ndarray = (states[-1] if pooling == "last" else states.mean(0)).numpy()
    return values


def readers(driver: Driver, slots: Sequence[int] = (-1,)) -> list[Stream]:
    """A stream for each pooling, length and slot, on rows of its own."""
    wishes = [(slot, n, pooling) for slot in slots for n in LENGTHS for pooling in WISHES]
    return [
        Stream(driver, row, prompt(n, row), slot=slot).read_for(VectorParams(pooling=pooling))
        for row, (slot, n, pooling) in enumerate(wishes)
    ]


def assert_vectors(streams: Sequence[Stream], states_of: Callable[[Stream], torch.Tensor]) -> None:
    for stream in streams:
        assert stream.wish is not None
        assert stream.vector is not None
        expected = pooled(states_of(stream), stream.wish.pooling)
        # Float32 is as far from itself: hidden states are larger than 1.
        tolerance = TOLERANCE * max(1.0, float(np.abs(expected).max()))
        assert np.abs(stream.vector - expected).max() < tolerance, stream.wish


@pytest.mark.parametrize(("name", "chunk"), sparse(FAMILIES, [3, 64]))
def test_vectors_beside_answers(name: str, chunk: int, tmp_path: Path) -> None:
    """In one batch with a chat, whose tokens stay what they are alone."""
    model = make_model(name)
    driver = Driver(save_model(model, tmp_path))
    alone = Stream(driver, 40, prompt(12, 40))
    generate(driver, [alone], 6, 64)
    beside = Stream(driver, 41, prompt(12, 40))
    streams = readers(driver)
    generate(driver, [beside, *streams], 6, chunk)
    assert beside.output == alone.output
    body: Any = decoder_of(model)
    assert_vectors(streams, lambda stream: hidden_of(body, stream.tokens))
    driver.close()


@pytest.mark.parametrize("name", FAMILIES)
def test_a_decoder_without_a_head(name: str, tmp_path: Path) -> None:
    """Saved alone: tensors lack `model.`, and `config.json` names another class."""
    model = decoder_of(make_model(name))
    driver = Driver(save_model(model, tmp_path))
    assert not read_config(tmp_path).writes
    assert not driver.executor.limits.writes
    streams = readers(driver)
    generate(driver, streams, 0, 7)
    loaded = AutoModel.from_pretrained(tmp_path, dtype="float32")
    assert_vectors(streams, lambda stream: hidden_of(loaded, stream.tokens))
    driver.close()


@pytest.mark.parametrize(
    ("name", "shards"),
    [("llama3", 1), ("llama3", 2), ("mistral-window", 1), ("gpt-oss", 1), ("gemma3", 1)],
)
def test_tokens_that_see_all(name: str, shards: int, tmp_path: Path) -> None:
    """Prompts of one batch, each with an adapter or without, none cut."""
    both_ways = {"use_bidirectional_attention": True}  # as EmbeddingGemma
    base = decoder_of(make_model(name, **both_ways if name == "gemma3" else {"is_causal": False}))
    folder = save_model(base, tmp_path)
    driver = Driver(folder) if shards == 1 else ShardedDriver(folder, shards)
    zoo = {each: ZOO[each](SEVEN[:4]) for each in ("rank1", "rank16")}
    peft, first = with_zoo(base, zoo), 0
    for slot, adapter in enumerate(zoo):
        layout, slab = pack(peft, adapter, shards=shards)
        assert driver.load(slot, layout, slab, first).error is None
        first += sum(layout.runs)
    streams = readers(driver, (0, -1, 1))
    generate(driver, streams, 0, 64)
    names = {-1: None, **dict(enumerate(zoo))}
    for stream in streams:
        assert_vectors([stream], partial(states_of, peft, names[stream.slot]))
    driver.close()


def states_of(peft: PeftModel, adapter: str | None, stream: Stream) -> torch.Tensor:
    ids = stream.tokens
    body: Any = peft.get_base_model()
    decoder = body.get_decoder() if hasattr(body, "lm_head") else body
    if adapter is None:
        with peft.disable_adapter():
            return hidden_of(decoder, ids)
    peft.set_adapter(adapter)
    return hidden_of(decoder, ids)


@pytest.mark.parametrize("has_head", [True, False])
def test_adapters_change_the_vector(has_head: bool, tmp_path: Path) -> None:
    base: Any = make_model("llama3")
    base = base if has_head else base.get_decoder()
    driver = Driver(save_model(base, tmp_path))
    zoo = {name: make(SEVEN) for name, make in ZOO.items() if has_head or name in _WITHOUT_HEAD}
    peft, first = with_zoo(base, zoo), 0
    for slot, name in enumerate(zoo):
        layout, slab = pack(peft, name)
        assert driver.load(slot, layout, slab, first).error is None
        first += sum(layout.runs)
    for slot, adapter in enumerate([*zoo, None]):
        where = -1 if adapter is None else slot
        streams = readers(driver, (where,))
        generate(driver, streams, 0, 11)
        assert_vectors(streams, partial(states_of, peft, adapter))
        for stream in streams:
            stream.free()
    driver.close()


def test_logits_of_some_tokens(tmp_path: Path) -> None:
    """Of the head, which an adapter may change, too."""
    base = make_model("gemma2")
    driver = Driver(save_model(base, tmp_path))
    peft = add_adapter(base, "one", LoraConfig(r=4, target_modules=["q_proj", "lm_head"]), 1)
    layout, slab = pack(peft, "one")
    assert driver.load(0, layout, slab, 0).error is None
    ids, tokens = prompt(9, 3), (5, 17, 3)
    streams = [
        Stream(driver, row, ids, slot=slot).read_for(VectorParams("logits", token_ids=wanted))
        for row, (slot, wanted) in enumerate([(0, tokens), (-1, tokens), (0, (8,))])
    ]
    generate(driver, streams, 0, 4)
    for stream, adapter in zip(streams, ("one", None, "one"), strict=True):
        assert stream.wish is not None
        assert stream.vector is not None
        with torch.inference_mode():
            if adapter is None:
                with peft.disable_adapter():
                    logits = peft(input_ids=torch.tensor([ids])).logits[0, -1]
            else:
                logits = peft(input_ids=torch.tensor([ids])).logits[0, -1]
        expected = logits[list(stream.wish.token_ids)].numpy()
        assert np.abs(stream.vector - expected).max() < TOLERANCE
    driver.close()


CLASSIFIERS = (
    *("llama3", "gemma", "gemma2", "mistral", "qwen2", "qwen3", "phi3", "mixtral", "glm"),
    *("gpt2", "opt", "opt-narrow", "gptj", "falcon", "gpt-neo", "gpt-bigcode"),
)


@pytest.mark.parametrize("name", CLASSIFIERS)
def test_classifiers(name: str, tmp_path: Path) -> None:
    config = make_model(name).config
    config.num_labels, config.pad_token_id = 5, None
    torch.manual_seed(1)
    make: Any = AutoModelForSequenceClassification
    model: PreTrainedModel = make.from_config(config)
    model.train(False)
    driver = Driver(save_model(model, tmp_path))
    assert driver.executor.limits.num_classes == 5
    streams = [
        Stream(driver, row, prompt(n, row)).read_for(VectorParams("scores"))
        for row, n in enumerate(LENGTHS)
    ]
    generate(driver, streams, 0, 8)
    for stream in streams:
        with torch.inference_mode():
            expected = model(input_ids=torch.tensor([stream.tokens])).logits[0].numpy()
        assert stream.vector is not None
        assert np.abs(stream.vector - expected).max() < TOLERANCE
    driver.close()


def test_numbers_that_are_not_finite_fail_alone(tmp_path: Path) -> None:
    model = make_model("llama3")
    with torch.no_grad():
        embed: Any = model.get_input_embeddings()
        embed.weight[VOCAB - 1] = float("nan")
    driver = Driver(save_model(model, tmp_path))
    last, mean_of = VectorParams(), VectorParams(pooling="mean")
    good = Stream(driver, 0, [5, 6, 7]).read_for(last)
    bad = Stream(driver, 1, [5, VOCAB - 1, 7]).read_for(last)
    mean = Stream(driver, 2, [VOCAB - 1, 5, 7]).read_for(mean_of)
    step(driver, [(good, 8), (bad, 8), (mean, 8)])
    assert [s.failed for s in (good, bad, mean)] == [False, True, True]
    assert good.vector is not None
    assert np.isfinite(good.vector).all()
    driver.close()


def test_a_row_that_another_prompt_had_begun_has_its_own_mean(tmp_path: Path) -> None:
    model = make_model("llama3")
    driver = Driver(save_model(model, tmp_path))
    begun = Stream(driver, 0, prompt(12, 1)).read_for(VectorParams(pooling="mean"))
    step(driver, [(begun, 5)])
    begun.free()
    other = Stream(driver, 0, prompt(12, 2)).read_for(VectorParams(pooling="mean"))
    generate(driver, [other], 0, 5)
    body: Any = decoder_of(model)
    assert_vectors([other], lambda stream: hidden_of(body, stream.tokens))
    driver.close()


def test_answers_alone_compute_no_vectors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    driver = Driver(save_model(make_model("llama3"), tmp_path))

    def never(*_: Any) -> Any:
        raise AssertionError("nobody asked for a vector")

    monkeypatch.setattr(driver.executor._pooler, "_scores_of", never)
    monkeypatch.setattr(driver.executor._pooler, "_means", lambda slices, _: list(slices))
    stream = Stream(driver, 0, prompt(9, 0), sampling=SamplingParams(temperature=0.0))
    generate(driver, [stream], 3, 4)
    assert len(stream.output) == 3
    driver.close()
