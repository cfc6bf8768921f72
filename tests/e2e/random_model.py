"""A server of a small model with random weights, a context of 16,384 tokens and random adapters."""

import json
from pathlib import Path

from loraplex.launcher.bench.engine.offline import SHIPPED
from tests.e2e.serving import Serving, start_serving
from tools.bench.make_model import Maker

CONTEXT = 16_384
MODELS = ("base", "one", "two")  # the base and its adapters
SIZES = {
    "vocab_size": 1024,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "max_position_embeddings": CONTEXT,
}
_LORA_RANK = 4


def start_random(folder: Path) -> Serving:
    """folder: an empty one, for the model, its adapters and what the server writes."""
    (folder / "shape").mkdir()
    llama = json.loads((SHIPPED / "llama-3.1-8b" / "config.json").read_text())
    (folder / "shape" / "config.json").write_text(json.dumps(llama | SIZES))
    maker = Maker(folder / "shape", "float32", "cpu", 1)
    maker.model(folder / "model")
    names = MODELS[1:]
    maker.adapters(folder / "adapters", names, MODELS[0], _LORA_RANK)
    adapters = [f"{name}=local:{folder / 'adapters' / name}" for name in names]
    return start_serving(
        *(str(folder / "model"), "--device", "cpu", "--dtype", "float32"),
        *("--model-name", MODELS[0], "--adapter-root", str(folder / "adapters")),
        *(part for adapter in adapters for part in ("--adapter", adapter)),
        *("--cache-dir", str(folder / "cache")),
        log=folder / "log",
    )
