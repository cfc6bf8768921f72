"""What a checkpoint carries along beside its model: left out by name, as transformers does."""

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from loraplex.server.model.checkpoint.checkpoint import CheckpointError, check_folder
from tests.server.model.driver import Driver, Stream, generate
from tests.server.model.families.parity import GREEDY, assert_parity, prompt
from tests.server.model.hub_models import make_model, save_model

Tensors = dict[str, torch.Tensor]
LAYERS = 3
LAST = f"model.layers.{LAYERS - 1}."
NEXT = f"model.layers.{LAYERS}."


def one_more_layer(tensors: Tensors) -> Tensors:
    copy = {n.replace(LAST, NEXT): t.clone() for n, t in tensors.items() if n.startswith(LAST)}
    return {name: tensor for name, tensor in copy.items() if name.startswith(NEXT)}


def prediction(tensors: Tensors) -> Tensors:
    own = ("eh_proj.weight", "enorm.weight", "hnorm.weight", "shared_head.norm.weight")
    return one_more_layer(tensors) | {f"{NEXT}{name}": torch.ones(4) for name in own}


# Kind -> the tensors, and what config.json says of them.
CARRIED: dict[str, tuple[Callable[[Tensors], Tensors], dict[str, Any]]] = {
    "multi-token prediction": (prediction, {}),
    "declared prediction": (one_more_layer, {"num_nextn_predict_layers": 1}),
    "prediction apart": (
        lambda _: {"mtp.fc.weight": torch.ones(2), "model.mtp_layers.0.norm.weight": torch.ones(2)},
        {},
    ),
    "value head": (
        lambda _: {
            "v_head.summary.weight": torch.ones(1, 64),
            "v_head.summary.bias": torch.ones(1),
        },
        {},
    ),
    "attention masks": (
        lambda _: {
            f"model.layers.{i}.{name}": torch.tensor(-1e9)
            for i in range(LAYERS)
            for name in ("self_attn.masked_bias", "attention.bias", "attn.causal_mask")
        },
        {},
    ),
    "rotary tables": (
        lambda _: (
            {f"model.layers.{i}.self_attn.rotary_emb.inv_freq": torch.ones(8) for i in (0, 1)}
            | {"model.rotary_emb.inv_freq": torch.ones(8)}
        ),
        {},
    ),
}


def carrying(folder: Path, kind: str) -> Path:
    make, config = CARRIED[kind]
    tensors = load_file(folder / "model.safetensors")
    save_file(tensors | make(tensors), folder / "model.safetensors", {"format": "pt"})
    change(folder, **config)
    return folder


def change(folder: Path, **config: Any) -> None:
    known = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(known | config))


def assert_as_transformers(folder: Path, model: Any) -> None:
    driver = Driver(folder)
    stream = Stream(driver, 0, prompt(17, 0), sampling=GREEDY)
    generate(driver, [stream], 6, 5)
    assert_parity(model, None, stream)
    driver.close()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", CARRIED)
def test_it_is_left_out(kind: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = carrying(save_model(make_model("llama3"), tmp_path), kind)
    caplog.set_level(logging.INFO, "loraplex.server.model.weights")
    assert_as_transformers(folder, AutoModelForCausalLM.from_pretrained(folder))
    (line,) = [r.getMessage() for r in caplog.records if r.name == "loraplex.server.model.weights"]
    name = "multi-token prediction" if "prediction" in kind else kind
    count = len(CARRIED[kind][0](load_file(folder / "model.safetensors")))
    assert line == f"{count} stored tensors change no token and are left out: {name} ({count})"


def test_a_config_that_leaves_layers_out_is_refused(tmp_path: Path) -> None:
    """Its layers beyond the last are those of the model."""
    folder = save_model(make_model("llama3"), tmp_path)
    change(folder, num_hidden_layers=LAYERS - 1)
    with pytest.raises(CheckpointError, match=r"9 unexpected: model\.layers\.2\."):
        check_folder(folder)


@pytest.mark.parametrize("name", ["v_head_2.weight", "model.masked_biases", "mtpx.weight"])
def test_what_only_looks_like_it_is_refused(name: str, tmp_path: Path) -> None:
    folder = save_model(make_model("llama3"), tmp_path)
    tensors = load_file(folder / "model.safetensors")
    save_file({**tensors, name: torch.ones(1)}, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(CheckpointError, match=f"1 unexpected: {name}"):
        check_folder(folder)


def test_swish_is_silu(tmp_path: Path) -> None:
    model = make_model("llama2", hidden_act="swish")
    assert_as_transformers(save_model(model, tmp_path), model)


def test_a_window_of_nothing_is_none(tmp_path: Path) -> None:
    model = make_model("mistral")
    folder = save_model(model, tmp_path)
    change(folder, sliding_window=0)
    assert_as_transformers(folder, model)
