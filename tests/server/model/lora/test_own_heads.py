"""Score heads that adapters bring are PEFT's: float32, scores within 1e-4 of transformers."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from peft import LoraConfig, PeftModel
from transformers import AutoModelForSequenceClassification, AutoModelForTokenClassification

from loraplex.adapters.manifest import SlabLayout
from loraplex.server.protocol import VectorParams
from tests.server.model.driver import Driver, Stream, generate
from tests.server.model.families.parity import GREEDY, TOLERANCE, prompt
from tests.server.model.hub_models import add_adapter, make_model, save_model
from tests.server.model.slabs import pack

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")
FAMILIES = ("llama3", "gemma2", "qwen3")
OF_BASE = 4
FEW = ["q_proj", "down_proj"]
# Labels of each adapter's own head; None: it has none.
ON_WRITER: dict[str, int | None] = {"three": 3, "one": 1, "other": 3, "many": 70, "plain": None}
ON_CLASSIFIER: dict[str, int | None] = {"first": OF_BASE, "second": OF_BASE, "plain": None}
SCORES = VectorParams("scores")


class Headed(NamedTuple):
    """oracle: as loaded from what PEFT has saved."""

    oracle: PeftModel
    layout: SlabLayout
    slab: bytes


class Heads(NamedTuple):
    driver: Driver
    base: Any
    adapters: dict[str, Headed]
    is_classifier: bool


def classifier(folder: Path, labels: int) -> Any:
    torch.manual_seed(labels)
    make: Any = AutoModelForSequenceClassification
    model = make.from_pretrained(folder, num_labels=labels, dtype="float32")
    model.config.pad_token_id = None
    model.train(False)
    return model


def saved(
    folder: Path, base: Path, name: str, labels: int | None, seed: int, shards: int = 1
) -> Headed:
    own: dict[str, Any] = {} if labels is None else {"task_type": "SEQ_CLS"}
    config = LoraConfig(r=4, lora_alpha=6, target_modules=FEW, **own)
    made = add_adapter(classifier(base, labels or OF_BASE), name, config, seed)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter_name, parameter in made.named_parameters():
            if "score.modules_to_save" in parameter_name:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.3)
    made.save_pretrained(str(folder), selected_adapters=[name], save_embedding_layers=False)
    fresh = classifier(base, labels or OF_BASE)
    oracle = PeftModel.from_pretrained(fresh, str(folder / name), adapter_name=name)
    oracle.train(False)
    return Headed(oracle, *pack(oracle, name, shards=shards))


@pytest.fixture(scope="module", params=[(f, c) for f in FAMILIES for c in (False, True)], ids=str)
def heads(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Heads]:
    """Of a base that writes, and of one with a score head."""
    family, is_classifier = request.param
    folder = tmp_path_factory.mktemp("heads")
    base = save_model(make_model(family), folder / "base")
    if is_classifier:
        save_model(classifier(base, OF_BASE), folder / "classes")
        base = folder / "classes"
    listed = ON_CLASSIFIER if is_classifier else ON_WRITER
    adapters = {
        name: saved(folder, base, name, labels, 3 + i)
        for i, (name, labels) in enumerate(listed.items())
    }
    driver = Driver(base)
    yield Heads(driver, classifier(base, OF_BASE), adapters, is_classifier)
    driver.close()


@torch.inference_mode()
def expected(heads: Heads, name: str | None, ids: list[int]) -> np.ndarray:
    model = heads.base if name is None else heads.adapters[name].oracle
    scores: np.ndarray = model(input_ids=torch.tensor([ids])).logits[0].numpy()
    return scores


def assert_scores(heads: Heads, name: str | None, stream: Stream) -> None:
    wanted = expected(heads, name, stream.tokens)
    assert stream.vector is not None
    assert stream.vector.shape == wanted.shape
    assert np.abs(stream.vector - wanted).max() < TOLERANCE, name


def that_score(heads: Heads) -> list[str | None]:
    """None: the base."""
    with_head = [name for name, adapter in heads.adapters.items() if adapter.layout.head]
    return [*heads.adapters, None] if heads.is_classifier else [*with_head]


@pytest.mark.parametrize(("chunk", "shift"), [(64, 0), (3, 2)])
def test_in_one_batch_and_after_a_reload(heads: Heads, chunk: int, shift: int) -> None:
    """Beside answers of a base that writes; slots and extents change hands."""
    slots = heads.driver.load_all(heads.adapters, shift, first=7 * shift)
    writers = [] if heads.is_classifier else [None, "plain"]
    alone = [
        Stream(heads.driver, 40, prompt(9, 1), slot=slots[name], sampling=GREEDY)
        for name in writers
    ]
    for stream in alone:
        generate(heads.driver, [stream], 4, 64)
        stream.free()
    names = that_score(heads) * 2
    streams = [
        Stream(heads.driver, row, prompt((9, 2, 14)[row % 3], row), slot=slots[name]).read_for(
            SCORES
        )
        for row, name in enumerate(names)
    ]
    beside = [
        Stream(heads.driver, 40 + i, prompt(9, 1), slot=slots[name], sampling=GREEDY)
        for i, name in enumerate(writers)
    ]
    generate(heads.driver, [*streams, *beside], 4, chunk)
    for name, stream in zip(names, streams, strict=True):
        assert_scores(heads, name, stream)
    assert [stream.output for stream in beside] == [stream.output for stream in alone]
    for stream in (*streams, *beside):
        stream.free()


def test_alone(heads: Heads) -> None:
    slots = heads.driver.load_all(heads.adapters, 0, first=0)
    for name in that_score(heads):
        stream = Stream(heads.driver, 0, prompt(11, 2), slot=slots[name]).read_for(SCORES)
        generate(heads.driver, [stream], 0, 4)
        assert_scores(heads, name, stream)
        stream.free()


def test_without_any_head_a_sequence_fails_alone(heads: Heads) -> None:
    if heads.is_classifier:
        assert heads.driver.executor.limits.num_classes == OF_BASE
        return
    slots = heads.driver.load_all(heads.adapters, 0, first=0)
    streams = [
        Stream(heads.driver, row, prompt(5, 1), slot=slots[name]).read_for(SCORES)
        for row, name in enumerate(("plain", "three"))
    ]
    generate(heads.driver, streams, 0, 8)
    assert [stream.failed for stream in streams] == [True, False]
    assert_scores(heads, "three", streams[1])
    for stream in streams:
        stream.free()


@torch.inference_mode()
@pytest.mark.parametrize(("family", "chunk"), [("llama3", 64), ("qwen3", 3)])
def test_scores_of_each_token(family: str, chunk: int, tmp_path: Path) -> None:
    """As `LlamaForTokenClassification` and its kin have them, of prompts in any slices."""
    base, kind = save_model(make_model(family), tmp_path / "base"), AutoModelForTokenClassification
    made: Any = kind.from_pretrained(base, num_labels=5, dtype="float32")
    config = LoraConfig(r=4, target_modules=FEW, task_type="TOKEN_CLS")
    oracle: Any = add_adapter(made, "one", config, 3)
    for name, parameter in oracle.named_parameters():
        if "score.modules_to_save" in name:
            parameter.add_(torch.linspace(-0.5, 0.5, parameter.numel()).view_as(parameter))
    driver = Driver(base)
    slots = driver.load_all({"one": Headed(oracle, *pack(oracle, "one"))}, 0, first=0)
    streams = [
        Stream(driver, row, prompt(length, 5), slot=slots["one"]).read_for(
            VectorParams("scores", "all")
        )
        for row, length in enumerate((9, 2, 14, 14))
    ]
    generate(driver, streams, 0, chunk)
    for stream in streams:
        wanted = oracle(input_ids=torch.tensor([stream.tokens])).logits[0].flatten().numpy()
        assert stream.vector is not None
        assert np.abs(stream.vector - wanted).max() < TOLERANCE
    driver.close()


def test_heads_differ(heads: Heads) -> None:
    """Guards the tests above."""
    ids = prompt(11, 2)
    first, second = ("first", "second") if heads.is_classifier else ("three", "other")
    assert np.abs(expected(heads, first, ids) - expected(heads, second, ids)).max() > 0.01
    for name, adapter in heads.adapters.items():
        assert (adapter.layout.head is None) is (name == "plain")
        found = expected(heads, name, ids)
        with torch.no_grad():
            own = [p for n, p in adapter.oracle.named_parameters() if "score.modules_to_save" in n]
        assert bool(own) is (name != "plain")
        assert np.isfinite(found).all()
