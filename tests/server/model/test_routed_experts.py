"""Routed experts of answers: the experts that transformers chooses for each token."""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
import pytest
import torch
from peft import LoraConfig, PeftModel

from loraplex.adapters.manifest import SlabLayout
from loraplex.router.api.routed_experts import RoutedTokens
from loraplex.server.engine.admission import MAX_ROUTED_BYTES
from loraplex.server.protocol import GenerateRequest, SamplingParams
from tests.grids import beyond
from tests.kernels.batches import interpreted
from tests.server.engine.harness import make_request
from tests.server.model.driver import Driver
from tests.server.model.engine import Engine
from tests.server.model.families.variants import VARIANTS
from tests.server.model.gpu_pair import small_pair
from tests.server.model.hub_models import VOCAB, add_adapter, make_model, save_model
from tests.server.model.slabs import pack

pytestmark = pytest.mark.filterwarnings(
    "ignore::FutureWarning", "ignore::UserWarning", "ignore:The following .*_pattern keys"
)
PROMPT, OUTPUT = 37, 9


class Adapter(NamedTuple):
    layout: SlabLayout
    slab: bytes


class Served(NamedTuple):
    """A model by PEFT, and drivers that serve it with one adapter."""

    oracle: PeftModel
    driver: Driver
    adapter: Adapter

    def engine(self, **less: Any) -> Engine:
        return Engine(self.driver, {"one": self.adapter}, **less)

    def wish(self, seed: int, adapter: str | None, **changes: Any) -> GenerateRequest:
        generator = torch.Generator().manual_seed(seed)
        ids = torch.randint(3, VOCAB, (PROMPT,), generator=generator).tolist()
        sampling = SamplingParams(temperature=0.0, max_tokens=OUTPUT, ignore_eos=True)
        asked = make_request(ids, adapter=adapter, routed_experts=True)
        return msgspec.structs.replace(asked, sampling=sampling, **changes)


def served_model(name: str, folder: Path, **options: Any) -> Served:
    base = make_model(name)
    save_model(base, folder)
    config = LoraConfig(r=4, lora_alpha=16, target_modules=list(VARIANTS[name].targets[:2]))
    oracle = add_adapter(base, "one", config, 1)
    driver = Driver(folder, page_size=4, **options)
    return Served(oracle, driver, Adapter(*pack(oracle, "one")))


@pytest.fixture(
    scope="module",
    params=beyond(2, ["deepseek-v3", "qwen3-moe-dense-layer", "mixtral", "gpt-oss", "qwen3-moe"]),
)
def served(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Served]:
    found = served_model(request.param, tmp_path_factory.mktemp("base"))
    yield found
    found.driver.close()


def chosen_by(oracle: PeftModel, ids: Sequence[int], adapter: str | None) -> np.ndarray:
    """`[tokens, layers, top_k]`, ascending; zeros in layers without experts."""
    layers = oracle.get_base_model().config.num_hidden_layers
    found: dict[int, torch.Tensor] = {}
    undo: list[Callable[[], None]] = []

    def note(layer: int, results: Any) -> None:
        each = results if isinstance(results, tuple) else (results,)
        found.update((layer, part) for part in each if part.dtype == torch.int64)

    for path, module in oracle.get_base_model().named_modules():
        layer = int(path.split("layers.")[1].split(".")[0]) if "layers." in path else -1
        if type(module).__name__.lower().endswith("topkrouter"):
            hook = module.register_forward_hook(lambda _, __, out, at=layer: note(at, out))
            undo.append(hook.remove)
        route: Any = getattr(module, "route_tokens_to_experts", None)
        if route is not None:

            def noted(*given: Any, route: Any = route, at: int = layer) -> Any:
                results = route(*given)
                note(at, results)
                return results

            module.route_tokens_to_experts = noted
    with torch.no_grad():
        if adapter is None:
            with oracle.disable_adapter():
                oracle(torch.tensor([ids]))
        else:
            oracle(torch.tensor([ids]))
    for each in undo:
        each()
    top_k = next(iter(found.values())).shape[-1]
    rows = np.zeros((len(ids), layers, top_k), dtype=np.int64)
    for layer, chosen in found.items():
        rows[:, layer] = chosen.reshape(len(ids), top_k).sort(-1).values.numpy()
    return rows


def experts_of(engine: Engine, *wishes: GenerateRequest) -> list[tuple[list[int], np.ndarray]]:
    """Tokens and experts of each answer; the experts are ascending."""
    keys = [engine.submit(wish) for wish in wishes]
    engine.run()
    return [answer_of(engine, key, wish) for key, wish in zip(keys, wishes, strict=True)]


def answer_of(engine: Engine, key: int, wish: GenerateRequest) -> tuple[list[int], np.ndarray]:
    rows = RoutedTokens()
    for event in engine.events[key]:
        if event.routed is not None:
            rows.add(event.routed)
    ids = [*wish.prompt_ids, *wish.accepted_ids, *engine.tokens(key)]
    routed = rows.first(len(ids) - 1)
    assert routed is not None
    assert routed.end == len(ids) - 1
    form = routed.form
    kind = f"<u{form.itemsize}"
    chosen = np.frombuffer(routed.chosen, kind).reshape(-1, form.layers, form.top_k)
    return ids, np.sort(chosen.astype(np.int64), axis=-1)


def check(served: Served, found: tuple[list[int], np.ndarray], adapter: str | None) -> None:
    ids, chosen = found
    np.testing.assert_array_equal(chosen, chosen_by(served.oracle, ids[:-1], adapter))


@pytest.mark.parametrize("adapter", [None, "one"])
def test_as_transformers_chooses(served: Served, adapter: str | None) -> None:
    """In several slices, beside others that ask and one that does not."""
    engine = served.engine(max_step_tokens=16)
    digest = None if adapter is None else served.adapter.layout.digest
    wishes = [served.wish(seed, digest) for seed in range(2)]
    quiet = engine.submit(served.wish(7, None, routed_experts=False))
    for found in experts_of(engine, *wishes):
        check(served, found, adapter)
    assert all(event.routed is None for event in engine.events[quiet])


def test_a_cached_prefix_is_computed_again(served: Served) -> None:
    engine = served.engine()
    experts_of(engine, served.wish(1, None, routed_experts=True))
    engine.answers(served.wish(1, None, routed_experts=False))
    hits = engine.hits
    (found,) = experts_of(engine, served.wish(1, None))
    assert engine.hits == hits, "others use the prefix, who asks does not"
    check(served, found, None)


def test_preempted_and_resumed(served: Served) -> None:
    """Each token's experts are sent once. Another worker goes on from the answer's tokens."""
    windows = len(served.driver.executor.limits.page_windows)
    engine = served.engine(num_pages=22 * windows)
    found = experts_of(engine, *(served.wish(seed, None) for seed in (3, 4)))
    if windows == 1:  # else pages behind a window come free
        assert engine.scheduler.stats().preemptions
    for one in found:
        check(served, one, None)
    ids, _ = found[0]
    wish = served.wish(3, None, accepted_ids=ids[PROMPT : PROMPT + 4])
    (again,) = experts_of(served.engine(), wish)
    assert again[0] == ids
    check(served, again, None)


def test_experts_of_wrong_drafts_are_not_sent(served: Served) -> None:
    engine = served.engine(max_draft=3)
    wish = served.wish(5, None, drafts="me")
    ids = [3, 4, 5, 6, 7] * 8
    wish = msgspec.structs.replace(wish, prompt_ids=ids[:30])
    found = experts_of(engine, wish, wish)
    for one in found:
        check(served, one, None)


def test_token_by_token(tmp_path: Path) -> None:
    """`--batch-invariant` computes so on a CPU."""
    served = served_model("qwen3-moe-dense-layer", tmp_path, batch_invariant=True)
    for found in experts_of(
        served.engine(max_step_tokens=16), *(served.wish(i, None) for i in (0, 1))
    ):
        check(served, found, None)
    served.driver.close()


def test_what_cannot_be_sent_is_refused(served: Served, tmp_path: Path) -> None:
    save_model(make_model("llama3"), tmp_path)
    dense = Driver(tmp_path, page_size=4)
    engine = Engine(dense, {})
    key = engine.submit(served.wish(1, None))
    engine.run()
    assert engine.last(key).message == (
        "return_routed_experts: the model has no experts that tokens are routed to"
    )
    dense.close()
    engine = served.engine()
    routing = engine.limits.routing
    assert routing is not None
    large = msgspec.structs.replace(routing, itemsize=MAX_ROUTED_BYTES)
    engine.scheduler.limits = msgspec.structs.replace(engine.limits, routing=large)
    key = engine.submit(served.wish(1, None))
    engine.run()
    assert str(engine.last(key).message).startswith("return_routed_experts: at most 0 tokens")


@interpreted
@pytest.mark.parametrize("backend", beyond(1, ["fa3", "fa2"]))
def test_by_a_gpus_kernels(backend: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Experts come from graphs of decodes and of prompts, and from steps outside graphs."""
    name = "qwen3-moe-dense-layer"
    model = make_model(name, head_dim=32)
    adapters = {"one": LoraConfig(r=4, target_modules=list(VARIANTS[name].targets[:2]))}
    with small_pair(model, adapters, tmp_path, monkeypatch, backend=backend) as pair:
        adapter = Adapter(
            *pack(add_adapter(make_model(name, head_dim=32), "one", adapters["one"], 1), "one")
        )
        by_gpu = Served(model, pair.gpu, adapter)
        reference = Served(model, pair.reference, adapter)
        asked = [by_gpu.wish(seed, None) for seed in range(3)]
        results = [
            experts_of(Engine(of.driver, {"one": adapter}, max_step_tokens=24), *asked)
            for of in (by_gpu, reference)
        ]
        for ours, theirs in zip(*results, strict=True):
            assert ours[0] == theirs[0]
            np.testing.assert_array_equal(ours[1], theirs[1])
        assert any(tokens > 0 for tokens in pair.graphs)
        assert any(tokens < 0 for tokens in pair.graphs)
