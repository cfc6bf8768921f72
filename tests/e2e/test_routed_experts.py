"""Experts of tokens over HTTP: on each route, with stop strings, and after a worker has died."""

import base64
import io
import json
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from loraplex.launcher.bench.engine.offline import SHIPPED
from tests.e2e.serving import Serving, start_serving
from tests.e2e.under_load import TIMEOUT_S
from tests.engines import engines_below
from tools.bench.make_model import Maker

pytestmark = pytest.mark.exhaustive

LAYERS, TOP_K = 3, 2
SIZES = {
    "model_type": "qwen3_moe",
    "architectures": ["Qwen3MoeForCausalLM"],
    "vocab_size": 1024,
    "hidden_size": 32,
    "intermediate_size": 48,
    "moe_intermediate_size": 24,
    "num_experts": 8,
    "num_experts_per_tok": TOP_K,
    "mlp_only_layers": [0],
    "norm_topk_prob": True,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "max_position_embeddings": 16_384,
}
PROMPT = "What the router says about these words is asked for by a trainer. " * 4


@pytest.fixture(scope="module")
def serving(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    folder: Path = tmp_path_factory.mktemp("experts")
    (folder / "shape").mkdir()
    llama = json.loads((SHIPPED / "llama-3.1-8b" / "config.json").read_text())
    llama.pop("rope_scaling", None)
    (folder / "shape" / "config.json").write_text(json.dumps(llama | SIZES))
    Maker(folder / "shape", "float32", "cpu", 1).model(folder / "model")
    found = start_serving(
        *(str(folder / "model"), "--device", "cpu", "--dtype", "float32"),
        *("--model-name", "base", "--cache-dir", str(folder / "cache"), "--workers", "2"),
        log=folder / "log",
    )
    yield found
    found.process.terminate()
    assert found.process.wait(TIMEOUT_S) == 0


def npy(text: str) -> np.ndarray:
    found: np.ndarray = np.load(io.BytesIO(base64.b64decode(text)), allow_pickle=False)
    return found


def body(tokens: int, **more: Any) -> dict[str, Any]:
    asked = {"prompt": PROMPT, "max_tokens": tokens, "temperature": 0, "ignore_eos": True}
    return {"model": "base", **asked, "return_token_ids": True} | more


def complete(http: httpx.Client, tokens: int, **more: Any) -> tuple[dict[str, Any], np.ndarray]:
    asked = body(tokens, return_routed_experts=True, **more)
    answer = http.post("/v1/completions", json=asked)
    assert answer.status_code == 200, answer.text
    found = answer.json()["choices"][0]
    return found, npy(found["routed_experts"])


def check(choice: dict[str, Any], rows: np.ndarray) -> None:
    count = len(choice["prompt_token_ids"]) + len(choice["token_ids"]) - 1
    assert rows.shape == (count, LAYERS, TOP_K)
    assert rows.dtype == np.uint8
    assert not rows[:, 0].any(), "a layer without experts"
    assert (rows[:, 1:, 0] != rows[:, 1:, 1]).all()
    assert rows.max() == SIZES["num_experts"] - 1  # type: ignore[operator]


def test_on_each_route(serving: Serving, http: httpx.Client) -> None:
    """The same of the same tokens, with a cached prefix too."""
    choice, rows = complete(http, 20)
    check(choice, rows)
    again, same = complete(http, 20)
    assert again["token_ids"] == choice["token_ids"]
    np.testing.assert_array_equal(same, rows)
    ids = choice["prompt_token_ids"]
    sampling = {"temperature": 0, "max_new_tokens": 20, "ignore_eos": True}
    asked = {"input_ids": ids, "sampling_params": sampling, "return_routed_experts": True}
    info = http.post("/generate", json=asked).json()["meta_info"]
    numbers = np.frombuffer(base64.b64decode(info["routed_experts"]), np.int32)
    np.testing.assert_array_equal(numbers.reshape(-1, LAYERS, TOP_K), rows)
    said = {"temperature": 0, "max_tokens": 20, "ignore_eos": True}
    asked = {"model": "base", "token_ids": ids, "sampling_params": said}
    answer = http.post("/inference/v1/generate", json={**asked, "return_routed_experts": True})
    np.testing.assert_array_equal(npy(answer.json()["choices"][0]["routed_experts"]), rows)


def test_a_stop_string_ends_the_experts_too(serving: Serving, http: httpx.Client) -> None:
    whole, rows = complete(http, 60)
    stop = whole["text"][20:24]
    choice, part = complete(http, 60, stop=[stop])
    assert choice["stop_reason"] == stop
    check(choice, part)
    np.testing.assert_array_equal(part, rows[: len(part)])


def test_an_answer_goes_on_elsewhere(serving: Serving, http: httpx.Client) -> None:
    whole, rows = complete(http, 300)
    asked = body(300, return_routed_experts=True, stream=True)
    ids, experts = list[int](), ""
    with http.stream("POST", "/v1/completions", json=asked) as stream:
        for line in stream.iter_lines():
            if not line.startswith("data: {"):
                continue
            (choice,) = json.loads(line.removeprefix("data: "))["choices"]
            ids += choice["token_ids"] or []
            experts = choice.get("routed_experts") or experts
            if len(ids) == 30:
                for victim in engines_below(serving.process.pid):
                    victim.send_signal(signal.SIGKILL)
    assert ids == whole["token_ids"]
    np.testing.assert_array_equal(npy(experts), rows)


def test_refused_by_name_elsewhere(serving: Serving, http: httpx.Client) -> None:
    answer = http.post(
        "/v1/embeddings", json={"model": "base", "input": "a"} | {"return_routed_experts": True}
    )
    assert answer.status_code == 400
    assert "return_routed_experts" in answer.json()["error"]["message"]
