"""Slab files: the numbers in them, and reading them back run by run."""

import fcntl
import os
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from loraplex.adapters.common.disk import release
from loraplex.adapters.content_check import seal_of
from loraplex.adapters.errors import AdapterError
from loraplex.adapters.judge import Judged, judge_folder, seal_stored
from loraplex.adapters.manifest import ITEM_BYTES, SlabDtype, SlabLayout
from loraplex.adapters.peft.validate import WEIGHTS_FILE, AdapterLimits, SlabRoom
from loraplex.adapters.safetensors.file import open_weights
from loraplex.adapters.safetensors.floats import convert
from loraplex.adapters.safetensors.header import TensorInfo
from loraplex.adapters.slab.file import PAGE, SlabError, SlabFile, SlabGarbled
from loraplex.adapters.slab.layout import a_matrix, b_matrices, make_layout
from loraplex.adapters.slab.memory import SlabMemory, one_after_another
from loraplex.adapters.slab.pack import DamagedError, SlabPlan, pack_weights, plan_moves
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
from tests.slab_files import read_layout, read_payload, write_slab

BASE = small_base(num_layers=3)
EXTENT = 2048
EVERYTHING = (*ALL_PROJECTIONS, "embed_tokens", "lm_head")


def packed(folder: Path, dtype: SlabDtype, extent: int = EXTENT) -> Path:
    judged = judge_folder(folder, BASE, AdapterLimits())
    layout = make_layout(judged.tensors, BASE, judged.manifest.digest, dtype, extent)
    target = folder.parent / f"{dtype}.slab"
    write_slab(folder / WEIGHTS_FILE, judged.tensors, BASE, layout, target)
    return target


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
    (folder / WEIGHTS_FILE).write_bytes(safetensors_bytes(tensors, stored))
    path = packed(folder, dtype)
    layout = read_layout(path)
    payload = read_payload(path)
    assert {site.layer for site in layout.sites} == {-1, 0, 2}
    item = ITEM_BYTES[dtype]
    for site in layout.sites:
        paths = [_path(site.layer, name) for name in BASE.site_names(site.layer, site.role)]
        a, b = ("lora_embedding_A", "lora_embedding_B")
        if site.role != "embed_tokens":
            a, b = ("lora_A.weight", "lora_B.weight")
        stacked = np.concatenate([tensors[f"{p}.{a}"] for p in paths])
        expected = stacked.T if site.role == "embed_tokens" else stacked
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


def test_a_layer_with_other_shapes_is_packed_by_its_own(tmp_path: Path) -> None:
    narrow = small_base(num_layers=3, inner=24).layers[2]
    base = msgspec.structs.replace(BASE, layers=(*BASE.layers[:2], narrow))
    folder = write_adapter(tmp_path / "a", base, targets=ALL_PROJECTIONS)
    assert violation_codes(lambda: judge_folder(folder, BASE)) == {"shape_mismatch"}
    judged = judge_folder(folder, base)
    layout = make_layout(judged.tensors, base, judged.manifest.digest, "float32", EXTENT)
    write_slab(folder / WEIGHTS_FILE, judged.tensors, base, layout, tmp_path / "slab")
    payload = read_payload(tmp_path / "slab")
    tensors = lora_tensors(base, targets=ALL_PROJECTIONS)
    downs = [site for site in layout.sites if site.role == "down"]
    assert [a_matrix(site, base, 4).shape for site in downs] == [(8, 48), (8, 48), (8, 24)]
    for site in layout.sites:
        for name, placed in zip(
            base.site_names(site.layer, site.role), b_matrices(site, base, 4), strict=True
        ):
            b = tensors[f"base_model.model.{base.module(site.layer, name).path}.lora_B.weight"]
            np.testing.assert_array_equal(matrix(payload, placed, "float32"), b)


def _path(layer: int, name: str) -> str:
    return f"base_model.model.{BASE.module(layer, name).path}"


@pytest.mark.parametrize("piece", [64, 1000, 1 << 18])
@pytest.mark.parametrize(
    ("stored", "dtype"),
    [
        ("F32", "bfloat16"),
        ("BF16", "bfloat16"),
        ("F16", "float32"),
        ("F16", "bfloat16"),
        ("F32", "float16"),
    ],
)
def test_packing_in_pieces_is_packing_as_a_whole(
    stored: Dtype, dtype: SlabDtype, piece: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Against each tensor converted at once, in memory that was full of something else."""
    folder = tmp_path / "a"
    folder.mkdir()
    ranks = {"k_proj": 3, "up_proj": 41, "lm_head": 1, "embed_tokens": 5}
    tensors = lora_tensors(BASE, rank=7, targets=EVERYTHING, ranks=ranks)
    write_config(folder, adapter_config(BASE, 7, EVERYTHING) | {"rank_pattern": ranks})
    (folder / WEIGHTS_FILE).write_bytes(safetensors_bytes(tensors, stored))
    monkeypatch.setattr("loraplex.adapters.slab.pack.PIECE_BYTES", piece)
    monkeypatch.setattr("loraplex.adapters.safetensors.file.PIECE_BYTES", piece)
    judged = judge_folder(folder, BASE, AdapterLimits())
    layout = make_layout(judged.tensors, BASE, judged.manifest.digest, dtype, EXTENT)
    expected = bytearray(layout.nbytes)
    item = ITEM_BYTES[dtype]
    modules = {(module.layer, module.module): module for module in judged.tensors.ordinary}
    with open_weights(folder / WEIGHTS_FILE) as weights:

        def whole(tensor: TensorInfo) -> "np.ndarray[Any, np.dtype[Any]]":
            return convert(weights.read(tensor), tensor.dtype, dtype).reshape(tensor.shape)

        for site in layout.sites:
            names = BASE.site_names(site.layer, site.role)
            parts = [modules[site.layer, name] for name in names]
            stacked = np.concatenate([whole(part.a) for part in parts])
            a = stacked.T if site.role == "embed_tokens" else stacked
            expected[site.a_offset : site.a_offset + a.nbytes] = a.tobytes()
            for part, b in zip(parts, b_matrices(site, BASE, item), strict=True):
                assert b is not None
                expected[b.offset : b.offset + b.nbytes] = whole(part.b).tobytes()
        target, places = memory_of(layout)
        in_order = sorted(judged.tensors.tensors, key=lambda tensor: tensor.start)
        assert seal_of(weights, in_order)[0] == judged.seal.fingerprint
        with ThreadPoolExecutor(3) as threads:
            for run in (map, threads.map):
                target[:] = b"\xee" * len(target)
                memory = SlabMemory(layout, target, places)
                plan = SlabPlan(layout)
                pack_weights(weights, judged.tensors, BASE, plan, memory, judged.seal, run)
                assert bytes(target) == expected


def plans_of(judged: Judged, dtype: SlabDtype, extent: int) -> dict[str, SlabPlan]:
    """How an adapter of equal bytes may be packed: piece by piece, and by moves."""
    layout = make_layout(judged.tensors, BASE, judged.manifest.digest, dtype, extent)
    moves = plan_moves(judged.tensors, BASE, layout)
    assert moves is not None
    return {"pieces": SlabPlan(layout), "moves": SlabPlan(layout, moves)}


@pytest.mark.parametrize("most_targets", [1, 3, 1024])
@pytest.mark.parametrize("rank", [4, 8, 40])
def test_moves_are_what_packing_in_pieces_is(
    rank: int, most_targets: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In runs that lie apart, with gaps, by units of a few tensors, and with reads that stop."""
    monkeypatch.setattr("loraplex.adapters.slab.moves.LEAF_BYTES", 5000)
    monkeypatch.setattr("loraplex.adapters.slab.moves.MOST_TARGETS", most_targets)
    real = os.preadv
    monkeypatch.setattr(
        "loraplex.adapters.safetensors.file.os.preadv",
        lambda fd, targets, at: real(fd, [target[:1000] for target in targets[:2]], at),
    )
    targets = ALL_PROJECTIONS[rank == 4 :]
    folder = write_adapter(tmp_path / "a", BASE, rank=rank, targets=targets, dtype="BF16")
    judged = judge_folder(folder, BASE)
    found = []
    for plan in plans_of(judged, "bfloat16", EXTENT).values():
        firsts, position = [], 2 * sum(plan.layout.runs)
        for run in plan.layout.runs:
            position -= run + run % 2
            firsts.append(position)
        arena = memoryview(bytearray(b"\xee" * (2 * plan.layout.nbytes)))
        memory = SlabMemory(plan.layout, arena, firsts)
        with open_weights(folder / WEIGHTS_FILE) as weights, ThreadPoolExecutor(3) as threads:
            arguments = (weights, judged.tensors, BASE, plan, memory, judged.seal, threads.map)
            pack_weights(*arguments)
        found.append(bytes(arena))
    assert found[0] == found[1]


@pytest.mark.parametrize(
    ("stored", "dtype", "targets"),
    [("F32", "bfloat16", ["q_proj"]), ("BF16", "bfloat16", ["q_proj", "embed_tokens"])],
)
def test_what_is_converted_or_turned_is_not_moved(
    stored: Dtype, dtype: SlabDtype, targets: list[str], tmp_path: Path
) -> None:
    folder = write_adapter(tmp_path / "a", BASE, targets=targets, dtype=stored)
    judged = judge_folder(folder, BASE)
    layout = make_layout(judged.tensors, BASE, judged.manifest.digest, dtype, EXTENT)
    assert plan_moves(judged.tensors, BASE, layout) is None


@pytest.mark.parametrize("how", ["pieces", "moves", "digest"])
def test_what_is_packed_is_what_was_judged(how: str, tmp_path: Path) -> None:
    """Any byte of a tensor that is not what it was; by the digest, any byte of the file."""
    folder = write_adapter(tmp_path / "a", BASE)
    path = folder / WEIGHTS_FILE
    judged = judge_folder(folder, BASE, AdapterLimits())
    plans = plans_of(judged, "float32", EXTENT)
    plan = plans.get(how, plans["pieces"])
    whole = path.read_bytes()
    first = min(tensor.start for m in judged.tensors.ordinary for tensor in (m.a, m.b))
    positions = [first, first + 5, len(whole) // 2, len(whole) - 1]
    if how == "digest":
        positions.append(first - 1)

    def packing() -> None:
        target, places = memory_of(plan.layout)
        with open_weights(path) as weights:
            memory = SlabMemory(plan.layout, target, places)
            if how == "digest" and not seal_stored(weights, judged.tensors, judged.manifest):
                raise DamagedError
            pack_weights(weights, judged.tensors, BASE, plan, memory, judged.seal)

    packing()
    for position in positions:
        changed = bytearray(whole)
        changed[position] ^= 1
        path.write_bytes(changed)
        with pytest.raises(DamagedError):
            packing()
    path.write_bytes(whole[: first + 100] + whole[first + 108 :] + whole[first + 100 : first + 108])
    with pytest.raises(DamagedError):
        packing()
    path.write_bytes(whole[:-8])
    if how != "digest":
        assert violation_codes(packing) == {"truncated"}
        return
    with pytest.raises(DamagedError):
        packing()


def test_how_often_each_byte_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And packing what was judged reads the tensors once more, and nothing else."""
    folder = write_adapter(tmp_path / "a", BASE, targets=EVERYTHING)
    header = int.from_bytes((folder / WEIGHTS_FILE).read_bytes()[:8], "little") + 8
    nbytes = (folder / WEIGHTS_FILE).stat().st_size
    read = [0]
    real = os.preadv

    def counted(*arguments: Any) -> int:
        done = real(*arguments)
        read[0] += done
        return done

    monkeypatch.setattr("loraplex.adapters.safetensors.file.os.preadv", counted)
    judged = judge_folder(folder, BASE, AdapterLimits())
    assert read[0] == nbytes + 2 * header, "once, and the header for its shape and its tensors"
    read[0] = 0
    layout = make_layout(judged.tensors, BASE, judged.manifest.digest, "bfloat16", EXTENT)
    target, places = memory_of(layout)
    with open_weights(folder / WEIGHTS_FILE) as weights:
        memory = SlabMemory(layout, target, places)
        pack_weights(weights, judged.tensors, BASE, SlabPlan(layout), memory, judged.seal)
    assert read[0] == nbytes - header


def memory_of(layout: SlabLayout) -> tuple[memoryview, list[int]]:
    return memoryview(bytearray(layout.nbytes)), one_after_another(layout)


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
    (folder / WEIGHTS_FILE).write_bytes(safetensors_bytes(tensors))
    assert violation_codes(lambda: packed(folder, "float16")) == {"overflow"}
    packed(folder, "bfloat16")
    room = SlabRoom("float16", EXTENT, 1 << 30, 1 << 30)
    judging = partial(judge_folder, folder, BASE, AdapterLimits(room=room))
    assert violation_codes(judging) == {"overflow"}, "known before it is used"
    next(iter(tensors.values()))[1, 2] = np.inf
    (folder / WEIGHTS_FILE).write_bytes(safetensors_bytes(tensors))
    assert violation_codes(judging) == {"not_finite"}


def test_a_table_that_is_too_large_with_its_lora_is_refused_by_the_slabs_dtype(
    tmp_path: Path,
) -> None:
    folder = write_adapter(tmp_path / "a", BASE)
    tensors = {
        name: np.full_like(part, 100)
        for name, part in lora_tensors(BASE, targets=["lm_head"]).items()
    }
    table = np.full((BASE.vocab_size + 1, BASE.hidden_size), 6e4, np.float32)
    b = next(name for name in tensors if "lora_B" in name)
    tensors[b] = np.full((len(table), 8), 100, np.float32)
    tensors[b.replace("lora_B", "base_layer")] = table
    tensors[f"base_model.model.{BASE.model_modules['embed_tokens'].path}.weight"] = table
    write_config(folder, adapter_config(BASE, 8, ["lm_head"]))
    (folder / WEIGHTS_FILE).write_bytes(safetensors_bytes(tensors))
    with pytest.raises(AdapterError, match="base_layer.weight has values too large for float16$"):
        packed(folder, "float16")
    packed(folder, "bfloat16")


def test_damaged_slabs_are_errors_of_the_file(tmp_path: Path) -> None:
    path = packed(write_adapter(tmp_path / "a", BASE), "float32")
    data = path.read_bytes()
    changed = [data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :] for at in (0, 9, 17, 32, 100)]
    for damaged in (b"", data[:10], data[:-1], *changed):
        path.write_bytes(damaged)
        with pytest.raises(SlabError):
            SlabFile(path)
    path.write_bytes(data)
    with closing(SlabFile(path)) as slab:
        memory = memoryview(bytearray(slab.layout.nbytes))
        firsts = one_after_another(slab.layout)
        with pytest.raises(ValueError, match="places"):
            slab.copy_runs(memory, firsts[:-1])
        with pytest.raises(ValueError, match="ends within"):
            slab.copy_runs(memory[:-1], firsts)
        os.truncate(path, len(data) - 1)
        with pytest.raises(SlabError):
            slab.copy_runs(memory, firsts)


@pytest.mark.parametrize("at", [24, PAGE, -1])
def test_a_payload_that_the_disk_garbled_is_removed(tmp_path: Path, at: int) -> None:
    """One bit of it, or of what it is known by."""
    path = packed(write_adapter(tmp_path / "a", BASE), "float32")
    data = bytearray(path.read_bytes())
    data[at] ^= 4
    path.write_bytes(data)
    with closing(SlabFile(path)) as slab:
        memory = memoryview(bytearray(slab.layout.nbytes))
        with pytest.raises(SlabGarbled, match="not what was written"):
            slab.copy_runs(memory, one_after_another(slab.layout))
    assert not path.exists()


def test_a_slab_that_is_replaced_as_it_is_opened(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By another process that packed the same: one is as good as the other."""
    path = packed(write_adapter(tmp_path / "a", BASE), "float32")
    data, flock = path.read_bytes(), fcntl.flock
    others = [tmp_path / "one", tmp_path / "two"]
    for other in others:
        other.write_bytes(data)

    def late(fd: int, operation: int) -> None:
        if others:
            others.pop().rename(path)
        flock(fd, operation)

    monkeypatch.setattr(fcntl, "flock", late)
    assert len(read_payload(path)) == read_layout(path).nbytes
    assert not others


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
        slab.copy_runs(memoryview(memory), one_after_another(slab.layout))
    assert bytes(memory) == payload
    release(1, [store])
    assert not path.exists()
