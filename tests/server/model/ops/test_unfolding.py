"""The choice of prompts that are unfolded, and pieces that show each query all that it sees."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from loraplex.launcher.known_models import served_families
from loraplex.server.model.devices.sharding import sharded
from loraplex.server.model.families.registry import read_model
from loraplex.server.model.ops.attention.unfolding import (
    are_unfolded,
    cut_pieces,
    leaves_graphs,
    saved_by_unfolding,
)
from loraplex.server.model.spec.latent_spec import LatentSpec


def latents(name: str, shards: int = 1) -> LatentSpec:
    spec = sharded(read_model(served_families()[name].config), shards).layers[0].attention
    assert isinstance(spec, LatentSpec)
    return spec


@pytest.mark.parametrize(
    ("name", "start", "new", "unfolded", "outside"),
    [
        ("deepseek_v2", 0, 8192, True, True),
        ("deepseek_v2", 0, 2048, True, True),
        ("deepseek_v2", 0, 512, True, False),
        ("deepseek_v2", 30_000, 2048, True, True),
        ("deepseek_v2", 30_000, 600, True, True),
        ("deepseek_v2", 30_000, 64, False, False),
        ("deepseek_v2", 30_000, 2, False, False),
        ("glm4_moe_lite", 0, 2048, True, True),
        ("glm4_moe_lite", 100_000, 100, False, False),
        ("mistral4", 0, 4096, True, True),
    ],
)
def test_long_chunks_are_unfolded(
    name: str, start: int, new: int, unfolded: bool, outside: bool
) -> None:
    spec, prompt = latents(name), (np.array([start]), np.array([new]))
    assert are_unfolded(spec, *prompt) == [unfolded]
    assert leaves_graphs(spec, *prompt) is outside


def test_devices_with_fewer_heads_agree() -> None:
    starts, num_new = np.array([0, 30_000, 30_000, 5000]), np.array([2048, 64, 2048, 300])
    of_each = (are_unfolded(latents("deepseek_v3", n), starts, num_new).tolist() for n in (1, 2, 8))
    assert [*of_each] == [[True, False, True, True]] * 3


@given(st.integers(0, 200_000), st.integers(2, 8000))
def test_more_queries_of_a_prefix_gain_more(start: int, new: int) -> None:
    saved = saved_by_unfolding(
        latents("deepseek_v2"), np.array([start] * 2), np.array([new, new + 1])
    )
    assert saved[1] > saved[0]


@settings(deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 30), st.integers(1, 20), st.booleans()), min_size=1),
    st.integers(1, 8),
    st.integers(1, 40),
)
def test_each_query_meets_each_key_once(
    prompts: list[tuple[int, int, bool]], tokens: int, room: int
) -> None:
    starts, num_new, chosen = (np.array(of) for of in zip(*prompts, strict=True))
    of_token = np.repeat(np.arange(len(starts)), num_new)
    firsts = np.cumsum(num_new) - num_new
    met: dict[int, list[int]] = {token: [] for token in range(len(of_token))}
    for piece in cut_pieces(starts, num_new, chosen, tokens, room):
        assert 0 < len(piece.prompts) <= room
        for first, position, count, begin, end, place in piece.tiles.tolist():
            assert 0 < count <= tokens
            assert begin < end
            for token in range(first, first + count):
                prompt = of_token[token]
                assert position == starts[prompt] + first - firsts[prompt]
                seen = range(begin, min(end, position + token - first + 1))
                there = slice(place, place + end - begin)
                assert piece.positions[there].tolist() == [*range(begin, end)]
                assert (piece.prompts[there] == prompt).all()
                assert not seen or len(met[token]) == begin
                met[token] += seen
    for token, keys in met.items():
        prompt = of_token[token]
        position = int(starts[prompt] + token - firsts[prompt])
        assert keys == ([*range(position + 1)] if chosen[prompt] else [])
