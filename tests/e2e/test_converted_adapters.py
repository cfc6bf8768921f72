"""Adapters of other formats, converted by the command and served, answer as they did at home."""

import json
import subprocess
import sys
from pathlib import Path

import httpx
import pytest
import torch
from safetensors.torch import load_file
from transformers import LlamaForCausalLM

from loraplex.launcher.demo import BASE_NAME, EXAMPLES, adapter_paths, model_path
from tests.e2e.serving import ROOT
from tests.launcher.convert.folders import pair, with_mlx_layers, write_mlx

pytestmark = pytest.mark.filterwarnings("ignore")
SCALE = 3.0
TOKENS = 8
PROMPT = [1, 40, 300, 7, 1200, 55]


def convert(source: Path, out: Path) -> None:
    command = [sys.executable, "-m", "loraplex", "adapter", "convert", str(source)]
    done = subprocess.run(
        [*command, "--out", str(out), "--base", "demo"], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr


def completion(http: httpx.Client, model: str, prompt: str | list[int]) -> dict[str, object]:
    body = {"model": model, "prompt": prompt, "temperature": 0, "max_tokens": TOKENS, "logprobs": 1}
    answer = http.post("/v1/completions", json=body)
    assert answer.status_code == 200, answer.text
    choice: dict[str, object] = answer.json()["choices"][0]
    return choice


def greedy_logprobs(model: torch.nn.Module) -> list[float]:
    ids, found = list(PROMPT), []
    with torch.no_grad():
        for _ in range(TOKENS):
            row = torch.log_softmax(model(torch.tensor([ids])).logits[0, -1].double(), -1)
            best = int(row.argmax())
            ids.append(best)
            found.append(float(row[best]))
    return found


def test_mlx_answers_as_mlx_computes(http: httpx.Client, adapter_root: Path) -> None:
    """Log-probabilities of a greedy answer, by mlx-lm's formulas on the base in float32."""
    base = LlamaForCausalLM.from_pretrained(model_path(), dtype=torch.float32)
    base.train(False)
    plain = greedy_logprobs(base)
    tensors = pair("model.embed_tokens", 2048, 256, rank=4, seed=1)
    for layer in (3, 4, 5):
        tensors |= pair(f"model.layers.{layer}.self_attn.q_proj", 256, 256, rank=8, seed=layer)
        tensors |= pair(f"model.layers.{layer}.mlp.down_proj", 640, 256, rank=8, seed=9 + layer)
    expected = greedy_logprobs(with_mlx_layers(base, tensors, SCALE))
    assert max(abs(a - b) for a, b in zip(plain, expected, strict=True)) > 0.1
    source = write_mlx(
        adapter_root / "mlx-source",
        tensors,
        model=BASE_NAME,
        num_layers=3,
        lora_parameters={"rank": 8, "scale": SCALE, "dropout": 0.0},
    )
    convert(source, adapter_root / "mlx-converted")
    choice = completion(http, f"local:{adapter_root / 'mlx-converted'}", PROMPT)
    logprobs = choice["logprobs"]
    assert isinstance(logprobs, dict)
    assert logprobs["token_logprobs"] == pytest.approx(expected, abs=1e-3)


def test_a_pickle_answers_as_its_safetensors(http: httpx.Client, adapter_root: Path) -> None:
    original = adapter_paths()["pirate"]
    source = adapter_root / "pickle-source"
    source.mkdir()
    config = json.loads((original / "adapter_config.json").read_text())
    (source / "adapter_config.json").write_text(json.dumps(config))
    tensors = load_file(original / "adapter_model.safetensors")
    torch.save({"state_dict": tensors}, source / "adapter_model.bin")
    body = {"model": f"local:{source}", "prompt": "x", "max_tokens": 1}
    refused = http.post("/v1/completions", json=body)
    assert refused.status_code == 422
    assert "loraplex adapter convert" in refused.text
    convert(source, adapter_root / "pickle-converted")
    for text in EXAMPLES[:3]:
        ours = completion(http, f"local:{adapter_root / 'pickle-converted'}", text)
        theirs = completion(http, "pirate", text)
        assert ours["text"] == theirs["text"]
        found, expected = ours["logprobs"], theirs["logprobs"]
        assert isinstance(found, dict)
        assert isinstance(expected, dict)
        assert found["tokens"] == expected["tokens"]
        # Steps of other sizes round otherwise.
        assert found["token_logprobs"] == pytest.approx(expected["token_logprobs"], abs=1e-4)
        assert ours["text"] != completion(http, BASE_NAME, text)["text"]
