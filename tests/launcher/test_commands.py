"""`adapter check|pull|pack`, `info`, `--version`: what they print, and their exit codes."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import msgspec
import numpy as np
import pytest

from loraplex.launcher.__main__ import main
from loraplex.launcher.demo import adapter_paths, model_path
from loraplex.launcher.info import MachineFacts, gather, to_text
from tests.adapter_folders import lora_tensors, safetensors_bytes, write_adapter
from tests.server.worker.worker_process import BASE_NAME, VOCAB, base, write_model
from tests.slab_files import read_layout


def run(capsys: pytest.CaptureFixture[str], *argv: str) -> tuple[int, str, str]:
    code: str | int | None = 0
    try:
        main(argv)
    except SystemExit as end:
        code = end.code
    assert isinstance(code, int)
    return code, *capsys.readouterr()


@pytest.fixture
def model(tmp_path: Path) -> str:
    """Called by the last part of the name that the adapters give their base."""
    return str(write_model(tmp_path / BASE_NAME.partition("/")[2]))


@pytest.fixture
def adapter(tmp_path: Path) -> Path:
    return write_adapter(tmp_path / "adapter", base(), rank=8)


def test_check_of_a_good_adapter(
    capsys: pytest.CaptureFixture[str], adapter: Path, model: str
) -> None:
    for extra in ([], ["--base", model]):
        code, out, _ = run(capsys, "adapter", "check", str(adapter), *extra)
        assert code == 0
        assert "ranks    8" in out
        assert "targets  q_proj, v_proj" in out
        assert BASE_NAME in out


def test_check_shows_which_model_was_trained(
    capsys: pytest.CaptureFixture[str], adapter: Path, model: str
) -> None:
    tensors = lora_tensors(base(), rank=8, targets=("q_proj", "v_proj"))
    inner = {name.replace("model.model.model.", "model.model."): t for name, t in tensors.items()}
    (adapter / "adapter_model.safetensors").write_bytes(safetensors_bytes(inner))
    for extra in ([], ["--base", model]):
        code, out, _ = run(capsys, "adapter", "check", str(adapter), *extra)
        assert (code, "\n  names    of tensors are those of the inner model\n" in out) == (0, True)
    _, out, _ = run(capsys, "adapter", "check", str(adapter), "--json")
    assert json.loads(out)["trained_on"] == "the inner model"


def test_check_shows_what_is_missing(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, model: str
) -> None:
    folder = str(write_adapter(tmp_path / "cut", base(), layers=[0]))
    code, out, _ = run(capsys, "adapter", "check", folder, "--base", model)
    words = "partial: 2 of 4 targeted modules have weights, 2 are missing; 1 of 2 layers: 0"
    assert (code, f"\n  {words}\n" in out) == (0, True)
    code, out, _ = run(capsys, "adapter", "check", folder, "--base", model, "--json")
    told = json.loads(out)
    assert (code, told["can_be_served"], told["partial"]["message"]) == (0, True, words)
    assert (told["partial"]["modules"], told["partial"]["targeted_layers"]) == (2, 2)
    whole = str(write_adapter(tmp_path / "whole", base()))
    _, out, _ = run(capsys, "adapter", "check", whole, "--json")
    assert json.loads(out)["partial"] is None


def test_check_shows_the_ends_of_answers(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """Those that the files name, and what the template closes a turn with; not the base's."""
    folder = shutil.copytree(min(adapter_paths().values()), tmp_path / "own")
    template = "{% for m in messages %}{{ m.content }}<|system|>{% endfor %}"
    settings = {"eos_token": "<|user|>", "chat_template": template}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    argv = ("adapter", "check", str(folder))
    code, out, _ = run(capsys, *argv, "--base", "demo")
    ids = dict.fromkeys(("<|user|>", "<|system|>"), 0)
    words = json.loads((model_path() / "tokenizer.json").read_text())["added_tokens"]
    ids |= {word["content"]: word["id"] for word in words if word["content"] in ids}
    shown = ", ".join(f"{text} ({i})" for text, i in sorted(ids.items(), key=lambda item: item[1]))
    assert (code, f"\n  ends     {shown}, beside the base's\n" in out) == (0, True)
    _, out, _ = run(capsys, *argv, "--base", "demo", "--json")
    assert {end["token"]: end["id"] for end in json.loads(out)["ends"]} == ids
    _, out, _ = run(capsys, *argv, "--json")
    assert json.loads(out)["ends"] is None


def test_check_reports_copies_that_were_not_compared(
    capsys: pytest.CaptureFixture[str], adapter: Path, model: str
) -> None:
    """The model's embeddings are zeros, and its head is tied to them."""
    tensors = lora_tensors(base(), rank=8, targets=("q_proj", "v_proj"))
    tensors["base_model.model.lm_head.weight"] = np.zeros((VOCAB, 32), np.float32)
    (adapter / "adapter_model.safetensors").write_bytes(safetensors_bytes(tensors))
    code, out, _ = run(capsys, "adapter", "check", str(adapter))
    assert code == 0
    assert "copies   of the base's lm_head: not compared; --base MODEL does that" in out
    code, out, _ = run(capsys, "adapter", "check", str(adapter), "--base", model)
    assert code == 0
    assert "not compared" not in out


def test_check_says_what_needs_the_base(capsys: pytest.CaptureFixture[str], adapter: Path) -> None:
    tensors = lora_tensors(base(), rank=8, targets=("q_proj", "v_proj"))
    own = "base_model.model.model.visual.blocks.0.attn.qkv.lora_A.weight"
    other = own.replace("lora_A", "lora_B")
    tensors |= {own: np.zeros((8, 4), np.float32), other: np.zeros((6, 8), np.float32)}
    (adapter / "adapter_model.safetensors").write_bytes(safetensors_bytes(tensors))
    code, out, _ = run(capsys, "adapter", "check", str(adapter))
    assert (code, "cannot be checked without --base MODEL: 2 reasons\n" in out) == (1, True)
    assert f"  needs_base at {own}: can only be checked against the base model" in out


def test_check_lists_all_violations(
    capsys: pytest.CaptureFixture[str], adapter: Path, model: str
) -> None:
    config = json.loads((adapter / "adapter_config.json").read_text())
    config |= {"use_qalora": True, "base_model_name_or_path": "other/model"}
    (adapter / "adapter_config.json").write_text(json.dumps(config))
    code, out, _ = run(capsys, "adapter", "check", str(adapter), "--base", model)
    assert code == 1
    assert "use_qalora" in out
    assert "wrong_base" in out
    code, told, _ = run(capsys, "adapter", "check", str(adapter), "--base", model, "--json")
    assert (code, json.loads(told)["can_be_served"]) == (1, False)
    codes = {violation["code"] for violation in json.loads(told)["violations"]}
    assert codes == {"unsupported_feature", "wrong_base"}
    code, out, _ = run(
        capsys, "adapter", "check", str(adapter), "--base", model, "--allow-other-base"
    )
    assert "wrong_base" not in out
    named = ["--model-name", "other/model"]
    code, out, _ = run(capsys, "adapter", "check", str(adapter), "--base", model, *named)
    assert "use_qalora" in out
    assert "wrong_base" not in out
    for alone in (named, ["--allow-other-base"]):
        code, _, err = run(capsys, "adapter", "check", str(adapter), *alone)
        assert (code, "that --base says" in err) == (2, True)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--advertise", "ws://gpu-1:8090"], "--advertise is what routers find by --redis"),
        (["--kv-memory", "1GiB", "--gpu-memory-utilization", "0.5"], "and so does --kv-memory"),
    ],
)
def test_a_worker_refuses_what_another_option_makes_void(
    capsys: pytest.CaptureFixture[str], options: list[str], words: str
) -> None:
    code, out, err = run(capsys, "worker", "./nowhere", *options)
    assert (code, out, len(err.splitlines())) == (2, "", 1)
    assert words in err


@pytest.mark.parametrize("by_path", [False, True])
def test_check_knows_the_demo_by_all_of_a_workers_names(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, by_path: bool
) -> None:
    folder = shutil.copytree(adapter_paths()["polite"], tmp_path / "mine")
    config = json.loads((folder / "adapter_config.json").read_text())
    for name in (str(model_path()), "loraplex/demo", "elsewhere/model"):
        config["base_model_name_or_path"] = name
        (folder / "adapter_config.json").write_text(json.dumps(config))
        base_given = str(model_path()) if by_path else "demo"
        code, out, _ = run(capsys, "adapter", "check", str(folder), "--base", base_given)
        assert code == 0, out


@pytest.mark.parametrize("ref", ["/no/such/folder", "local:nowhere", "hub:../x", "nowhere"])
def test_check_of_what_is_not_there(capsys: pytest.CaptureFixture[str], ref: str) -> None:
    code, out, err = run(capsys, "adapter", "check", ref)
    assert code == 1
    assert not out
    assert err.startswith("loraplex: ")
    assert len(err.splitlines()) == 1


@pytest.mark.parametrize(
    ("out", "why"), [("", "it is a folder"), ("absent/slab", "there is no folder")]
)
def test_a_slab_that_could_not_be_written_is_not_packed(
    capsys: pytest.CaptureFixture[str], adapter: Path, tmp_path: Path, out: str, why: str
) -> None:
    cache = tmp_path / "cache"
    place = ["--out", str(tmp_path / out), "--cache-dir", str(cache)]
    code, told, err = run(capsys, "adapter", "pack", str(adapter), "--base", "demo", *place)
    assert (code, told) == (2, "")
    assert err.startswith(f"loraplex: --out {tmp_path / out}: {why}")
    assert not cache.exists()


def test_a_full_disk_is_said(
    capsys: pytest.CaptureFixture[str], adapter: Path, model: str, tmp_path: Path
) -> None:
    place = ["--out", "/dev/full", "--cache-dir", str(tmp_path / "cache")]
    code, _, err = run(capsys, "adapter", "pack", str(adapter), "--base", model, *place)
    assert code == 1
    assert err.endswith("loraplex: --out /dev/full cannot be written: No space left on device\n")


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (("rollout", "x", "a=5", "--end"), "--end ends the rollout"),
        (("rollout", "x", "--end", "--no-guards"), "--end ends the rollout"),
        (("rollout", "x", "--no-guards"), "--no-guards needs the versions"),
        (("rollout", "x", "--window-s", "60"), "--window-s needs the versions"),
        (("rollout", "x", "a=1", "--no-guards", "--window-s", "60"), "contradict"),
        (("rollout", "x", "a=1", "--max-latency-ratio", "nan"), "expected a number, got 'nan'"),
        (("rollout", "x", "a=1", "--max-latency-ratio", "1e999"), "expected a number, got"),
        (("list", "--url", "localhost:8080"), "--url must be http://"),
        (("list", "--url", "ftp://localhost"), "--url must be http://"),
        (("list", "--url", "http://a\x01"), "--url must be http://"),
        (("list", "--url", ""), "--url must be http://"),
        (("register", "x", "org/x", "--token-file", ""), "--token-file '' cannot be read"),
    ],
)
def test_what_contradicts_itself_is_not_sent(
    capsys: pytest.CaptureFixture[str], words: tuple[str, ...], why: str
) -> None:
    code, out, err = run(capsys, "adapter", *words)
    assert (code, out) == (2, "")
    assert why in err


def test_an_admin_key_that_no_header_takes(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LORAPLEX_ADMIN_KEY", "ключ")
    for words in (("adapter", "list"), ("key", "list"), ("router", "--worker", "ws://a:1")):
        code, _, err = run(capsys, *words)
        assert code == 2
        assert "must be ASCII" in err
        assert "ключ" not in err


def test_pull_and_pack(
    capsys: pytest.CaptureFixture[str], adapter: Path, model: str, tmp_path: Path
) -> None:
    cache, slab = str(tmp_path / "cache"), tmp_path / "slab"
    options = ["--base", model, "--cache-dir", cache]
    code, pulled, _ = run(capsys, "adapter", "pull", str(adapter), *options)
    assert code == 0
    code, packed, err = run(
        capsys, "adapter", "pack", str(adapter), *options, "--dtype", "float16", "--out", str(slab)
    )
    assert code == 0
    assert pulled == packed
    assert "fetching" not in err, "it was in the store"
    layout = read_layout(slab)
    assert layout.dtype == "float16"
    assert layout.digest in packed


def test_a_base_that_is_not_there(capsys: pytest.CaptureFixture[str], adapter: Path) -> None:
    code, _, err = run(capsys, "adapter", "check", str(adapter), "--base", "/no/model")
    assert code == 1
    assert "no folder /no/model" in err


def test_info_without_torch(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    code, out, _ = run(capsys, "info", "--json")
    assert code == 0
    facts = msgspec.json.decode(out, type=MachineFacts)
    assert facts.device in ("cpu", "cuda")
    code, out, _ = run(capsys, "info")
    assert code == 0
    for ability in facts.abilities:
        assert ability.name in out


def test_info_says_which_helpers_do_not_start(monkeypatch: pytest.MonkeyPatch) -> None:
    names = ("grammar_checker", "template_renderer")
    assert all(each.available for each in gather().abilities if each.name in names)
    monkeypatch.setattr("loraplex.adapters.helpers.helper._PROGRAM", "import nowhere")
    found = {each.name: each for each in gather().abilities}
    for name in names:
        assert not found[name].available
        assert "No module named 'nowhere'" in found[name].detail


def test_info_says_what_is_missing_and_what_to_do() -> None:
    facts = msgspec.structs.replace(gather(), libraries=dict.fromkeys(gather().libraries))
    text = to_text(facts)
    assert "torch       not installed" in text


def test_version_and_help(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "--version")
    assert code == 0
    assert out.startswith("loraplex ")
    for command in ("serve", "router", "worker"):
        code, out, _ = run(capsys, command, "--help")
        assert code == 0
        assert "LORAPLEX_PORT" in out
        assert f"  loraplex {command}" in out or f"loraplex {command} " in out
    code, _, err = run(capsys, "srve")
    assert code == 2


INTERRUPTED = """
import signal, sys
from loraplex.__main__ import main

class Interrupts:
    def find_spec(self, name, *rest):
        if name == "loraplex.router.config":
            signal.raise_signal(signal.SIGINT)

sys.meta_path.insert(0, Interrupts())
signal.signal(signal.SIGINT, signal.{handler})
sys.argv = ["loraplex", "--version"]
main()
"""


@pytest.mark.parametrize(("handler", "code"), [("default_int_handler", 130), ("SIG_IGN", 0)])
def test_ctrl_c_during_imports_ends_silently(handler: str, code: int) -> None:
    """A shell has Ctrl-C ignored by what it runs in the background."""
    command = [sys.executable, "-c", INTERRUPTED.format(handler=handler)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert (done.returncode, done.stderr, bool(done.stdout)) == (code, "", code == 0)
