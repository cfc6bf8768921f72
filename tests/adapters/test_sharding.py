"""Shards share a module's features: together they have all, each in its place."""

from hypothesis import given
from hypothesis import strategies as st

from loraplex.adapters.base import (
    WHOLE,
    Groups,
    ModuleShape,
    Shard,
    Span,
    heads_of,
    pieces,
    total_width,
)

COUNTS = st.integers(1, 9)
SPANS = st.lists(st.builds(Span, st.integers(1, 200)), min_size=1, max_size=3)


@given(SPANS, COUNTS)
def test_single_features_lie_once_in_one_shard(spans: list[Span], count: int) -> None:
    found: list[int] = []
    for index in range(count):
        width = total_width(spans, count)
        for piece in pieces(spans, Shard(index, count)):
            source, target = piece
            assert source.stop - source.start == target.stop - target.start
            assert 0 <= target.start <= target.stop <= width
            found += range(source.start, source.stop)
    assert sorted(found) == list(range(sum(span.features for span in spans)))


@given(st.integers(1, 64), st.integers(1, 16), st.integers(1, 64))
def test_heads_are_split_or_repeated(heads: int, unit: int, count: int) -> None:
    span = Span(heads * (unit + 1), unit + 1)
    if not span.divides(count):
        return
    owners = [heads_of(heads, Shard(index, count)) for index in range(count)]
    each = {found.stop - found.start for found in owners}
    assert each == {max(1, heads // count)}
    assert [found.start for found in owners] == sorted(found.start for found in owners)
    assert {h for found in owners for h in range(found.start, found.stop)} == set(range(heads))
    for index, found in enumerate(owners):
        piece = span.piece(Shard(index, count))
        assert (piece.start, piece.stop) == (found.start * span.unit, found.stop * span.unit)
        assert piece.stop - piece.start == span.width(count)


def test_queries_lie_with_their_keys() -> None:
    """Eight heads of queries, two of keys and values, four shards."""
    for index in range(4):
        shard = Shard(index, 4)
        queries, keys = heads_of(8, shard), heads_of(2, shard)
        assert {query // 4 for query in range(queries.start, queries.stop)} == {keys.start}


@given(
    st.lists(st.integers(1, 3), min_size=3, max_size=3),
    st.integers(1, 4),
    st.permutations(range(3)),
    st.sampled_from([1, 2]),
)
def test_rows_in_groups(parts: list[int], groups: int, order: list[int], count: int) -> None:
    """Two heads of two rows for each number of `parts`, in each group."""
    spans = [Span(4 * groups * part, 2) for part in parts]
    held = [
        (span, 4 * group * parts[span] + row)
        for group in range(groups)
        for span in order
        for row in range(4 * parts[span])
    ]
    for index in range(count):
        shard = Shard(index, count)
        found: dict[int, int] = {}
        for source, target in pieces(spans, shard, Groups(groups, tuple(order))):
            rows = range(source.start, source.stop)
            found |= dict(zip(range(target.start, target.stop), rows, strict=True))
        assert [held[found[row]] for row in sorted(found)] == [
            (number, row)
            for number, span in enumerate(spans)
            for row in range(span.features)[span.piece(shard)]
        ]


def test_a_file_may_hold_spans_in_turn() -> None:
    found = pieces([Span(4, 2), Span(4, 2)], WHOLE, Groups(2))
    assert [(piece.source.start, piece.target.start) for piece in found] == [
        *[(0, 0), (4, 2), (2, 4), (6, 6)]
    ]


def test_a_module_of_one_shard() -> None:
    column = ModuleShape("x.q", 12, 40, sharding="column", spans=(Span(24, 4), Span(16, 4)))
    assert column.of_shard(2).out_features == 20
    assert [piece.source for piece in column.outputs(Shard(1, 2))] == [slice(12, 24), slice(32, 40)]
    assert [piece.source for piece in column.inputs(Shard(1, 2))] == [slice(0, 12)]
    row = ModuleShape("x.down", 10, 12, sharding="row")
    assert row.of_shard(2).in_features == 5
    assert row.of_shard(4).in_features == 8, "filled up to a multiple of eight"
    assert [piece.source for piece in row.inputs(Shard(1, 4))] == [slice(8, 10)]
    assert [piece.source for piece in row.inputs(Shard(2, 4))] == [slice(10, 10)]
    assert row.of_shard(1) == row
