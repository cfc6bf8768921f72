"""Faults of values name the field, what came and what may come."""

from typing import Annotated, Any, Literal

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import inspect

from loraplex.router.api.operations import OPERATIONS
from loraplex.router.api.request.body import field_fault
from loraplex.router.operations.adapters_file import FileEntry
from loraplex.router.tenancy.keys import KeysFile

TEXT = {"kind": "text"}
ONE_OF = "expected one of image, text; got"


class Part(msgspec.Struct, forbid_unknown_fields=True):
    kind: Literal["text", "image"]
    size: Annotated[int, msgspec.Meta(ge=0)] = 0


class Whole(msgspec.Struct, forbid_unknown_fields=True):
    parts: list[Part] = []
    named: dict[str, Part] = {}
    either: str | list[Part] | None = None
    level: Literal[1, 2] | None = None
    loose: Literal["a"] | int = "a"
    tag: Annotated[str, msgspec.Meta(pattern=r"^[a-z]+\Z")] = "a"


@pytest.mark.parametrize(
    ("value", "told"),
    [
        ({"parts": [TEXT, {"kind": "x"}]}, f"`parts[1].kind`: {ONE_OF} 'x'"),
        ({"named": {"a.b": {"kind": 3}}}, f"`named[...].kind`: {ONE_OF} `int`"),
        ({"either": [{"kind": "x"}]}, f"`either[0].kind`: {ONE_OF} 'x'"),
        ({"level": 3}, "`level`: expected one of 1, 2; got 3"),
        ({"level": "1"}, "`level`: expected one of 1, 2; got `str`"),
        ({"loose": []}, "`loose`: expected `int | str`, got `array`"),
        ({"part": []}, "`part`: unknown field; known: parts, named, either, level, loose, tag"),
        ({"either": [TEXT | {"z": 1}]}, "`either[0].z`: unknown field; known: kind, size"),
        ({"parts": [{}]}, "`parts[0].kind`: is needed"),
        ({"parts": [{"kind": "text", "size": -1}]}, "`parts[0].size`: expected `int` >= 0"),
        ({"tag": "A"}, "`tag`: expected `str` of the form [a-z]+"),
        ({"named": {1: {}}}, "`named`: a key: expected `str`, got `int`"),
        ([], "expected `object`, got `array`"),
    ],
)
def test_messages_for_values(value: Any, told: str) -> None:
    with pytest.raises(msgspec.ValidationError) as caught:
        msgspec.convert(value, Whole)
    assert str(field_fault(caught.value, Whole)) == told


def test_what_came_is_not_reported_at_length() -> None:
    with pytest.raises(msgspec.ValidationError) as caught:
        msgspec.convert({"level": None, "parts": [{"kind": "x" * 10_000}]}, Whole)
    assert len(str(field_fault(caught.value, Whole))) < 200


@given(st.text())
def test_what_came_misleads_nobody(text: str) -> None:
    """Not even where it looks like the rest of the sentence."""
    value = {"parts": [{"kind": f"{text}` - at `$.named"}]}
    with pytest.raises(msgspec.ValidationError) as caught:
        msgspec.convert(value, Whole)
    fault = field_fault(caught.value, Whole)
    assert fault.field == "parts[0].kind"
    assert fault.message.startswith(f"{ONE_OF} ")


def choices(kind: inspect.Type, where: str = "") -> list[tuple[str, Any, tuple[Any, ...]]]:
    """Every place in a type where one of a few values is expected, and how to say it."""
    if isinstance(kind, inspect.Metadata):
        return choices(kind.type)
    if isinstance(kind, inspect.UnionType):
        return [found for member in kind.types for found in choices(member)]
    if isinstance(kind, inspect.LiteralType):
        return [("", "no such value", kind.values)]
    if isinstance(kind, inspect.ListType | inspect.VarTupleType):
        return [(f"[0]{p}", [v], c) for p, v, c in choices(kind.item_type)]
    if not isinstance(kind, inspect.StructType):
        return []
    tag = {kind.tag_field: kind.tag} if kind.tag_field else {}
    return [
        (f".{field.encode_name}{path}", {**tag, field.encode_name: value}, allowed)
        for field in kind.fields
        for path, value, allowed in choices(field.type)
    ]


JSON = [one for one in OPERATIONS if one.media == "application/json"]
BODIES = {repr(kind): kind for one in JSON for kind in one.requests}
READ = [*BODIES.values(), FileEntry, KeysFile]
CHOICES = [(kind, *choice) for kind in READ for choice in choices(inspect.type_info(kind))]


def test_there_are_choices_to_get_wrong() -> None:
    assert {path for _, path, _, _ in CHOICES} >= {".messages[0].role", ".priority", ".source"}


@pytest.mark.parametrize(("kind", "path", "value", "allowed"), CHOICES)
def test_every_choice_says_what_it_may_be(
    kind: Any, path: str, value: Any, allowed: tuple[Any, ...]
) -> None:
    with pytest.raises(msgspec.ValidationError) as caught:
        msgspec.convert(value, kind)
    fault = field_fault(caught.value, kind)
    if fault.message == "is needed":  # another field of it is looked at first
        with pytest.raises(msgspec.ValidationError) as caught:
            msgspec.convert(_filled(value, kind), kind)
        fault = field_fault(caught.value, kind)
    assert fault.field == path.removeprefix(".")
    assert fault.message == f"expected one of {', '.join(allowed)}; got 'no such value'"


def _filled(value: dict[str, Any], kind: Any) -> dict[str, Any]:
    """With what the fields before it need; of these, texts and lists are the only kinds."""
    found = inspect.type_info(kind)
    assert isinstance(found, inspect.StructType)
    needed = {field.encode_name: field.type for field in found.fields if field.required}
    return {
        name: [] if isinstance(needs, inspect.ListType) else "x" for name, needs in needed.items()
    } | value
