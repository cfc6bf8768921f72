"""A real server tells of what is wrong or missing in its adapters, before anybody asks."""

import json
import shutil
import time
from pathlib import Path

import httpx
import pytest
from safetensors.torch import load_file, save_file

from loraplex.launcher.demo import adapter_paths
from tests.e2e.serving import start_serving

PATIENCE_S = 240


def test_declared_adapters(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    for name in ("cut", "bad"):
        shutil.copytree(adapter_paths()["summary"], tmp_path / name)
    weights = tmp_path / "cut" / "adapter_model.safetensors"
    kept = {name: t for name, t in load_file(weights).items() if ".layers.0." in name}
    save_file(kept, weights, {"format": "pt"})
    config = tmp_path / "bad" / "adapter_config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "use_qalora": True}))
    server = start_serving(
        *("--adapter", f"cut={tmp_path / 'cut'}", "--adapter", f"bad={tmp_path / 'bad'}"),
        *("--adapter", "gone=hub:acme/never-there", "--cache-dir", str(tmp_path / "cache")),
        log=tmp_path / "log",
    )
    try:
        deadline = time.monotonic() + PATIENCE_S
        while True:
            listed = httpx.get(f"{server.url}/v1/adapters", timeout=240).json()["data"]
            if all(one["digest"] or one["error"] for one in listed):
                break
            assert time.monotonic() < deadline, listed
            time.sleep(0.05)
    finally:
        server.process.terminate()
        assert server.process.wait(timeout=240) == 0
    told = {one["id"]: one for one in listed}
    assert "HF_HUB_OFFLINE" in told["gone"]["error"]
    assert "use_qalora" in told["bad"]["error"]
    assert (told["cut"]["error"], told["cut"]["partial"]["layers"]) == (None, 1)
    assert all(not one["resident_on"] for one in listed)
    log = server.log.read_text()
    for name in ("gone", "bad"):
        assert log.count(f"adapter {name} cannot be loaded: {told[name]['error']}") == 1
    assert log.count(f"(cut) is {told['cut']['partial']['message']}") == 1
