"""The safetensors header: what is accepted is exact, and what is not is named."""

import json
import struct
from typing import Any

import pytest
from hypothesis import example
from hypothesis import strategies as st

from loraplex.adapters.errors import AdapterError
from loraplex.adapters.safetensors.header import (
    MAX_HEADER_BYTES,
    TensorInfo,
    header_size,
    parse_header,
)
from tests.adapter_folders import lora_tensors, raw_safetensors, safetensors_bytes, small_base
from tests.adapters.refusals import refusal, violation_codes
from tests.grids import examples

GOOD = {"a": {"dtype": "F32", "shape": [2, 2], "data_offsets": [0, 16]}}


def parse(data: bytes) -> tuple[TensorInfo, ...]:
    size = header_size(data[:8], len(data))
    return parse_header(data[8 : 8 + size], len(data))


def codes(data: bytes) -> set[str]:
    return violation_codes(lambda: parse(data))


def framed(header: object, payload: int = 16) -> bytes:
    return raw_safetensors(json.dumps(header).encode(), b"\0" * payload)


def entry(**changes: Any) -> dict[str, Any]:
    return {"a": GOOD["a"] | changes}


def test_reads_what_safetensors_writes() -> None:
    tensors = lora_tensors(small_base(), rank=3)
    data = safetensors_bytes(tensors, "F16")
    found = parse(data)
    assert [info.name for info in found] == list(tensors)
    for info in found:
        expected = tensors[info.name]
        assert info.shape == expected.shape
        assert data[info.start : info.end] == expected.astype("<f2").tobytes()


def test_empty_tensors_and_scalars_are_allowed() -> None:
    header = {
        "e": {"dtype": "F16", "shape": [0, 4], "data_offsets": [0, 0]},
        "s": {"dtype": "U8", "shape": [], "data_offsets": [0, 1]},
    }
    assert [info.nbytes for info in parse(framed(header, 1))] == [0, 1]


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        (b"", "truncated"),
        (b"1234567", "truncated"),
        (struct.pack("<Q", 100) + b"{}", "truncated"),
        (struct.pack("<Q", MAX_HEADER_BYTES + 1), "header_too_large"),
        (struct.pack("<Q", 2**64 - 1) + b"{}", "header_too_large"),
        (raw_safetensors(b"", b""), "bad_header"),
        (raw_safetensors(b"[]", b""), "bad_header"),
        (raw_safetensors(b"null", b""), "bad_header"),
        (raw_safetensors(b" {}", b""), "bad_header"),
        (raw_safetensors(b"{", b""), "bad_header"),
        (raw_safetensors(b'{"\xff": {}}', b""), "bad_header"),
        (raw_safetensors(b'{"a":' * 3000 + b"1" + b"}" * 3000, b""), "bad_header"),
        (raw_safetensors(b'{"a": ' + b"[" * 100_000, b""), "bad_header"),
        (raw_safetensors(b'{"a": NaN}', b""), "bad_header"),
        (raw_safetensors(b'{"a": ' + b"9" * 5000 + b"}", b""), "bad_header"),
        (raw_safetensors(b'{"a": {}, "a": {}}', b""), "duplicate_key"),
        (raw_safetensors(b'{"a": {"dtype": "F32", "dtype": "F16"}}', b""), "duplicate_key"),
        (raw_safetensors(b"{" + b"{" * 40_000, b""), "too_many_tensors"),
        (framed({f"t{i}": {} for i in range(20_001)}), "too_many_tensors"),
        (framed({"__metadata__": {"a": 1}} | GOOD), "bad_metadata"),
        (framed({"__metadata__": []} | GOOD), "bad_metadata"),
        (framed({"": GOOD["a"]}), "bad_tensor_name"),
        (framed({"a\n": GOOD["a"]}), "bad_tensor_name"),
        (framed({"\u202e": GOOD["a"]}), "bad_tensor_name"),
        (framed({"x" * 600: GOOD["a"]}), "bad_tensor_name"),
        (framed({"a": []}), "bad_tensor_entry"),
        (framed({"a": {"dtype": "F32", "shape": [4]}}), "bad_tensor_entry"),
        (framed({"a": GOOD["a"] | {"extra": 1}}), "bad_tensor_entry"),
        (framed(entry(dtype="F31")), "unknown_dtype"),
        (framed(entry(dtype=32)), "unknown_dtype"),
        (framed(entry(shape=[2, -2])), "bad_shape"),
        (framed(entry(shape=[2, 2.0])), "bad_shape"),
        (framed(entry(shape=[True, 4])), "bad_shape"),
        (framed(entry(shape="22")), "bad_shape"),
        (framed(entry(shape=[1] * 9)), "bad_shape"),
        (framed(entry(shape=[2**60, 2**60])), "bad_shape"),
        (framed(entry(data_offsets=[16, 0])), "bad_offsets"),
        (framed(entry(data_offsets=[-16, 0])), "bad_offsets"),
        (framed(entry(data_offsets=[0])), "bad_offsets"),
        (framed(entry(data_offsets=[0, 16, 16])), "bad_offsets"),
        (framed(entry(data_offsets=[0, True])), "bad_offsets"),
        (framed(entry(data_offsets=None)), "bad_offsets"),
        (framed(entry(shape=[2, 3])), "span_mismatch"),
        (framed(entry(dtype="F64")), "span_mismatch"),
        (framed(entry(data_offsets=[0, 2**63])), "span_mismatch"),
        (framed(entry(data_offsets=[4, 20]), 20), "gap"),
        (framed(GOOD | {"b": GOOD["a"]}), "overlap"),
        (framed(GOOD | {"b": GOOD["a"] | {"data_offsets": [8, 24]}}, 24), "overlap"),
        (framed(GOOD | {"b": GOOD["a"] | {"data_offsets": [20, 36]}}, 36), "gap"),
        (framed(GOOD, 15), "truncated"),
        (framed(GOOD, 0), "truncated"),
        (framed(GOOD, 17), "trailing_bytes"),
        (framed({}, 1), "trailing_bytes"),
    ],
)
def test_each_corruption_is_named(data: bytes, expected: str) -> None:
    assert expected in codes(data)


def test_all_violations_are_reported_at_once_and_bounded() -> None:
    assert codes(framed({"a": [], "b": entry(dtype="F31")["a"], "\n": GOOD["a"]})) == {
        "bad_tensor_entry",
        "unknown_dtype",
        "bad_tensor_name",
    }
    with pytest.raises(AdapterError) as error:
        parse(framed({f"t{i}": [] for i in range(10_000)}))
    assert len(error.value.violations) < 100
    assert error.value.violations[-1].code == "more_violations"


def _judge(data: bytes) -> None:
    """Parsed or refused; and what is parsed tiles the file."""
    if refusal(lambda: parse(data)) is not None:
        assert codes(data)
        return
    tensors = parse(data)
    position = 8 + int.from_bytes(data[:8], "little")
    for tensor in tensors:
        assert tensor.start == position
        position = tensor.end
    assert position == len(data)


@examples(300, 1500, st.data())
def test_mutated_files(data: st.DataObject) -> None:
    good = bytearray(safetensors_bytes(lora_tensors(small_base(num_layers=1), rank=1)))
    head = 8 + int.from_bytes(good[:8], "little")
    for _ in range(data.draw(st.integers(1, 6))):
        position = data.draw(st.integers(0, head - 1))
        kind = data.draw(st.sampled_from(["replace", "insert", "delete", "cut"]))
        byte = data.draw(st.sampled_from(list(b'0123456789{}[]",:.-eNtrue \\\x00\xff')))
        if kind == "replace":
            good[position] = byte
        elif kind == "insert":
            good.insert(position, byte)
        elif kind == "delete":
            del good[position]
        else:
            del good[data.draw(st.integers(0, len(good) - 1)) :]
        head = max(1, min(head, len(good)))
        if not good:
            break
    _judge(bytes(good))


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=4),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3)
    ),
    max_leaves=6,
)


@examples(
    200,
    1000,
    st.dictionaries(
        st.text(max_size=6),
        JSON
        | st.fixed_dictionaries(
            {
                "dtype": st.sampled_from(["F32", "BF16", "U8", "x"]) | JSON,
                "shape": st.lists(st.integers(-1, 4), max_size=3) | JSON,
                "data_offsets": st.lists(st.integers(-1, 40), max_size=3) | JSON,
            }
        ),
        max_size=4,
    ),
    st.integers(0, 40),
)
@example({"a": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}, 4)
def test_any_json_header(header: dict[str, Any], payload: int) -> None:
    _judge(raw_safetensors(json.dumps(header).encode(), b"\0" * payload))


@examples(200, 500, st.binary(max_size=200))
def test_any_bytes(data: bytes) -> None:
    _judge(data)
    _judge(raw_safetensors(data, b""))
