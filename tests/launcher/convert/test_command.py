"""`loraplex adapter convert`: files, words and exit codes."""

import json
import os
import re
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file, save_file

from loraplex.launcher.__main__ import main
from loraplex.launcher.convert import convert as converting
from tests.launcher.convert.folders import (
    BASE_NAME,
    HIDDEN,
    VOCAB,
    as_mlx_runs_it,
    layer_pairs,
    logits,
    model,
    pair,
    write_mlx,
)
from tests.launcher.convert.methods import made_by_peft
from tests.server.model.hub_models import make_model, save_model
from tests.server.worker.worker_process import NO_WORDS

pytestmark = pytest.mark.filterwarnings("ignore")
CONFIG = "adapter_config.json"
WEIGHTS = "adapter_model.safetensors"
PATH = "base_model.model.model.layers.1.self_attn.q_proj"
TENSORS = {f"{PATH}.lora_A.weight": torch.randn(4, 32), f"{PATH}.lora_B.weight": torch.randn(32, 4)}
PEFT_CONFIG = {
    "peft_type": "LORA",
    "base_model_name_or_path": "org/base",
    "r": 4,
    "lora_alpha": 8,
    "target_modules": ["q_proj"],
}


def run(capsys: pytest.CaptureFixture[str], *argv: object) -> tuple[int, str, str]:
    code: str | int | None = 0
    try:
        main(list(map(str, argv)))
    except SystemExit as end:
        code = end.code
    assert isinstance(code, int)
    return code, *capsys.readouterr()


def convert(
    capsys: pytest.CaptureFixture[str], source: Path, *more: object
) -> tuple[int, str, str]:
    """To `out` beside the source."""
    return run(capsys, "adapter", "convert", source, "--out", source.parent / "out", *more)


def write_pickle(folder: Path, name: str = "adapter_model.bin", **changes: Any) -> Path:
    folder.mkdir()
    torch.save(TENSORS, folder / name)
    (folder / CONFIG).write_text(json.dumps(PEFT_CONFIG | changes))
    return folder


def files(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_mlx(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    source = write_mlx(tmp_path / "mlx", layer_pairs(1, 2))
    code, out, err = convert(capsys, source)
    assert (code, err) == (0, "")
    assert f"{source} (mlx-lm, adapters.safetensors) was converted to {tmp_path / 'out'}" in out
    for line in ("tensors  28, compared value by value", "scale    20", "ranks    4"):
        assert line in out
    assert f"base     {BASE_NAME}" in out
    assert "note" not in out
    assert files(tmp_path / "out") == [CONFIG, WEIGHTS]
    assert files(tmp_path) == ["mlx", "out"]
    assert os.stat(tmp_path / "out").st_mode & 0o777 == 0o777 & ~umask()


def umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def test_a_pickle(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """Names, values and the config as they were; what serving reads comes along, state does not."""
    source = write_pickle(tmp_path / "of 2023")
    (source / "chat_template.jinja").write_text("{{ messages[0].content }}")
    (source / "training_args.bin").write_bytes(b"x")
    (tmp_path / "out").mkdir()
    code, out, _ = convert(capsys, source, "--json")
    assert code == 0
    report = json.loads(out)
    assert report["can_be_served"] is True
    assert report["conversion"] == {
        "source": str(source),
        "out": str(tmp_path / "out"),
        "form": "PEFT",
        "weights": "adapter_model.bin",
        "tensors": 2,
        "scales": [2.0],
        "copied": ["chat_template.jinja"],
        "notes": [],
        "fit": None,
    }
    assert files(tmp_path / "out") == [CONFIG, WEIGHTS, "chat_template.jinja"]
    assert (tmp_path / "out" / CONFIG).read_bytes() == (source / CONFIG).read_bytes()
    found = load_file(tmp_path / "out" / WEIGHTS)
    assert found.keys() == TENSORS.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in TENSORS.items())


def test_peft_under_another_name(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    source = write_pickle(tmp_path / "a", "old.pt")
    save_file(TENSORS, source / "lora.safetensors")
    assert convert(capsys, source)[0] == 1, "there are two"
    code, out, _ = convert(capsys, source, "--weights", "lora.safetensors")
    assert code == 0
    assert "not used: 'old.pt'" in out


def test_a_tied_base(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """What adapts the embedding adapts the head: only --base shows whether they are one."""
    base = tmp_path / BASE_NAME.partition("/")[2]
    model(tied=True).save_pretrained(base)
    (base / "tokenizer.json").write_text(NO_WORDS)
    tensors = pair("model.embed_tokens", VOCAB, HIDDEN, rank=4, seed=7) | layer_pairs(0)
    source = write_mlx(tmp_path / "mlx", tensors)
    code, _, err = convert(capsys, source)
    assert code == 1
    assert "--base MODEL" in err
    code, out, _ = convert(capsys, source, "--base", base)
    assert code == 0, out
    assert "the head is tied to embed_tokens" in out
    ours = PeftModel.from_pretrained(model(tied=True), str(tmp_path / "out"))
    expected = logits(as_mlx_runs_it(tensors, tied=True))
    torch.testing.assert_close(logits(ours), expected, rtol=1e-4, atol=1e-4)


def test_what_the_files_do_not_say(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    source = write_mlx(tmp_path / "mlx", layer_pairs(0), lora_parameters={"rank": 4}, model=None)
    assert "--scale NUMBER" in convert(capsys, source)[2]
    code, out, _ = convert(capsys, source, "--scale", "1.5", "--base-name", "org/base")
    assert code == 0
    assert "scale    1.5" in out
    assert "base     org/base" in out


@pytest.mark.parametrize("value", ["0", "nan", "x", "inf"])
def test_a_scale_that_is_none(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, value: str
) -> None:
    source = write_mlx(tmp_path / "mlx", layer_pairs(0))
    code, _, err = convert(capsys, source, "--scale", value)
    assert code == 2
    assert "--scale must be a number and not 0" in err


# Refusals leave nothing behind


def _ready(folder: Path) -> None:
    folder.mkdir()
    save_file(TENSORS, folder / WEIGHTS)
    (folder / CONFIG).write_text(json.dumps(PEFT_CONFIG))


def _images(folder: Path) -> None:
    folder.mkdir()
    tensors = {"lora_unet_down_blocks_0.lora_down.weight": torch.ones(2, 2)}
    save_file(tensors, folder / "anime.safetensors")


def _checkpoints(folder: Path) -> None:
    for name in ("checkpoint-10", "checkpoint-20"):
        (folder / name).mkdir(parents=True)
        (folder / name / CONFIG).write_text("{}")
    (folder / "runs").mkdir()


def _bad_pickle(folder: Path) -> None:
    write_pickle(folder)
    (folder / "adapter_model.bin").write_bytes(b"cposix\nsystem\n(S'true'\ntR.")


def _no_config(folder: Path) -> None:
    write_pickle(folder)
    (folder / CONFIG).unlink()


def _not_finite(folder: Path) -> None:
    tensors = layer_pairs(0)
    next(iter(tensors.values()))[0, 0] = torch.nan
    write_mlx(folder, tensors)


REFUSED: dict[str, tuple[Callable[[Path], object], str]] = {
    "nothing there": (lambda folder: None, "is no folder of this machine"),
    "a file": (lambda folder: folder.write_text("x"), "is a file; name its folder"),
    "an empty folder": (Path.mkdir, "no weights of an adapter"),
    "a LoRA for images": (_images, "LoRA for images"),
    "ready": (_ready, "nothing to convert"),
    "checkpoints": (_checkpoints, "in/checkpoint-20 or .*/in/checkpoint-10"),
    "no config": (_no_config, "there is no adapter_config.json"),
    "a config that is none": (
        lambda folder: (write_pickle(folder) / CONFIG).write_text("[1]"),
        "not a JSON object",
    ),
    "a hostile pickle": (_bad_pickle, "adapter_model.bin cannot be converted"),
    "DoRA": (lambda folder: write_mlx(folder, layer_pairs(0), fine_tune_type="dora"), "DoRA"),
    "another method": (
        lambda folder: write_pickle(folder, use_qalora=True),
        "unsupported_feature at use_qalora",
    ),
    "an unknown module": (
        lambda folder: write_mlx(
            folder, layer_pairs(0) | pair("model.layers.0.x.y_proj", 8, 8, 2, 0)
        ),
        "unknown_module",
    ),
    "not finite": (_not_finite, "not_finite"),
    "a large file of the tokenizer": (
        lambda folder: (write_pickle(folder) / "tokenizer.json").write_bytes(bytes(65 << 20)),
        "tokenizer.json has more than",
    ),
}


# These read a pickle in a process of its own, as "a hostile pickle" does.
PICKLES = {"no config", "another method", "a large file of the tokenizer"}


@pytest.mark.parametrize(
    "kind",
    [pytest.param(k, marks=pytest.mark.exhaustive if k in PICKLES else ()) for k in REFUSED],
)
def test_refusals_leave_nothing(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, kind: str
) -> None:
    make, words = REFUSED[kind]
    make(tmp_path / "in")
    before = files(tmp_path)
    code, out, err = convert(capsys, tmp_path / "in")
    assert code == 1
    assert re.search(words, out + err), out + err
    assert files(tmp_path) == before


def test_another_base_is_refused_with_its_reasons(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    source = write_mlx(tmp_path / "mlx", layer_pairs(0))
    code, out, _ = convert(capsys, source, "--base", "demo", "--json")
    assert code == 1
    codes = {violation["code"] for violation in json.loads(out)["violations"]}
    assert {"wrong_base", "shape_mismatch"} <= codes
    assert files(tmp_path) == ["mlx"]


@pytest.mark.parametrize("kind", ["full", "file", "nowhere"])
def test_a_place_that_cannot_be_used(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, kind: str
) -> None:
    source = write_mlx(tmp_path / "mlx", layer_pairs(0))
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "x").touch()
    (tmp_path / "file").touch()
    place = tmp_path / "no" / "where" if kind == "nowhere" else tmp_path / kind
    code, _, err = run(capsys, "adapter", "convert", source, "--out", place)
    assert code == 2
    assert str(place) in err
    assert files(tmp_path) == ["file", "full", "mlx"]
    assert files(tmp_path / "full") == ["x"]


@contextmanager
def interruptible() -> Iterator[None]:
    """Ctrl-C raises KeyboardInterrupt, also where a shell started the tests in the background. Such
    a shell has SIGINT ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)]
)
def test_signals_leave_nothing(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    number: signal.Signals,
    code: int,
) -> None:
    """One that comes when all is written, and is not there yet."""
    source = write_mlx(tmp_path / "mlx", layer_pairs(0))
    monkeypatch.setattr(converting, "publish", lambda *_: signal.raise_signal(number))
    with interruptible():
        before = signal.getsignal(number)
        assert convert(capsys, source)[0] == code
        assert signal.getsignal(number) is before
    assert files(tmp_path) == ["mlx"]


def test_a_write_that_went_wrong_is_seen(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    source = write_mlx(tmp_path / "mlx", layer_pairs(0))
    pieces = converting._pieces
    monkeypatch.setattr(
        converting, "_pieces", lambda *of: (bytes(len(piece)) for piece in pieces(*of))
    )
    code, _, err = convert(capsys, source)
    assert code == 1
    assert "was not written as it was read" in err
    assert files(tmp_path) == ["mlx"]


def test_refusals_of_serving_name_the_command(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    for folder in (write_pickle(tmp_path / "a"), write_mlx(tmp_path / "b", layer_pairs(0))):
        code, out, _ = run(capsys, "adapter", "check", folder)
        assert code == 1
        assert "cannot be served: 1 reason\n" in out
        assert "`loraplex adapter convert FOLDER --out OUT` makes a safetensors adapter" in out


def test_another_method(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """The report states ranks and errors; what is beyond the error is refused with both figures."""
    source, base = tmp_path / "loha", save_model(make_model("qwen2"), tmp_path / "base")
    (base / "tokenizer.json").write_text(NO_WORDS)
    made_by_peft("loha_wide", "qwen2", source)
    options = ("--base", base, "--allow-other-base")
    code, out, err = convert(capsys, source, *options, "--rank", 5)
    assert (code, out) == (1, "")
    assert re.search(r"rank 5 loses 0\.\d+ of model\S+ .* and 0\.\d+ of all modules", err)
    assert not (tmp_path / "out").exists()
    code, out, err = convert(capsys, source, *options, "--rank", 5, "--max-error", 0.999)
    assert (code, err) == (0, "")
    assert re.search(r"error    at most 0\.\d+ \(model\S+\), 0\.\d+ over all modules", out)
    assert "(PEFT, LOHA, adapter_model.safetensors) was converted" in out
    assert "ranks    5" in out
    ranks = ("0", "x", "65537", "9" * 5000)
    for wrong in (
        *(("--rank", rank) for rank in ranks),
        ("--max-error", "1"),
        ("--max-error", "nan"),
    ):
        code, out, err = run(
            capsys, "adapter", "convert", source, "--out", tmp_path / "other", *wrong
        )
        assert code == 2
        assert wrong[0] in err
