"""DoRA, biases, own norms and tables by HTTP: tokens and log-probabilities of what PEFT loads,
while adapters take turns on the device."""

import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model

from loraplex.launcher.bench.engine.offline import tokenizer_json
from tests.e2e.serving import Serving, start_serving
from tests.server.model.families.parity import TOLERANCE, prompt
from tests.server.model.hub_models import VOCAB, make_model, reference_logprobs, save_model

# `tests/server/model/lora` has these adapters in a short run.
pytestmark = [pytest.mark.exhaustive, pytest.mark.filterwarnings("ignore")]
TIMEOUT_S = 240
NEW_TOKENS = 6
SLOTS = 2
TARGETS = ["q_proj", "v_proj", "down_proj"]
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "dora": {"use_dora": True},
    "biased": {"bias": "all", "lora_bias": True},
    "headed": {"modules_to_save": ["lm_head"]},
    "normed": {"modules_to_save": ["input_layernorm", "model.norm"]},
    "tokens": {"trainable_token_indices": [*range(5, 90, 3)], "use_dora": True},
}


# What a device makes something of when they are loaded.
FINISHED = {"dora", "biased", "tokens"}


class Beside(NamedTuple):
    """A server, and what PEFT makes of each adapter's folder. folder: of them and the cache."""

    serving: Serving
    oracles: dict[str, Any]
    folder: Path
    processes: int

    def finished_slabs(self) -> dict[Path, int]:
        """Files of finished adapters, and when each was used, in nanoseconds."""
        found = self.folder.glob("cache/**/*-finished_as_stored-*.slab")
        return {path: path.stat().st_mtime_ns for path in found}


def save_adapter(family: str, folder: Path, options: dict[str, Any], seed: int) -> None:
    config = LoraConfig(r=4, target_modules=TARGETS, task_type="CAUSAL_LM", **options)
    torch.manual_seed(seed)
    model = get_peft_model(make_model(family), config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn_like(parameter), alpha=0.2)
    model.save_pretrained(folder)


@pytest.fixture(
    scope="module",
    params=[("llama-biases-tied", 1), ("llama-biases-tied", 2), ("gemma3", 1)],
    ids=lambda row: f"{row[0]}-{row[1]}",
)
def beside(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Beside]:
    """Of one process, and of two that share the base."""
    (family, processes), folder = request.param, tmp_path_factory.mktemp("more")
    base = save_model(make_model(family), folder / "base")
    (base / "tokenizer.json").write_text(tokenizer_json(VOCAB, (0, 1, 2)))
    oracles: dict[str, Any] = {"base": make_model(family)}
    for seed, (name, options) in enumerate(OPTIONS.items()):
        save_adapter(family, folder / name, options, seed)
        oracles[name] = PeftModel.from_pretrained(make_model(family), str(folder / name)).eval()
    serving = serve(folder, processes, folder / "log")
    yield Beside(serving, oracles, folder, processes)
    end(serving)


def serve(folder: Path, processes: int, log: Path) -> Serving:
    return start_serving(
        *(str(folder / "base"), "--device", "cpu", "--dtype", "float32"),
        *("--adapter-slots", str(SLOTS), "--max-step-tokens", "40", "--allow-other-base"),
        *("--adapter-root", str(folder), "--model-name", "base", "--tp", str(processes)),
        *(part for name in OPTIONS for part in ("--adapter", f"{name}=local:{folder / name}")),
        *("--cache-dir", str(folder / "cache")),
        log=log,
    )


def end(serving: Serving) -> None:
    serving.process.terminate()
    assert serving.process.wait(timeout=TIMEOUT_S) == 0


def complete(serving: Serving, ids: list[int], model: str) -> Any:
    body = {"model": model, "prompt": ids, "max_tokens": NEW_TOKENS, "temperature": 0}
    body |= {"logprobs": 1, "return_token_ids": True, "ignore_eos": True}
    body["return_hidden_states"] = True
    answer = httpx.post(f"{serving.url}/v1/completions", json=body, timeout=TIMEOUT_S)
    assert answer.status_code == 200, answer.text
    [choice] = answer.json()["choices"]
    return choice


def test_tokens_are_those_of_peft(beside: Beside) -> None:
    """More adapters than slots, asked for in turns: each is evicted and loaded again."""
    assert len(OPTIONS) > 2 * SLOTS
    assert_as_peft(beside.serving, beside.oracles, (4, 51, 17))


def test_a_device_finishes_an_adapter_once(beside: Beside) -> None:
    """Another server finds on disk what the first one's devices have made."""
    assert_as_peft(beside.serving, beside.oracles, (5,))
    deadline = time.monotonic() + TIMEOUT_S
    while len(used := beside.finished_slabs()) < len(FINISHED):
        assert time.monotonic() < deadline, used
        time.sleep(0.05)  # polls a condition, bounded by the deadline
    again = serve(beside.folder, beside.processes, beside.folder / "log of another")
    assert_as_peft(again, beside.oracles, (6,))
    end(again)
    used_again = beside.finished_slabs()
    assert used_again.keys() == used.keys()
    assert all(used_again[path] > used[path] for path in used)


def assert_as_peft(serving: Serving, oracles: Mapping[str, Any], lengths: Sequence[int]) -> None:
    """All adapters at once, with a prompt of each length."""
    asked = [
        (name, prompt(length, 7 * length + place))
        for length in lengths
        for place, name in enumerate(oracles)
    ]
    with ThreadPoolExecutor(6) as pool:
        answers = list(pool.map(lambda of: complete(serving, of[1], of[0]), asked))
    for (name, ids), choice in zip(asked, answers, strict=True):
        tokens = choice["token_ids"]
        oracle = oracles[name]
        adapter = None if name == "base" else "default"
        rows = reference_logprobs(oracle, adapter, [*ids, *tokens])[len(ids) - 1 : -1]
        expected = [row[token].item() for row, token in zip(rows, tokens, strict=True)]
        assert choice["logprobs"]["token_logprobs"] == pytest.approx(expected, abs=TOLERANCE), name
        best = rows.max(dim=-1).values.tolist()
        assert expected == pytest.approx(best, abs=TOLERANCE), name
        state = last_state(oracle, [*ids, *tokens[:-1]])
        assert choice["hidden_states"] == pytest.approx(state, abs=10 * TOLERANCE), name


def last_state(oracle: Any, ids: list[int]) -> list[float]:
    """Behind the last norm, at the last token."""
    with torch.no_grad():
        states = oracle(input_ids=torch.tensor([ids]), output_hidden_states=True).hidden_states
    found: list[float] = states[-1][0, -1].tolist()
    return found


def test_lengths_are_not_merged_or_scaled(beside: Beside) -> None:
    for name in OPTIONS:
        body = {"model": name, "prompt": [5, 6], "max_tokens": 1, "adapter_scale": 0.5}
        url = f"{beside.serving.url}/v1/completions"
        answer = httpx.post(url, json=body, timeout=TIMEOUT_S)
        assert answer.is_success == (name == "plain"), answer.text
        if name != "plain":
            assert "merge" in answer.text
