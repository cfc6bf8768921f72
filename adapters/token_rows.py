"""Divides the rows of an embedding and a head between several shards. Pure.

A shard has the rows of neighbouring tokens of the base. *New ids* lie behind the base's tables.
They are shared out apart, as if there were as many as there may be. So an id's shard does not
depend on the adapter. A shard counts its tokens from 0 on, those of the base first.
"""

from collections.abc import Iterator, Sequence

from loraplex.adapters.base import MAX_NEW_IDS
from loraplex.adapters.sharding import Piece, Shard, Span, pieces


def tokens_of_shard(vocab: int, shard: Shard) -> tuple[Piece, Piece]:
    """Finds a shard's ids of the base, which has `vocab`, and its new ids, as it counts them.
    New ids have the same place on all shards."""
    base, new = pieces((Span(vocab), Span(MAX_NEW_IDS)), shard)
    return base, new


def new_ids_width(count: int) -> int:
    """New ids of each shard."""
    return Span(MAX_NEW_IDS).width(count)


def ids_of_shard(ids: Sequence[int], vocab: int, shard: Shard) -> tuple[int, ...]:
    """Finds the tokens whose rows a shard has, as the shard counts them."""
    return tuple(token for _, token in _rows(ids, vocab, shard))


def rows_of_shard(ids: Sequence[int], vocab: int, shard: Shard) -> list[int]:
    """The places of these tokens in `ids`."""
    return [place for place, _ in _rows(ids, vocab, shard)]


def _rows(ids: Sequence[int], vocab: int, shard: Shard) -> Iterator[tuple[int, int]]:
    """Places in `ids` of a shard's tokens, and tokens as it counts them. The only shard has all."""
    if shard.count == 1:
        yield from enumerate(ids)
        return
    parts = [
        (range(source.start, source.stop), target.start - source.start)
        for source, target in tokens_of_shard(vocab, shard)
    ]
    for place, token in enumerate(ids):
        for mine, shift in parts:
            if token in mine:
                yield place, token + shift


def most_rows(ids: Sequence[int], vocab: int, count: int) -> int:
    """Counts these tokens' rows in the shard that has the most, at least 1."""
    return max(1, *(len(rows_of_shard(ids, vocab, Shard(i, count))) for i in range(count)))


def pieces_of_table(size: int, vocab: int, shard: Shard) -> tuple[Piece, ...]:
    """Finds a shard's rows of a table of `size` rows, and their places among its own. A row's place
    is its token, as the shard counts it."""
    if shard.count == 1:
        return (Piece(slice(0, size), slice(0, size)),)
    found = []
    for source, target in tokens_of_shard(vocab, shard):
        rows = min(source.stop, size) - source.start
        if rows > 0:
            source = slice(source.start, source.start + rows)
            found.append(Piece(source, slice(target.start, target.start + rows)))
    return tuple(found)


def rows_of_each(size: int, vocab: int, count: int) -> int:
    """Counts the rows that each shard keeps for a table: as many as the first, which has most.
    Some between the base's rows and those of new ids may be unused."""
    rows: int = pieces_of_table(size, vocab, Shard(0, count))[-1].target.stop
    return rows
