"""What the wrappers, the table and the launch parameters refuse; properties over shapes."""

import random
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from loraplex.server.kernels.attention.pages import CachePages
from loraplex.server.kernels.attention.rope_append import Rotation, rope_append_lora
from loraplex.server.kernels.launch.configs import Phase, load_configs, read_configs
from loraplex.server.kernels.lora.expand import expand
from loraplex.server.kernels.lora.pending import PendingDelta, PendingLora
from loraplex.server.kernels.lora.segments import allocate_segments
from loraplex.server.kernels.lora.shrink import gather_embedding, shrink
from loraplex.server.kernels.lora.table import LoraTable
from loraplex.server.kernels.lora.workspace import allocate_workspace
from loraplex.server.kernels.pointwise.add_norm import add_norm
from loraplex.server.kernels.pointwise.gated import gated, gated_lora
from tests.kernels.batches import Adapters, assert_close, interpreted, make_batch
from tests.kernels.reference import lora_reference

CPU = torch.device("cpu")
CONFIGS = load_configs(CPU)
SHRINK = CONFIGS.shrink("decode", 4)
EXPAND = CONFIGS.expand("decode", 4)
FUSED = CONFIGS.fused("decode", 4)


@interpreted
@given(
    rows=st.integers(1, 20),
    in_features=st.integers(1, 90),
    widths=st.lists(st.integers(1, 90), min_size=1, max_size=3),
    seed=st.integers(0, 1000),
)
@settings(max_examples=12)
def test_any_shape(rows: int, in_features: int, widths: list[int], seed: int) -> None:
    torch.manual_seed(seed)
    rng = random.Random(seed)
    adapters = Adapters(torch.float32, CPU, 4)
    for slot in range(3):
        adapters.put(slot, in_features, widths, [rng.choice((0, 1, 5, 16, 40)) for _ in widths])
    batch = make_batch(rows, adapters)
    slots = [rng.randrange(-1, 4) for _ in range(rows)]
    batch.slots.copy_(torch.tensor(slots, dtype=torch.int32))
    x, y = torch.randn(rows, in_features), torch.randn(rows, sum(widths))
    expected = lora_reference(y, x, slots, adapters.weights, widths)
    batch.run(y, x, widths, adapters.table)
    assert_close(y, expected, torch.float32)


def test_wrappers_check_their_arguments() -> None:
    table = LoraTable(2, 3, CPU)
    segments = allocate_segments(4, 16, 3, CPU)
    workspace = allocate_workspace(4, torch.float32, CPU, CONFIGS.max_split("decode", 4))
    small = allocate_workspace(4, torch.float32, CPU, 1)
    x, y = torch.zeros(4, 32), torch.zeros(4, 48)
    with pytest.raises(ValueError, match=r"\[4, features\]"):
        shrink(x[:3], table, 0, segments, workspace, SHRINK)
    with pytest.raises(ValueError, match="contiguous"):
        shrink(torch.zeros(32, 4).T, table, 0, segments, workspace, SHRINK)
    with pytest.raises(ValueError, match="float64"):
        shrink(x.double(), table, 0, segments, workspace, SHRINK)
    with pytest.raises(ValueError, match="site 2"):
        shrink(x, table, 2, segments, workspace, SHRINK)
    with pytest.raises(ValueError, match="max_split"):
        shrink(x, table, 0, segments, small, SHRINK)
    with pytest.raises(ValueError, match="widths"):
        expand(y, (40, 9), table, 0, segments, workspace, EXPAND)
    with pytest.raises(ValueError, match="slots"):
        expand(y, (48,), LoraTable(2, 2, CPU), 0, segments, workspace, EXPAND)
    wide = allocate_segments(5, 16, 3, CPU)
    with pytest.raises(ValueError, match="rows"):
        expand(torch.zeros(5, 48), (48,), table, 0, wide, workspace, EXPAND)
    with pytest.raises(ValueError, match="token_ids"):
        gather_embedding(torch.zeros(4, dtype=torch.int64), table, 0, segments, workspace)
    pending = PendingDelta(table, 0, torch.zeros(4, dtype=torch.int32), y.clone())

    def norm(delta: PendingDelta) -> None:
        add_norm(y, delta, y.clone(), (y[0], 1e-5), programmatic_launch=False)

    for delta in (y[:, :8], y.half(), torch.zeros(48, 4).T):
        with pytest.raises(ValueError, match="delta is"):
            norm(replace(pending, delta=delta))
        with pytest.raises(ValueError, match="delta is"):
            gated(y, replace(pending, delta=delta), "silu", programmatic_launch=False)
    with pytest.raises(ValueError, match="slots must be"):
        norm(replace(pending, slots=pending.slots[:3]))
    with pytest.raises(ValueError, match="slots must be"):
        norm(replace(pending, slots=pending.slots.long()))
    with pytest.raises(ValueError, match="site 2"):
        norm(replace(pending, site=2))
    for norms in (((y[0, 1:], 1e-5),), (None, (y, 1e-5))):
        with pytest.raises(ValueError, match="a norm of"):
            add_norm(y, None, y.clone(), *norms, programmatic_launch=False)
    with pytest.raises(ValueError, match="contiguous"):
        gated(torch.zeros(48, 4).T, None, "silu", programmatic_launch=False)
    for up in (torch.zeros(4, 24), torch.zeros(48, 4).T):
        with pytest.raises(ValueError, match="beside its gate"):
            gated(torch.zeros(4, 48), None, "silu", up=up, programmatic_launch=False)
    with pytest.raises(ValueError, match="gate_up"):
        gated_lora(y[:3], PendingLora(table, 0, segments, workspace), FUSED, "silu")
    shared = allocate_segments(4, 16, 3, CPU, shared=True)
    with pytest.raises(ValueError, match="shared out"):
        gated_lora(y, PendingLora(table, 0, shared, workspace), FUSED, "silu")


def test_the_rotation_that_expands_checks_its_arguments() -> None:
    table = LoraTable(2, 3, CPU)
    segments = allocate_segments(4, 64, 3, CPU)
    workspace = allocate_workspace(4, torch.float32, CPU, CONFIGS.max_split("decode", 4))
    pending = PendingLora(table, 0, segments, workspace)
    qkv, k, v = torch.zeros(4, 6 * 16), torch.zeros(2, 4, 2, 16), torch.zeros(2, 4, 2, 16)
    rotation, places = Rotation(torch.zeros(9, 16)), torch.zeros(4, dtype=torch.int64)

    def rotate(
        qkv: torch.Tensor = qkv,
        pending: PendingLora = pending,
        num_decodes: int = 0,
        positions: torch.Tensor = places,
        slots: torch.Tensor = places,
        v: torch.Tensor = v,
        rotation: Rotation = rotation,
    ) -> None:
        config = CONFIGS.rope(4)
        context = (rotation, positions, slots, CachePages(k, v), None, config)
        rope_append_lora(qkv, pending, num_decodes, *context)

    with pytest.raises(ValueError, match=r"qkv is torch.float16 .*torch.float32"):
        rotate(qkv.half())
    with pytest.raises(ValueError, match=r"qkv is .*\[5, 96\], for .*\[4\]"):
        rotate(torch.zeros(5, 96))
    with pytest.raises(ValueError, match="qkv is"):
        rotate(torch.zeros(4, 192)[:, ::2])
    with pytest.raises(ValueError, match="tiles of 16 rows"):
        rotate(pending=replace(pending, segments=allocate_segments(4, 16, 3, CPU)))
    with pytest.raises(ValueError, match="shared out"):
        rotate(pending=replace(pending, segments=allocate_segments(4, 64, 3, CPU, shared=True)))
    for features in (4 * 16, 6 * 16 + 8):
        with pytest.raises(ValueError, match=f"{features} columns are not q, 2 k and v heads"):
            rotate(torch.zeros(4, features))
    for num_decodes in (-1, 5):
        with pytest.raises(ValueError, match=f"num_decodes {num_decodes} is not in 0..4"):
            rotate(num_decodes=num_decodes)
    with pytest.raises(ValueError, match=r"positions \[3\]"):
        rotate(positions=places[1:])
    with pytest.raises(ValueError, match=r"slots \[3\]"):
        rotate(slots=places[1:])
    with pytest.raises(ValueError, match="v_pages is torch.float16"):
        rotate(v=v.half())
    with pytest.raises(ValueError, match=r"v_pages is .*\[2, 4, 1, 16\]"):
        rotate(v=v[:, :, :1].clone())
    with pytest.raises(ValueError, match="20 features turn, a head has 16"):
        rotate(rotation=Rotation(torch.zeros(9, 20)))
    with pytest.raises(ValueError, match="site 2"):
        rotate(pending=replace(pending, site=2))


def test_table_checks_records() -> None:
    table = LoraTable(2, 3, CPU)
    for arguments, message in (
        ((3, 0, 256, [512], [8], [1.0]), "slot 3"),
        ((0, 2, 256, [512], [8], [1.0]), "site 2"),
        ((0, 0, 256, [512], [257], [1.0]), "ranks"),
        ((0, 0, 8, [512], [8], [1.0]), "addresses"),
        ((0, 0, 256, [512, 768], [8], [1.0]), "as many"),
    ):
        with pytest.raises(ValueError, match=message):
            table.write(*arguments)
    with pytest.raises(ValueError, match="addresses"):
        table.write(0, [0, 1], [256, 256], [[512], [-512]], [[8], [8]], [[1.0], [1.0]])
    with pytest.raises(ValueError, match="each of 2 sites"):
        table.write(0, [0, 1], 256, [[512], [768]], [[8], [8]], [[1.0], [1.0]])
    assert not table.words.any()


def test_table_records_are_replaced_and_cleared() -> None:
    table = LoraTable(2, 3, CPU)
    table.write(1, 1, 256, [512, 0, 1024], [8, 0, 24], [0.5, 1.0, 2.0])
    table.upload(1)
    assert table.words[1, 1, :4].tolist() == [256, 512, 0, 1024]
    assert table.ints[1, 1, 8:12].tolist() == [8, 0, 24, 32]
    assert table.floats[1, 1, 12:15].tolist() == [0.5, 1.0, 2.0]
    assert table.ints[:, 0, 15].tolist() == [0, 24, 0]  # the widest of a slot
    table.write(1, 1, 2048, [512], [0], [1.0])
    assert not table.words[1, 1].any()
    table.write(1, 0, 256, [512], [8], [1.0])
    table.clear(1)
    assert not table.words.any()


def test_records_written_at_once_are_those_written_one_by_one() -> None:
    at_once, one_by_one = LoraTable(4, 2, CPU), LoraTable(4, 2, CPU)
    records = {3: (256, [512, 0, 768], [8, 0, 24], [0.5, 1.0, 2.0])}
    records[0] = (1024, [2048, 0, 0], [256, 0, 0], [0.1, 0.0, 0.0])
    records[2] = (0, [0, 0, 0], [0, 0, 0], [3.0, 0.0, 0.0])
    for site, record in records.items():
        one_by_one.write(1, site, *record)
    at_once.write(1, list(records), *zip(*records.values(), strict=True))
    assert torch.equal(at_once.words, one_by_one.words)
    assert at_once.words.any(dim=2).nonzero().tolist() == [[1, 0], [1, 3]]


@pytest.mark.parametrize("arch", ["sm90", "default"])
def test_workspaces_take_every_batch(arch: str) -> None:
    """Each batch finds one of its split, with room for its rows."""
    configs = read_configs(arch, 132, programmatic_launch=True)
    batches: tuple[tuple[Phase, int], ...] = (
        *(("decode", 2048), ("decode", 3)),
        *(("mixed", 2048), ("prefill", 9000)),
    )
    for phase, most in batches:
        workspaces = configs.workspaces(phase, most)
        for rows in {1, 2, 4, 5, 64, 2048, most}:
            if rows <= most:
                assert workspaces[configs.max_split(phase, rows)] >= rows
        assert max(workspaces.values()) == most


def test_every_batch_has_launch_parameters() -> None:
    for rows in (1, 2, 16, 17, 64, 128, 256, 512):
        assert CONFIGS.tile_rows("decode", rows) == 16
        split = CONFIGS.shrink("decode", rows).max_split
        assert split & (split - 1) == 0
        assert CONFIGS.max_split("decode", rows) >= split
        assert CONFIGS.expand("decode", rows).piece >= 64
    for rows in (257, 2048):
        assert CONFIGS.tile_rows("mixed", rows) >= 16
        assert CONFIGS.max_split("mixed", rows) >= CONFIGS.shrink("mixed", rows).max_split
        assert CONFIGS.fused("mixed", rows).max_pieces % 2 == 0
        assert CONFIGS.expand("mixed", rows).piece >= 64
    for rows in (2049, 8192):
        assert CONFIGS.rope(rows).max_heads >= 1
        assert CONFIGS.fused_shrink(rows).piece >= 64
        assert CONFIGS.shrink("prefill", rows).max_split == 1
