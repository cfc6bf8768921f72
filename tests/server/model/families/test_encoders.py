"""Encoders compute what transformers and PEFT compute: float32, within 1e-4."""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from peft import LoraConfig, PeftModel
from transformers import (
    AutoModel,
    AutoModelForMaskedLM,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    PreTrainedModel,
)

from loraplex.server.protocol import Pooling, VectorParams
from tests.server.model.driver import Driver, Stream, generate
from tests.server.model.families.encoders import ENCODERS
from tests.server.model.families.parity import TOLERANCE
from tests.server.model.hub_models import add_adapter, save_model
from tests.server.model.slabs import pack

pytestmark = pytest.mark.filterwarnings("ignore")
LENGTHS = (1, 7, 33)
POOLINGS: tuple[Pooling, ...] = ("first", "mean", "max")
A_FEW = [
    name if name in ("bert", "roberta") else pytest.param(name, marks=pytest.mark.exhaustive)
    for name in ENCODERS
]
of_each = pytest.mark.parametrize("name", ENCODERS)
of_a_few = pytest.mark.parametrize("name", A_FEW)


def random(kind: Any, name: str, seed: int = 0, **settings: Any) -> PreTrainedModel:
    """Random biases and norms, too. kind: of transformers' automatic classes."""
    torch.manual_seed(seed)
    model: PreTrainedModel = kind.from_config(ENCODERS[name].make(**settings), dtype="float32")
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            if "norm" in parameter_name.lower() or "bias" in parameter_name:
                parameter.add_(torch.randn_like(parameter) * 0.3)
    model.train(False)
    return model


def text(length: int, seed: int) -> list[int]:
    """Tokens of which none is padding."""
    found: list[int] = torch.randint(2, 97, (length,), generator=_seeded(seed)).tolist()
    return found


def _seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def load_all(driver: Driver, peft: PeftModel, names: Iterable[str]) -> dict[str | None, int]:
    first, slots = 0, dict[str | None, int]({None: -1})
    for slot, name in enumerate(names):
        layout, slab = pack(peft, name)
        assert driver.load(slot, layout, slab, first).error is None
        slots[name], first = slot, first + sum(layout.runs)
    return slots


def read(
    driver: Driver, slots: Iterable[int], wishes: Sequence[VectorParams]
) -> list[tuple[Stream, VectorParams]]:
    """Texts of all lengths, slots and wishes, in one step."""
    streams: list[Stream] = []
    for slot in slots:
        for length in LENGTHS:
            for wish in wishes:
                ids = text(length, len(streams))
                streams.append(Stream(driver, len(streams), ids, slot=slot).read_for(wish))
    generate(driver, streams, 0, 64)
    return list(zip(streams, [*wishes] * (len(streams) // len(wishes)), strict=True))


@torch.inference_mode()
def outputs(peft: PeftModel, adapter: str | None, ids: list[int], **inputs: Any) -> Any:
    given = {"input_ids": torch.tensor([ids]), **inputs}
    if adapter is None:
        with peft.disable_adapter():
            return peft(**given)
    peft.set_adapter(adapter)
    return peft(**given)


def assert_near(stream: Stream, expected: torch.Tensor) -> None:
    assert stream.vector is not None
    wanted = expected.flatten().double().numpy()
    bound = TOLERANCE * max(1.0, float(np.abs(wanted).max()))
    assert np.abs(stream.vector - wanted).max() < bound, (stream.slot, stream.wish)


def pooled(states: torch.Tensor, pooling: Pooling) -> torch.Tensor:
    match pooling:
        case "first":
            return states[0]
        case "last":
            return states[-1]
        case "mean":
            return states.double().mean(0)
        case _:
            return states.amax(0)


@of_each
def test_vectors_with_four_adapters_in_one_batch(name: str, tmp_path: Path) -> None:
    row, base = ENCODERS[name], random(AutoModel, name)
    driver = Driver(save_model(base, tmp_path))
    peft: Any = base
    configs = {
        "every": LoraConfig(r=16, target_modules=all_of(name)),  # PEFT wants this one first
        "few": LoraConfig(r=4, target_modules=list(row.few)),
        "wide": LoraConfig(r=3, target_modules=list(row.dense), use_rslora=True),
        "dora": LoraConfig(r=8, target_modules=list(row.few), use_dora=True),
    }
    for seed, (adapter, config) in enumerate(configs.items()):
        peft = add_adapter(peft, adapter, config, seed)
    slots = load_all(driver, peft, configs)
    names = {slot: adapter for adapter, slot in slots.items()}
    wishes = [VectorParams(pooling=pooling) for pooling in POOLINGS[:: 1 if name == "bert" else 2]]
    for stream, wish in read(driver, slots.values(), wishes):
        states = outputs(peft, names[stream.slot], stream.tokens).last_hidden_state[0]
        assert_near(stream, pooled(states, wish.pooling))
    driver.close()


def all_of(name: str) -> Any:
    """Targets of all matrices. LoRA of ELECTRA's projection is not served. What PEFT saves whole of
    one adapter it cannot wrap for another, as `pre_classifier`."""
    named = name in ("electra-narrow", "distilbert")
    return list(ENCODERS[name].dense) if named else "all-linear"


def heads_of(name: str) -> dict[str, LoraConfig]:
    """Adapters with heads of their own."""
    row, task = ENCODERS[name], {"task_type": "SEQ_CLS"}
    return {
        "own": LoraConfig(r=4, target_modules=list(row.few), **task),
        "every": LoraConfig(r=8, target_modules=all_of(name), **task),
        "whole": LoraConfig(
            r=2, target_modules=list(row.few), modules_to_save=list(row.head), **task
        ),
    }


def with_heads(base: Any, name: str, *adapters: str) -> PeftModel:
    """Add adapters with heads of their own."""
    configs = heads_of(name)
    peft: Any = base
    for seed, adapter in enumerate(adapters):
        peft = add_adapter(peft, adapter, configs[adapter], seed)
    return with_noise(peft)


def with_noise(peft: PeftModel) -> PeftModel:
    """Change the heads of adapters, which begin as the base's."""
    with torch.no_grad():
        for parameter_name, parameter in peft.named_parameters():
            if "modules_to_save" in parameter_name:
                parameter.add_(torch.randn(parameter.shape, generator=_seeded(7)) * 0.2)
    return peft


def scores_of(name: str) -> VectorParams:
    return VectorParams("scores", "mean" if name.endswith("mean") else "first")


@of_each
def test_classes_by_heads_of_base_and_adapters(name: str, tmp_path: Path) -> None:
    base = random(AutoModelForSequenceClassification, name, num_labels=3)
    driver = Driver(save_model(base, tmp_path))
    peft = with_heads(base, name, "every", "own")
    slots = load_all(driver, peft, ["every", "own"])
    names = {slot: adapter for adapter, slot in slots.items()}
    for stream, _ in read(driver, slots.values(), [scores_of(name)]):
        assert_near(stream, outputs(peft, names[stream.slot], stream.tokens).logits[0])
    driver.close()


@of_a_few
def test_a_head_of_an_adapter_on_a_base_without(name: str, tmp_path: Path) -> None:
    """As people train them: on a checkpoint of masked tokens."""
    folder = save_model(random(AutoModelForMaskedLM, name), tmp_path)
    driver = Driver(folder)
    kind: Any = AutoModelForSequenceClassification
    base = kind.from_pretrained(folder, num_labels=5, dtype="float32")
    peft = with_heads(base, name, "whole")
    slots = load_all(driver, peft, ["whole"])
    for stream, _ in read(driver, [slots["whole"]], [scores_of(name)]):
        assert_near(stream, outputs(peft, "whole", stream.tokens).logits[0])
    driver.close()


@of_a_few
def test_classes_of_tokens(name: str, tmp_path: Path) -> None:
    """By the head of the base, and by that of an adapter."""
    row, base = ENCODERS[name], random(AutoModelForTokenClassification, name, num_labels=5)
    driver = Driver(save_model(base, tmp_path))
    config = LoraConfig(r=4, target_modules=list(row.few), task_type="TOKEN_CLS")
    peft = with_noise(add_adapter(base, "own", config, 1))
    slots = load_all(driver, peft, ["own"])
    for stream, _ in read(driver, slots.values(), [VectorParams("scores", "all")]):
        adapter = None if stream.slot < 0 else "own"
        assert_near(stream, outputs(peft, adapter, stream.tokens).logits[0])
    driver.close()


def test_pairs_of_texts(tmp_path: Path) -> None:
    """The tokens of a second text have another type, whatever their adapter."""
    base = random(AutoModelForSequenceClassification, "bert", num_labels=1)
    driver = Driver(save_model(base, tmp_path))
    peft = with_heads(base, "bert", "own")
    slots = load_all(driver, peft, ["own"])
    wishes = [VectorParams("scores", "first", second=second) for second in (None, 0, 1)]
    for stream, wish in read(driver, slots.values(), wishes):
        second, count = wish.second, len(stream.tokens)
        types = torch.zeros(1, count, dtype=torch.int64)
        if second is not None:
            types[0, second:] = 1
        adapter = None if stream.slot < 0 else "own"
        found = outputs(peft, adapter, stream.tokens, token_type_ids=types)
        assert_near(stream, found.logits[0])
    driver.close()


@pytest.mark.parametrize("options", ["modules_to_save", "trainable_token_indices"])
@pytest.mark.parametrize(
    "name",
    [
        "electra-narrow",
        *(
            pytest.param(each, marks=pytest.mark.exhaustive)
            for each in ("bert", "deberta", "modernbert")
        ),
    ],
)
def test_own_rows_of_the_embedding(name: str, options: str, tmp_path: Path) -> None:
    table = "tok_embeddings" if name == "modernbert" else "word_embeddings"
    wish: dict[str, Any] = {options: {table: [4, 6, 8]} if "token" in options else [table]}
    driver = Driver(save_model(random(AutoModel, name), tmp_path))
    config = LoraConfig(r=3, target_modules=list(ENCODERS[name].few[:1]), **wish)
    peft = add_adapter(random(AutoModel, name), "one", config, 1)
    with torch.no_grad():
        for parameter_name, parameter in peft.named_parameters():
            if parameter.requires_grad and "lora_" not in parameter_name:
                parameter.add_(torch.randn(parameter.shape, generator=_seeded(2)), alpha=0.3)
    slots = load_all(driver, peft, ["one"])
    ids = [4, 6, 8, *text(9, 1)]
    stream = Stream(driver, 0, ids, slot=slots["one"]).read_for(VectorParams(pooling="mean"))
    generate(driver, [stream], 0, 64)
    states = outputs(peft, "one", ids).last_hidden_state[0]
    assert_near(stream, pooled(states, "mean"))
    driver.close()
