"""`loraplex info MODEL`: what a model needs on this machine, from its config.json alone."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from loraplex.launcher import model_info
from loraplex.launcher.__main__ import main
from loraplex.launcher.bench.engine.offline import model_folder
from loraplex.server.worker.process.device import CudaDevice, TorchBuild

LLAMA_8B = Path("launcher/bench/engine/configs/llama-3.1-8b/config.json")
KV_BYTES = 2 * 2 * 32 * 8 * 128
H100 = CudaDevice("H100", (9, 0), 80 << 30)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_info, "cuda_devices", lambda: [H100])
    monkeypatch.setattr(model_info, "torch_build", lambda: TorchBuild("2.9", "12.8"))


def facts(capsys: pytest.CaptureFixture[str], *arguments: str) -> Any:
    main(["info", *arguments, "--json"])
    return json.loads(capsys.readouterr().out)


@pytest.mark.usefixtures("gpu")
def test_on_a_gpu_what_is_left_is_for_keys_and_values(capsys: pytest.CaptureFixture[str]) -> None:
    found = facts(capsys, str(LLAMA_8B))
    needs = found["needs"]
    assert (needs["device"], needs["dtype"]) == ("cuda", "bfloat16")
    assert needs["weights"] == 8_030_261_248 * 2
    assert needs["kv_bytes"] == KV_BYTES
    assert needs["kv_memory"] < 0.9 * (80 << 30) - (8 << 30) - needs["weights"]
    assert needs["kv_tokens"] == needs["kv_memory"] // (16 * KV_BYTES) * 16
    assert needs["max_context"] == found["max_context"] == 131_072
    assert needs["problem"] is None
    assert found["reference"] is None


@pytest.mark.usefixtures("gpu")
def test_memory_options_count(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert facts(capsys, str(LLAMA_8B), "--kv-memory", "2GiB")["needs"]["kv_tokens"] == 1 << 14
    monkeypatch.setenv("LORAPLEX_KV_MEMORY", "1GiB")
    needs = facts(capsys, str(LLAMA_8B))["needs"]
    assert (needs["kv_tokens"], needs["max_context"]) == (1 << 13, 1 << 13)
    wide = facts(capsys, str(LLAMA_8B), "--dtype", "float32")
    assert wide["needs"]["kv_bytes"] == 2 * KV_BYTES
    assert "not in float32" in wide["reference"]


@pytest.mark.usefixtures("gpu")
def test_quantised_weights_take_less(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plain = facts(capsys, str(LLAMA_8B))
    fp8 = facts(capsys, str(LLAMA_8B), "--quantize", "fp8")
    assert plain["weights"] == ""
    assert fp8["weights"] == "FP8, a scale for each output, at load, inputs in FP8"
    assert fp8["needs"]["weights"] == pytest.approx(6.98e9 + 2 * 1.05e9, rel=0.01)
    assert fp8["needs"]["kv_tokens"] > plain["needs"]["kv_tokens"]
    config = json.loads(LLAMA_8B.read_text())
    awq = {"quant_method": "awq", "bits": 4, "group_size": 128, "version": "gemm"}
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**config, "quantization_config": awq}))
    found = facts(capsys, str(path))
    assert found["weights"] == "AWQ, 4 bits in groups of 128"
    assert found["needs"]["weights"] == pytest.approx(6.98e9 * 0.52 + 2 * 1.05e9, rel=0.03)
    main(["info", str(path)])
    assert "AWQ, 4 bits in groups of 128, computed in the dtype" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        main(["info", str(path), "--quantize", "nf4"])
    assert "--quantize nf4: the model's weights are quantised already" in capsys.readouterr().err


@pytest.mark.usefixtures("gpu")
def test_what_does_not_fit_is_said_first(capsys: pytest.CaptureFixture[str]) -> None:
    main(["info", str(LLAMA_8B), "--kv-memory", "1GiB", "--max-context", "9000"])
    first, *others = capsys.readouterr().out.splitlines()
    assert first.startswith(f"{LLAMA_8B} can be served, but not here: --kv-memory is 1073741824")
    assert len(others) < 16
    main(["info", str(LLAMA_8B), "--adapter-memory", "70GiB"])
    assert "not here: not enough GPU memory for a KV cache" in capsys.readouterr().out


def test_windows_are_counted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = {
        **json.loads(LLAMA_8B.read_text()),
        "model_type": "mistral",
        "architectures": ["MistralForCausalLM"],
        "sliding_window": 4096,
        "layer_types": ["sliding_attention"] * 20 + ["full_attention"] * 12,
    }
    config.pop("rope_scaling", None)
    path = tmp_path / "any name.json"
    path.write_text(json.dumps(config))
    main(["info", str(path)])
    assert "  windows     4,096 tokens in 20 layers\n" in capsys.readouterr().out


@pytest.mark.usefixtures("gpu")
def test_long_sequences_have_more_room_behind_windows(capsys: pytest.CaptureFixture[str]) -> None:
    main(["info", str(model_folder("gemma-3-12b") / "config.json"), "--kv-memory", "8GiB"])
    printed = capsys.readouterr().out
    # 48 layers of 2 x 8 x 256 numbers, in 6 groups of 8 layers.
    assert f"  a token     {48 * 2 * 8 * 256 * 2:,} bytes of keys and values\n" in printed
    whole = (8 << 30) // (8 * 16 * 2 * 8 * 256 * 2) * 16 // 6
    found = re.search(r"cache +([\d,]+) tokens in 8.00 GiB; .*, and ([\d,]+) in", printed)
    assert found is not None
    short, long = (int(text.replace(",", "")) for text in found.groups())
    assert short == whole
    assert long > 4 * short


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("{", "cannot be read as JSON"),
        ("[1]", "expected a JSON object"),
        ("{}", "names no model_type"),
        ('{"model_type": "llama"}', "vocab_size must be a positive integer"),
        ('{"model_type": "jamba", "mamba_d_state": 16}', "it needs state-space layers"),
        ('{"model_type": "llama", "num_hidden_layers": 1e400}', "num_hidden_layers"),
        ('{"model_type": ["llama"]}', "is not served"),
        ("\x00" * 9, "cannot be read as JSON"),
        ("[" * 100_000, "cannot be read as JSON"),
    ],
)
def test_of_what_is_no_model_one_sentence_is_said(
    text: str, reason: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "config.json"
    path.write_text(text)
    with pytest.raises(SystemExit) as end:
        main(["info", str(path)])
    assert end.value.code == 1
    out, err = capsys.readouterr()
    (line,) = (out + err).splitlines()
    assert line.startswith(f"loraplex: {path}: ")
    assert reason in line


@pytest.mark.parametrize(
    ("model", "count", "arguments", "says"),
    [
        (str(LLAMA_8B), 1, (), ""),
        (str(LLAMA_8B), 2, (), "--workers 2 --tp 1: 2 workers of 1 GPU, since 1 GPU holds"),
        (str(LLAMA_8B), 2, ("--mode", "local"), "--workers 1 --tp 1: 1 worker of 1 GPU"),
        (str(LLAMA_8B), 2, ("--device", "cpu"), ""),
        ("llama-3.1-70b", 8, (), "--workers 2 --tp 4: 2 workers of 4 GPUs, since 4 GPUs hold"),
        ("llama-3.1-70b", 8, ("--quantize", "fp8"), "--workers 4 --tp 2: 4 workers of 2 GPUs"),
        ("llama-3.1-70b", 2, (), "the model does not fit 2 GPUs a worker"),
    ],
)
def test_what_serve_makes_of_several_gpus(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    model: str,
    count: int,
    arguments: tuple[str, ...],
    says: str,
) -> None:
    """Two GPUs have room for the weights of 70B in bfloat16, with none for keys and values."""
    if model == "llama-3.1-70b":
        big = {"hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80}
        heads = {"num_attention_heads": 64, "num_key_value_heads": 8}
        path = tmp_path / "config.json"
        path.write_text(json.dumps(json.loads(LLAMA_8B.read_text()) | big | heads))
        model = str(path)
    monkeypatch.setattr(model_info, "cuda_devices", lambda: [H100] * count)
    monkeypatch.setattr(model_info, "torch_build", lambda: TorchBuild("2.9", "12.8"))
    groups = facts(capsys, model, *arguments)["groups"]
    assert groups.startswith(says)
    assert bool(groups) == bool(says)
    main(["info", model, *arguments])
    assert (f"serve       {groups}" in capsys.readouterr().out) == bool(says)
