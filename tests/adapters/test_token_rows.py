"""Each row of a table lies in one shard, where all tables have it."""

from itertools import chain

from hypothesis import given
from hypothesis import strategies as st

from loraplex.adapters.base import (
    MAX_NEW_IDS,
    Shard,
    Span,
    ids_of_shard,
    most_rows,
    new_ids_width,
    pieces_of_table,
    rows_of_each,
    rows_of_shard,
)

VOCABS, COUNTS = st.integers(1, 300), st.integers(1, 9)
IDS = st.lists(
    st.one_of(st.integers(0, 299), st.integers(0, 299 + MAX_NEW_IDS)), unique=True, max_size=40
)


@given(VOCABS, IDS, COUNTS)
def test_rows_of_tokens(vocab: int, drawn: list[int], count: int) -> None:
    """A token of the base lies where its row of the base does; the largest part has room."""
    ids = [token for token in drawn if token < vocab + MAX_NEW_IDS]
    found = [rows_of_shard(ids, vocab, Shard(index, count)) for index in range(count)]
    assert sorted(chain.from_iterable(found)) == [*range(len(ids))]
    width = Span(vocab).width(count)
    for index, places in enumerate(found):
        shard = Shard(index, count)
        mine = Span(vocab).piece(shard)
        of_base = [ids[place] for place in places if ids[place] < vocab]
        assert all(mine.start <= token < mine.stop for token in of_base)
        counted = ids_of_shard(ids, vocab, shard)
        assert len({*counted}) == len(places)
        for place, token in zip(places, counted, strict=True):
            is_new = ids[place] >= vocab
            assert (token >= width) == is_new
            first = vocab + index * new_ids_width(count) - width if is_new else mine.start
            assert ids[place] == first + token < vocab + MAX_NEW_IDS
            assert token < width + new_ids_width(count)
    assert most_rows(ids, vocab, count) == max(1, *map(len, found))


@given(VOCABS, st.integers(1, 299 + MAX_NEW_IDS), COUNTS)
def test_rows_of_a_whole_table(vocab: int, drawn: int, count: int) -> None:
    """Each row has the place that its token has in all tables, and all shards have room for it."""
    size = min(drawn, vocab + MAX_NEW_IDS)
    found: list[int] = []
    rows = rows_of_each(size, vocab, count)
    for index in range(count):
        shard = Shard(index, count)
        for source, target in pieces_of_table(size, vocab, shard):
            tokens = range(source.start, source.stop)
            assert [*range(target.start, target.stop)] == [*ids_of_shard(tokens, vocab, shard)]
            assert target.stop <= rows
            found += tokens
    assert sorted(found) == [*range(size)]


def test_few_new_ids_lie_on_the_first_shard() -> None:
    for count in (2, 4):
        width = Span(97).width(count)
        assert ids_of_shard([97, 98, 99], 97, Shard(0, count)) == (width, width + 1, width + 2)
        assert not ids_of_shard([97, 98, 99], 97, Shard(1, count))
        assert rows_of_each(100, 97, count) == width + 3
        assert rows_of_each(97 + MAX_NEW_IDS, 97, count) == width + MAX_NEW_IDS // count
