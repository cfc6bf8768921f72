"""Slab files: the numbers in them, and reading them back run by run."""

import os
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from adapters.base import SITE_PROJECTIONS
from adapters.disk import release
from adapters.judge import judge_folder
from adapters.layout import SLAB_ITEM_BYTES, a_matrix, b_matrices, make_layout
from adapters.manifest import SlabDtype, SlabLayout
from adapters.pack import PAGE, SlabError, SlabFile, write_slab
from adapters.validate import AdapterLimits
from tests.adapter_folders import (
    ALL_PROJECTIONS,
    Dtype,
    adapter_config,
    lora_tensors,
    safetensors_bytes,
    small_base,
    write_adapter,
    write_config,
)
from tests.adapters.refusals import violation_codes
from tests.slab_files import read_layout, read_payload

BASE = small_base(num_layers=3)
EXTENT = 2048
EVERYTHING = (*ALL_PROJECTIONS, "embed_tokens", "lm_head")


def packed(folder: Path, dtype: SlabDtype, extent: int = EXTENT) -> Path:
    judged = judge_folder(folder, BASE, AdapterLimits())
    layout = make_layout(judged.tensors, BASE, judged.manifest.digest, dtype, extent)
    target = folder.parent / f"{dtype}.slab"
    write_slab(folder / "adapter_model.safetensors", judged.tensors, BASE, layout, target)
    return target


def places(layout: SlabLayout) -> list[int]:
    """The runs one after the other."""
    return [sum(layout.runs[:index]) for index in range(len(layout.runs))]


def matrix(
    payload: bytes, placed: Any, dtype: SlabDtype
) -> "np.ndarray[Any, np.dtype[np.float32]]":
    raw = np.frombuffer(payload[placed.offset : placed.offset + placed.nbytes], np.uint8)
    if dtype == "bfloat16":
        return (raw.view("<u2").astype(np.uint32) << 16).view(np.float32).reshape(placed.shape)
    kind = "<f4" if dtype == "float32" else "<f2"
    return raw.view(kind).astype(np.float32).reshape(placed.shape)


@pytest.mark.parametrize(
    ("stored", "dtype", "tolerance"),
    [
        ("F32", "float32", 0.0),
        ("BF16", "float32", 2**-8),
        ("F32", "bfloat16", 2**-8),
        ("F32", "float16", 2**-10),
        ("F16", "bfloat16", 2**-7),
    ],
)
def test_every_tensor_is_where_the_layout_says(
    stored: Dtype, dtype: SlabDtype, tolerance: float, tmp_path: Path
) -> None:
    folder = tmp_path / "a"
    folder.mkdir()
    ranks = {"k_proj": 3, "up_proj": 40, "lm_head": 2}
    tensors = lora_tensors(BASE, rank=8, targets=EVERYTHING, ranks=ranks, layers=[0, 2])
    config = adapter_config(BASE, 8, EVERYTHING) | {"rank_pattern": ranks, "use_rslora": True}
    write_config(folder, config)
    (folder / "adapter_model.safetensors").write_bytes(safetensors_bytes(tensors, stored))
    path = packed(folder, dtype)
    layout = read_layout(path)
    payload = read_payload(path)
    assert {site.layer for site in layout.sites} == {-1, 0, 2}
    item = SLAB_ITEM_BYTES[dtype]
    for site in layout.sites:
        paths = [_path(site.layer, name) for name in SITE_PROJECTIONS[site.kind]]
        a, b = ("lora_embedding_A", "lora_embedding_B")
        if site.kind != "embed_tokens":
            a, b = ("lora_A.weight", "lora_B.weight")
        stacked = np.concatenate([tensors[f"{p}.{a}"] for p in paths])
        expected = stacked.T if site.kind == "embed_tokens" else stacked
        found = matrix(payload, a_matrix(site, BASE, item), dtype)
        np.testing.assert_allclose(found, expected, rtol=tolerance, atol=1e-6 * bool(tolerance))
        for p, placed, r, scale in zip(
            paths, b_matrices(site, BASE, item), site.ranks, site.scales, strict=True
        ):
            assert placed is not None
            assert scale == 16 / r**0.5
            found = matrix(payload, placed, dtype)
            np.testing.assert_allclose(
                found, tensors[f"{p}.{b}"], rtol=tolerance, atol=1e-6 * bool(tolerance)
            )


def _path(layer: int, name: str) -> str:
    if layer < 0:
        return f"base_model.model.{BASE.model_modules[name].path}"
    return f"base_model.model.model.layers.{layer}.{BASE.layer_modules[name].path}"


def test_untargeted_projections_have_rank_0(tmp_path: Path) -> None:
    path = packed(write_adapter(tmp_path / "a", BASE, targets=["v_proj"], rank=2), "float32")
    layout = read_layout(path)
    assert [site.ranks for site in layout.sites] == [(0, 0, 2)] * BASE.num_layers
    assert [site.b_offsets[:2] for site in layout.sites] == [(0, 0)] * BASE.num_layers


def test_runs_may_be_placed_apart(tmp_path: Path) -> None:
    path = packed(write_adapter(tmp_path / "a", BASE, targets=EVERYTHING, rank=20), "float32", 4096)
    layout = read_layout(path)
    assert max(layout.runs) > 1
    payload = read_payload(path)
    total = sum(layout.runs)
    memory = bytearray(b"\xee") * (2 * total * 4096)
    firsts, position = [], 2 * total
    for run in layout.runs:
        position -= run
        firsts.append(position)
    with closing(SlabFile(path)) as slab:
        slab.copy_runs(memoryview(memory), firsts)
    done = 0
    for run, first in zip(layout.runs, firsts, strict=True):
        nbytes = run * 4096
        assert memory[first * 4096 : first * 4096 + nbytes] == payload[done : done + nbytes]
        done += nbytes
    assert memory[: total * 4096] == b"\xee" * (total * 4096)


def test_payload_starts_on_a_page_and_packing_is_deterministic(tmp_path: Path) -> None:
    folder = write_adapter(tmp_path / "a", BASE)
    first = packed(folder, "bfloat16")
    data = first.read_bytes()
    assert (len(data) - read_layout(first).nbytes) % PAGE == 0
    first.unlink()
    assert packed(folder, "bfloat16").read_bytes() == data


def test_values_too_large_for_the_dtype_are_refused(tmp_path: Path) -> None:
    folder = write_adapter(tmp_path / "a", BASE)
    tensors = lora_tensors(BASE)
    next(iter(tensors.values()))[1, 2] = 1e6
    (folder / "adapter_model.safetensors").write_bytes(safetensors_bytes(tensors))
    assert violation_codes(lambda: packed(folder, "float16")) == {"overflow"}
    packed(folder, "bfloat16")


def test_damaged_slabs_are_errors_of_the_file(tmp_path: Path) -> None:
    path = packed(write_adapter(tmp_path / "a", BASE), "float32")
    data = path.read_bytes()
    for damaged in (b"", data[:10], b"X" + data[1:], data[:16] + b"\xc1" + data[17:], data[:-1]):
        path.write_bytes(damaged)
        with pytest.raises(SlabError):
            SlabFile(path)
    path.write_bytes(data)
    with closing(SlabFile(path)) as slab:
        memory = memoryview(bytearray(slab.layout.nbytes))
        firsts = places(slab.layout)
        with pytest.raises(ValueError, match="places"):
            slab.copy_runs(memory, firsts[:-1])
        with pytest.raises(ValueError, match="ends within"):
            slab.copy_runs(memory[:-1], firsts)
        os.truncate(path, len(data) - 1)
        with pytest.raises(SlabError):
            slab.copy_runs(memory, firsts)


def test_an_open_slab_is_read_whatever_becomes_of_its_name(tmp_path: Path) -> None:
    path = packed(write_adapter(tmp_path / "made" / "a", BASE), "float32")
    store = tmp_path / "store"
    store.mkdir()
    path = path.rename(store / "slab")
    data, payload = path.read_bytes(), read_payload(path)
    with closing(SlabFile(path)) as slab:
        release(len(data), [store])
        assert path.exists(), "what is open is in use"
        path.unlink()
        path.write_bytes(b"something else")
        memory = bytearray(slab.layout.nbytes)
        slab.copy_runs(memoryview(memory), places(slab.layout))
        slab.save(tmp_path / "saved")
    assert bytes(memory) == payload
    assert (tmp_path / "saved").read_bytes() == data
    release(1, [store])
    assert not path.exists()
