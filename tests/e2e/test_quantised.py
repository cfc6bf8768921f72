"""A model that is quantised at load, and one that is stored so, serve adapters by HTTP."""

from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from safetensors.torch import load_file, save_file

from loraplex.launcher.demo import adapter_paths, model_path
from tests.e2e.serving import Serving, start_serving
from tests.server.model.quantised.checkpoints import change_config
from tests.server.model.quantised.formats import awq

# `tests/server/model/quantised` has both in a short run.
pytestmark = pytest.mark.exhaustive

MESSAGE = "i hate this phone, it broke after two days"
TIMEOUT_S = 240


def awq_demo(folder: Path) -> Path:
    """The demo model with its layers' matrices in AWQ's form."""
    folder.mkdir()
    for path in model_path().iterdir():
        (folder / path.name).write_bytes(path.read_bytes())
    form, tensors = awq(128), {}
    for name, tensor in load_file(folder / "model.safetensors").items():
        if not name.endswith("_proj.weight"):
            tensors[name] = tensor
            continue
        packed = form.pack(tensor.float()).tensors
        module = name.removesuffix(".weight")
        tensors |= {f"{module}.{suffix}": part for suffix, part in packed.items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    change_config(folder, quantization_config=form.config)
    return folder


@pytest.fixture(params=["nf4", "awq"])
def server(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[str, Serving]]:
    options = ["--quantize", "nf4"]
    if request.param == "awq":
        sentiment = adapter_paths()["sentiment"]
        adapter = ["--adapter", f"sentiment={sentiment}", "--model-name", "loraplex/demo"]
        options = [str(awq_demo(tmp_path / "demo")), *adapter]
    cache = ("--cache-dir", str(tmp_path / "cache"))
    started = start_serving(*options, *cache, log=tmp_path / "log")
    yield request.param, started
    started.process.terminate()
    assert started.process.wait(timeout=TIMEOUT_S) == 0


def test_an_adapter_answers(server: tuple[str, Serving]) -> None:
    kind, serving = server
    body = {"inputs": MESSAGE, "parameters": {"adapter_id": "sentiment", "max_new_tokens": 8}}
    answer = httpx.post(f"{serving.url}/generate", json=body, timeout=TIMEOUT_S).json()
    assert answer["generated_text"].strip() == "negative"
    base = httpx.get(f"{serving.url}/v1/fleet", timeout=TIMEOUT_S).json()["base"]
    weights = {"nf4": "NF4 in blocks of 64, at load", "awq": "AWQ, 4 bits in groups of 128"}
    assert base["weights"] == weights[kind]
