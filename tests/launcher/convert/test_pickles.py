"""Pickles are read by a bounded process: what is honest comes through, nothing else does."""

import io
import os
import pickle
import re
import struct
import zipfile
from collections import OrderedDict
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import IO, Any

import msgspec
import pytest
import torch

from loraplex.adapters.errors import AdapterError
from loraplex.adapters.safetensors.file import open_weights
from loraplex.adapters.safetensors.header import TensorInfo
from loraplex.launcher.convert import pickles, unpickle
from loraplex.launcher.convert.pickles import PickleLimits, read_pickle
from tests.grids import beyond

pytestmark = pytest.mark.filterwarnings("ignore")
ROOT = Path(__file__).parents[3]
NAME = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"
OTHER = NAME.replace("lora_A", "lora_B")
MIB = 1 << 20


def saved(value: object, path: Path, zipped: bool = True) -> Path:
    torch.save(value, path, _use_new_zipfile_serialization=zipped)
    return path


def read(source: Path, **options: Any) -> dict[str, tuple[TensorInfo, bytes]]:
    target = source.with_suffix(".read")
    read_pickle(source, target, **options)
    with open_weights(target) as file:
        return {tensor.name: (tensor, file.read(tensor).tobytes()) for tensor in file.tensors()}


def refused(source: Path, **options: Any) -> str:
    """Why; in one printable sentence."""
    target = source.with_suffix(".read")
    with pytest.raises(AdapterError) as error:
        read_pickle(source, target, **options)
    message = error.value.message
    assert message.isprintable()
    assert message.isascii()
    assert len(message) < 1500
    return message


@pytest.fixture
def within(monkeypatch: pytest.MonkeyPatch) -> None:
    """The reader runs in this process, which it does not bound: another takes a second to start."""

    def run(name: str, file: IO[bytes], target: Path, order: unpickle.UnpickleOrder) -> None:
        said = io.TextIOWrapper(io.BytesIO())
        with monkeypatch.context() as patch:
            patch.setattr(unpickle, "_bound", lambda order: None)
            patch.setattr(torch, "set_num_threads", lambda count: None)
            patch.setattr("sys.stdin", io.TextIOWrapper(file))
            patch.setattr("sys.stderr", said)
            try:
                unpickle.main(msgspec.json.encode(order).decode(), str(target))
            except SystemExit as end:
                code = end.code
            else:
                return
        assert isinstance(code, int)
        said.seek(0)
        raise pickles._refused(name, pickles._end_of(code, said.buffer.read(), order))

    monkeypatch.setattr(pickles, "_run", run)


# What is honest

DTYPES = (
    *(torch.float32, torch.float16, torch.bfloat16, torch.float64),
    *(torch.float8_e4m3fn, torch.float8_e5m2, torch.int8, torch.bool),
)


@pytest.mark.parametrize("zipped", beyond(1, [True, False]), ids=["zip", "legacy"])
def test_every_value_of_every_dtype_comes_through(tmp_path: Path, zipped: bool) -> None:
    values = torch.randn(6, 10)
    # torch itself reads no numbers of 8 bits from the old form.
    dtypes = DTYPES if zipped else [d for d in DTYPES if "float8" not in str(d)]
    tensors = {f"{NAME}.{number}": values.to(dtype) for number, dtype in enumerate(dtypes)}
    tensors["transposed"] = values.T
    tensors["part"] = values[1:3, ::2]
    tensors["scalar"] = torch.tensor(3.5)
    tensors["empty"] = torch.zeros(0, 4)
    tensors["parameter"] = torch.nn.Parameter(values)
    found = read(saved(tensors, tmp_path / "a.bin", zipped))
    assert found.keys() == tensors.keys()
    for name, tensor in tensors.items():
        info, raw = found[name]
        assert info.shape == tuple(tensor.shape)
        flat = tensor.detach().contiguous().reshape(-1)
        assert raw == flat.view(torch.uint8).numpy().tobytes(), name
    if zipped:
        written = [found[f"{NAME}.{number}"][0].dtype for number in range(len(DTYPES))]
        assert written == ["F32", "F16", "BF16", "F64", "F8_E4M3", "F8_E5M2", "I8", "BOOL"]


@pytest.mark.exhaustive
def test_a_large_one(tmp_path: Path) -> None:
    value = torch.arange(12 * MIB, dtype=torch.float32).reshape(3 * MIB, 4)
    ((_, raw),) = read(saved({NAME: value}, tmp_path / "a.bin")).values()
    assert raw == value.numpy().tobytes()


PLAIN = {NAME: torch.ones(2, 3), OTHER: torch.ones(4, 2)}


@pytest.mark.usefixtures("within")
def test_a_state_dict_within_others_is_found(tmp_path: Path) -> None:
    parallel = OrderedDict((f"module.{name}", tensor) for name, tensor in PLAIN.items())
    value = {"state_dict": parallel, "epoch": 3, "optimizer": {"state": {0: torch.ones(1)}}}
    assert read(saved(value, tmp_path / "a.pt")).keys() == PLAIN.keys()


@pytest.mark.usefixtures("within")
@pytest.mark.parametrize(
    ("value", "words"),
    [
        (PLAIN | {"epoch": 3}, "'epoch' is no tensor but a value of type int"),
        (PLAIN | {"s": torch.eye(3).to_sparse()}, "'s' is no plain tensor"),
        (PLAIN | {"c": torch.ones(2, dtype=torch.complex64)}, "complex64"),
        (PLAIN | {"m": torch.ones(2, device="meta")}, "on meta"),
        ({NAME: torch.ones(1).expand(100_000, 100_000)}, "tensors take more than"),
        (torch.nn.Linear(2, 2), "asks for torch.nn.modules.linear.Linear"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_refused_values(tmp_path: Path, value: object, words: str) -> None:
    assert words in refused(saved(value, tmp_path / "a.pt"))


@pytest.mark.exhaustive
def test_more_tensors_than_are_read(tmp_path: Path) -> None:
    value = {f"{NAME}{number}": torch.ones(1) for number in range(20_001)}
    assert "20001 tensors" in refused(saved(value, tmp_path / "a.pt"))


# What is hostile


class _Runs:
    """Unpickled by pickle itself, it calls what it was made with."""

    def __init__(self, call: Callable[..., object], *arguments: object) -> None:
        self._reduced = (call, arguments)

    def __reduce__(self) -> Any:
        return self._reduced


@pytest.mark.parametrize(
    ("call", "form"),
    [
        (os.system, "zip"),
        pytest.param(os.system, "plain", marks=pytest.mark.exhaustive),
        pytest.param(os.system, "legacy", marks=pytest.mark.exhaustive),
        pytest.param(eval, "zip", marks=pytest.mark.exhaustive),
        pytest.param(__import__, "legacy", marks=pytest.mark.exhaustive),
        pytest.param(torch.load, "zip", marks=pytest.mark.exhaustive),
    ],
)
def test_nothing_that_a_pickle_names_runs(
    tmp_path: Path, call: Callable[..., object], form: str
) -> None:
    mark = tmp_path / "ran"
    argument = {os.system: f"touch {mark}", eval: f"open({str(mark)!r}, 'w')", __import__: "this"}
    hostile = {NAME: _Runs(call, argument.get(call, str(mark)))}
    source = tmp_path / "adapter_model.bin"
    if form == "plain":
        source.write_bytes(pickle.dumps(hostile))
    else:
        saved(hostile, source, zipped=form == "zip")
    message = refused(source)
    assert "asks for" in message or "something else than plain weights" in message
    assert "weights_only" not in message
    assert not mark.exists()


def zip_of(path: Path, data: bytes, compression: int = zipfile.ZIP_STORED, times: int = 1) -> Path:
    """A file of torch's form. data: its pickle, repeated."""
    with zipfile.ZipFile(path, "w", compression) as archive:
        with archive.open("archive/data.pkl", "w", force_zip64=True) as entry:
            for _ in range(times):
                entry.write(data)
        archive.writestr("archive/version", b"3\n")
        archive.writestr("archive/byteorder", b"little")
    return path


def test_a_zip_bomb(tmp_path: Path) -> None:
    source = zip_of(tmp_path / "a.bin", bytes(16 * MIB), zipfile.ZIP_DEFLATED, times=18)
    assert source.stat().st_size < MIB
    assert re.search("more than 25[67] MiB of memory", refused(source))


def frame(*operations: bytes) -> bytes:
    return pickle.PROTO + b"\x02" + b"".join(operations) + pickle.STOP


def test_a_key_whose_hash_takes_for_ever(tmp_path: Path) -> None:
    """A tuple of itself twice, 64 times over: small to store, and hashed in 2^64 steps."""
    double = [b"q" + bytes([i]) + b"h" + bytes([i]) + pickle.TUPLE2 for i in range(64)]
    data = frame(pickle.EMPTY_DICT, pickle.EMPTY_TUPLE, *double, pickle.NONE, pickle.SETITEM)
    message = refused(zip_of(tmp_path / "a.bin", data), limits=PickleLimits(spare_s=1))
    assert "processor time" in message or "takes more than 4 s" in message


@pytest.mark.exhaustive
def test_deep_nesting(tmp_path: Path) -> None:
    data = frame(pickle.EMPTY_LIST * 1_000_000, pickle.APPEND * 999_999)
    refused(zip_of(tmp_path / "a.bin", data))


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "claim",
    [
        pickle.BINUNICODE8 + struct.pack("<Q", 1 << 40),
        pickle.BINBYTES8 + struct.pack("<Q", 1 << 40),
        pickle.LONG4 + struct.pack("<i", 1 << 30),
    ],
)
def test_values_that_claim_to_be_large(tmp_path: Path, claim: bytes) -> None:
    refused(zip_of(tmp_path / "a.bin", frame(claim)))


def spoiled(data: bytes) -> Mapping[str, bytes]:
    return {
        "nothing": b"",
        "text": b"hello",
        "pointer": b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n",
        "half": data[: len(data) // 2],
        "zeros": bytes(1000),
        "tail": data + bytes(1000),
        "flipped": bytes(byte ^ (index % 97 == 0) for index, byte in enumerate(data)),
    }


@pytest.mark.parametrize(
    "kind",
    [
        pytest.param(kind, marks=[] if kind in ("half", "pointer") else pytest.mark.exhaustive)
        for kind in spoiled(b"")
    ],
)
def test_spoiled_files(tmp_path: Path, kind: str) -> None:
    """An error, or what torch reads in spite of it; never more."""
    buffer = io.BytesIO()
    torch.save(PLAIN, buffer)
    source = tmp_path / "a.bin"
    source.write_bytes(spoiled(buffer.getvalue())[kind])
    if kind in ("tail", "flipped"):
        target = tmp_path / "b"
        try:
            read_pickle(source, target)
        except AdapterError:
            return
        with open_weights(target) as file:
            assert len(file.tensors()) <= len(PLAIN)
    else:
        assert ("Git-LFS" in refused(source)) is (kind == "pointer")


@pytest.mark.usefixtures("within")
def test_a_torchscript_program(tmp_path: Path) -> None:
    torch.jit.save(torch.jit.script(torch.nn.Linear(2, 2)), tmp_path / "a.pt")
    assert "TorchScript" in refused(tmp_path / "a.pt")


def test_what_is_no_file(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "a.bin")
    assert "regular file" in refused(tmp_path / "a.bin")


def test_a_file_that_is_too_large(tmp_path: Path) -> None:
    source = tmp_path / "a.bin"
    with source.open("wb") as file:
        file.truncate((4 << 30) + 1)
    assert "at most 4294967296 are read" in refused(source)


# What the parent believes


@pytest.fixture
def lying(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pickles, "_MODULE", "tests.launcher.convert.lying_child")


@pytest.mark.usefixtures("lying")
@pytest.mark.parametrize(
    ("word", "words"),
    [
        ("die", "ended by signal 11"),
        ("shout", r"code 7: \x1b[31m"),
    ],
)
def test_a_reader_that_was_taken_over(tmp_path: Path, word: str, words: str) -> None:
    source = tmp_path / f"{word}.bin"
    source.write_bytes(bytes(10))
    assert words in refused(source)


@pytest.mark.usefixtures("lying")
def test_a_reader_that_never_ends(tmp_path: Path) -> None:
    source = tmp_path / "hang_quietly.bin"
    source.write_bytes(bytes(10))
    assert "takes more than 4 s" in refused(source, limits=PickleLimits(spare_s=1))


@pytest.mark.usefixtures("lying")
def test_bytes_of_a_reader_are_checked(tmp_path: Path) -> None:
    (tmp_path / "overlap.bin").write_bytes(bytes(10))
    with pytest.raises(AdapterError) as error:
        read(tmp_path / "overlap.bin")
    assert [violation.code for violation in error.value.violations] == ["overlap"]


def test_without_torch(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert "loraplex[convert]" in refused(saved(PLAIN, tmp_path / "a.bin"))


def test_the_reader_gets_no_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    assert pickles._environment().keys() == {"PYTHONPATH", "OMP_NUM_THREADS"}
