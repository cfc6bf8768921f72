"""Long JSON in pieces: the same bytes, and no piece that holds others up."""

from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import UNSET, UnsetType

from loraplex.router.text.turn_taking import PIECE_BYTES, in_pieces


class Inner(msgspec.Struct, rename={"b": "be"}):
    a: Any
    b: Any = None
    c: Any | UnsetType = UNSET


class Tagged(msgspec.Struct, tag="kind", omit_defaults=True):
    a: Any
    b: int = 1


class Row(msgspec.Struct, array_like=True):
    a: Any


PLAIN = st.none() | st.booleans() | st.integers(-9, 9) | st.floats(-1, 1) | st.text(max_size=5)


def nested(values: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    lists = st.lists(values, max_size=4)
    many = PLAIN.map(lambda value: [value] * 300)  # of values that hold none: else memory ends
    structs = st.builds(Inner, values, values, values | st.just(UNSET))
    others = st.builds(Tagged, values, st.sampled_from([1, 2])) | st.builds(Row, values)
    return lists | lists.map(tuple) | many | structs | others | st.dictionaries(st.text(), values)


@settings(max_examples=80, deadline=None)
@given(answer=st.recursive(PLAIN, nested, max_leaves=8))
def test_pieces_are_the_same_json(answer: Any) -> None:
    assert b"".join(in_pieces(answer)) == msgspec.json.encode(answer)


BOUND = 4 * PIECE_BYTES
LONG = {
    "numbers": [0.123456789] * 100_000,
    "vectors": Inner([Inner(0, (0.1,) * 4000)] * 300),
    "few vectors": [(0.1,) * 100_000] * 2,
    "a text": Inner('ü"\n🙂' * 100_000),
    "objects": Inner([{"token": "x", "top": {str(i): 0.1 for i in range(20)}}] * 2000),
}


@pytest.mark.parametrize("answer", LONG.values(), ids=LONG)
def test_no_piece_is_large(answer: Any) -> None:
    pieces = [*in_pieces(answer)]
    assert b"".join(pieces) == msgspec.json.encode(answer)
    assert len(pieces) > 2
    assert max(map(len, pieces)) < BOUND


def test_iterators_are_lists_and_bytes_are_json() -> None:
    assert b"".join(in_pieces(iter([]))) == b"[]"
    assert b"".join(in_pieces(Inner(iter(range(3))))) == b'{"a":[0,1,2],"be":null}'
    data = b"[" + b"1," * PIECE_BYTES + b"1]"
    pieces = [*in_pieces(data)]
    assert (b"".join(pieces), max(map(len, pieces))) == (data, PIECE_BYTES)
