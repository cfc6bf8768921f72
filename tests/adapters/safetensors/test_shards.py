"""Weights in several files: the same adapter as in one, or refused by name."""

import json
import shutil
import ssl
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from peft import LoraConfig
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, LlamaForCausalLM

from loraplex.adapters.judge import judge_folder
from loraplex.adapters.peft.validate import AdapterLimits
from loraplex.adapters.ref import AdapterRef
from loraplex.adapters.safetensors.file import open_shards, open_weights
from loraplex.adapters.safetensors.header import MAX_SHARDS
from loraplex.adapters.sources.https import HttpsSource
from loraplex.adapters.sources.hub import HubSource
from loraplex.adapters.sources.local import LocalSource
from loraplex.adapters.sources.s3 import S3Source
from loraplex.adapters.store.store import AdapterStore
from tests.adapter_folders import ALL_PROJECTIONS, small_base, write_adapter
from tests.adapters.refusals import refusal, violation_codes
from tests.adapters.sharded import INDEX, WEIGHTS, cut, shard
from tests.adapters.stub_files import running_files
from tests.adapters.stub_hub import running_hub

pytestmark = pytest.mark.filterwarnings("ignore")
BASE = small_base(names=("base",))
CERTIFICATE = Path(__file__).parents[1] / "self_signed.pem"
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float64)


@pytest.fixture
def whole(tmp_path: Path) -> Path:
    """As safetensors itself writes it."""
    folder = write_adapter(tmp_path / "root" / "whole", BASE, targets=ALL_PROJECTIONS)
    tensors = load_file(folder / WEIGHTS)
    save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})
    return folder


@pytest.mark.parametrize("parts", [1, 2, 5])
def test_the_digest_is_that_of_one_file(parts: int, whole: Path, tmp_path: Path) -> None:
    expected = judge_folder(whole, BASE).manifest
    folder = cut(shutil.copytree(whole, tmp_path / "root" / "cut"), parts)
    assert judge_folder(folder, BASE).manifest == expected
    assert judge_folder(folder).manifest.digest == expected.digest
    store = AdapterStore(tmp_path / "store", BASE, {"local": LocalSource([tmp_path / "root"])})
    assert store.admit(AdapterRef("local", "cut"), None) == expected
    kept = next((tmp_path / "store").rglob(WEIGHTS))
    assert kept.read_bytes() == (whole / WEIGHTS).read_bytes()
    assert not list((tmp_path / "store").rglob("adapter_model-*"))
    store.open_slab(expected.digest, "float32", 1 << 20).close()


def test_as_transformers_saves_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It writes the index under the name of a model's, and asks for a PEFT that is not out yet."""
    monkeypatch.setattr("transformers.integrations.peft.MIN_PEFT_VERSION", "0.21.0")
    config = LlamaConfig(
        vocab_size=BASE.vocab_size,
        hidden_size=BASE.hidden_size,
        intermediate_size=48,
        num_hidden_layers=BASE.num_layers,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    model: Any = LlamaForCausalLM(config)
    model.add_adapter(LoraConfig(target_modules=list(ALL_PROJECTIONS)))
    model.save_pretrained(tmp_path, max_shard_size="8KB")
    written = json.loads((tmp_path / "adapter_config.json").read_text())
    (tmp_path / "adapter_config.json").write_text(
        json.dumps(written | {"base_model_name_or_path": "base"})
    )
    assert len(list(tmp_path.glob("adapter_model-*"))) > 1
    assert (tmp_path / "model.safetensors.index.json").exists()
    adapter = judge_folder(tmp_path, BASE).tensors
    assert len(adapter.modules) == 7 * BASE.num_layers
    state = model.get_adapter_state_dict()
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())["weight_map"]
    with open_shards(tmp_path, index, WEIGHTS) as weights:
        for lora in adapter.ordinary:
            name = lora.a.name.removeprefix("base_model.model.")
            assert weights.read(lora.a).tobytes() == state[name].numpy().tobytes()


def test_a_fetch_takes_the_shards_alone(whole: Path, tmp_path: Path) -> None:
    expected = judge_folder(whole, BASE).manifest
    cut(whole, 3)
    (whole / "adapter_model-00001-of-00009.safetensors.tmp").write_bytes(b"x")
    with running_hub() as hub:
        hub.publish("org/a", whole)
        store = AdapterStore(tmp_path / "store", BASE, {"hub": HubSource(hub.endpoint)})
        assert store.admit(AdapterRef("hub", "org/a"), None) == expected
        assert [hub.downloads(shard(number, 3)) for number in (1, 2, 3)] == [1, 1, 1]


def admitted_from_s3(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "x")
    with running_files() as server:
        server.publish("models/team/a", folder)
        source = S3Source(["models"], server.endpoint)
        store = AdapterStore(tmp_path / "store", BASE, {"s3": source})
        return store.admit(AdapterRef("s3", "models/team/a"), None).digest


def admitted_from_https(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    with running_files(CERTIFICATE) as server:
        server.publish("team/a", folder)
        place = f"adapters.test:{server.port}"
        trusted = ssl.create_default_context(cafile=str(CERTIFICATE))
        source = HttpsSource([place], certificates=trusted, lookup=lambda *_: ["127.0.0.1"])
        store = AdapterStore(tmp_path / "store", BASE, {"https": source})
        ref = AdapterRef("https", f"{place}/team/a")
        digest = store.admit(ref, None).digest
        server.files[f"team/a/{INDEX}"] = b"{}"
        assert violation_codes(lambda: store.admit(ref, None)) == {"missing_file"}
        return digest


@pytest.mark.parametrize("admitted", [admitted_from_s3, admitted_from_https])
def test_of_other_sources(
    admitted: Any, whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = judge_folder(whole, BASE).manifest.digest
    assert admitted(cut(whole, 3), tmp_path, monkeypatch) == expected


def test_bytes_of_all_shards_count(whole: Path) -> None:
    limits = AdapterLimits(max_bytes=(whole / WEIGHTS).stat().st_size)
    error = refusal(lambda: judge_folder(cut(whole, 2), BASE, limits))
    assert error is not None
    assert error.code == "too_large"


def test_one_file_comes_before_an_index(whole: Path) -> None:
    expected = judge_folder(whole, BASE).manifest
    one = (whole / WEIGHTS).read_bytes()
    cut(whole, 2)
    (whole / WEIGHTS).write_bytes(one)
    (whole / INDEX).write_text("nonsense")
    assert judge_folder(whole, BASE).manifest == expected


def edit(change: Callable[[dict[str, Any]], Any]) -> Callable[[Path], None]:
    def spoil(folder: Path) -> None:
        index = json.loads((folder / INDEX).read_text())
        (folder / INDEX).write_text(json.dumps(change(index) or index))

    return spoil


def told(file: Any) -> Callable[[Path], None]:
    """The index says that its first tensor is in `file`."""
    return edit(lambda index: index["weight_map"].update({min(index["weight_map"]): file}))


def twice(folder: Path) -> None:
    one, two = load_file(folder / shard(1, 2)), load_file(folder / shard(2, 2))
    save_file(one | {min(two): two[min(two)]}, folder / shard(1, 2))


def stray(folder: Path) -> None:
    save_file({"stray": torch.ones(1)}, folder / shard(3, 3))


def no_shards(folder: Path) -> None:
    for path in folder.glob("adapter_model-*"):
        path.unlink()


def to_folder(folder: Path) -> None:
    (folder / shard(2, 2)).unlink()
    (folder / shard(2, 2)).mkdir()


def many(folder: Path) -> None:
    for number in range(MAX_SHARDS):
        (folder / shard(number, 999)).touch()


HOSTILE: dict[str, tuple[Callable[[Path], object], set[str]]] = {
    "a shard is missing": (lambda f: (f / shard(2, 2)).unlink(), {"missing_file"}),
    "a shard too many": (stray, {"index_mismatch"}),
    "no index": (lambda f: (f / INDEX).unlink(), {"missing_file"}),
    "no shards": (no_shards, {"missing_file"}),
    "another shard's tensor": (told(shard(2, 2)), {"index_mismatch"}),
    "a shard that nobody has": (told(shard(7, 9)), {"missing_file"}),
    "traversal": (told("../../etc/passwd"), {"bad_index"}),
    "absolute": (told("/etc/passwd"), {"bad_index"}),
    "traversal to a shard": (told(f"../{shard(1, 2)}"), {"bad_index"}),
    "a shard with a line break": (told(f"{shard(1, 2)}\n"), {"bad_index"}),
    "a pickle": (told("adapter_model-00001-of-00002.bin"), {"bad_index"}),
    "the config": (told("adapter_config.json"), {"bad_index"}),
    "a number": (told(1), {"bad_index"}),
    "a tensor left out": (
        edit(lambda index: {"weight_map": dict(list(index["weight_map"].items())[1:])}),
        {"index_mismatch"},
    ),
    "a tensor that is nowhere": (
        edit(lambda index: index["weight_map"].update(x=shard(1, 2))),
        {"index_mismatch"},
    ),
    "no weight_map": (edit(lambda index: {"metadata": {}}), {"bad_index"}),
    "an empty one": (edit(lambda index: {"weight_map": {}}), {"bad_index"}),
    "a list": (edit(lambda index: {"weight_map": []}), {"bad_index"}),
    "no JSON": (lambda f: (f / INDEX).write_text("{"), {"bad_index"}),
    "not UTF-8": (lambda f: (f / INDEX).write_bytes(b"\xff"), {"bad_index"}),
    "a name twice": (
        lambda f: (f / INDEX).write_text('{"weight_map": {"a": "b", "a": "c"}}'),
        {"bad_index"},
    ),
    "a large index": (
        lambda f: (f / INDEX).write_bytes(b" " * (9 << 20)),
        {"file_too_large"},
    ),
    "a tensor in two shards": (twice, {"duplicate_tensor", "index_mismatch"}),
    "a shard of garbage": (
        lambda f: (f / shard(1, 2)).write_bytes(b"\x10" + bytes(7) + b"not a header at all"),
        {"bad_header"},
    ),
    "a shard that ends early": (
        lambda f: (f / shard(2, 2)).write_bytes((f / shard(2, 2)).read_bytes()[:-1]),
        {"truncated"},
    ),
    "a shard that is a pointer": (
        lambda f: (f / shard(2, 2)).write_bytes(b"version https://git-lfs.github.com/spec/v1\n"),
        {"header_too_large"},
    ),
    "a shard that is a folder": (to_folder, {"not_a_file"}),
    "too many": (many, {"too_many_files", "index_mismatch", "more_violations"}),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_what_is_wrong_is_refused_by_name(name: str, whole: Path, tmp_path: Path) -> None:
    spoil, expected = HOSTILE[name]
    spoil(cut(whole, 2))
    assert violation_codes(lambda: judge_folder(whole, BASE)) == expected
    store = AdapterStore(tmp_path / "store", BASE, {"local": LocalSource([whole.parent])})
    assert violation_codes(lambda: store.admit(AdapterRef("local", "whole"), None)) <= expected
    assert not list((tmp_path / "store").rglob("adapter_model*"))


@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_joined_files_are_what_safetensors_writes(
    data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("joined")
    parts = data.draw(st.integers(1, 4))
    tensors, index = {}, {}
    for number in range(data.draw(st.integers(parts, 9))):
        name = data.draw(st.sampled_from('ab"/~')) + str(number)
        shape = data.draw(st.lists(st.integers(0, 5), max_size=3))
        tensors[name] = torch.ones(shape).to(data.draw(st.sampled_from(DTYPES)))
        index[name] = shard(number % parts + 1, parts)
    for file in set(index.values()):
        save_file({n: t for n, t in tensors.items() if index[n] == file}, folder / file)
    save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})
    with open_shards(folder, index, WEIGHTS) as joined, open_weights(folder / WEIGHTS) as one:
        assert joined.nbytes == one.nbytes
        start = data.draw(st.integers(0, one.nbytes))
        end = data.draw(st.integers(start, one.nbytes))
        expected = (folder / WEIGHTS).read_bytes()
        assert b"".join(p.tobytes() for p in joined.pieces(0, one.nbytes)) == expected
        assert b"".join(p.tobytes() for p in joined.pieces(start, end)) == expected[start:end]
        assert joined.tensors() == one.tensors()
