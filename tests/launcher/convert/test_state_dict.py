"""Where the tensors are in what trainers save. A number stands for a tensor here."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loraplex.launcher.convert.unpickle import StateDictError, find_tensors, refused_global

A, B = "base_model.model.a.lora_A.weight", "base_model.model.a.lora_B.weight"
PLAIN = {A: 1.0, B: 2.0}
OF_A_MODEL = {"model.embed_tokens.weight": 1.0}


def is_tensor(value: object) -> bool:
    return isinstance(value, float)


def prefixed(prefix: str) -> dict[str, float]:
    return {prefix + name: value for name, value in PLAIN.items()}


@pytest.mark.parametrize(
    ("saved", "found"),
    [
        (PLAIN, PLAIN),
        (OF_A_MODEL, OF_A_MODEL),
        ({"state_dict": PLAIN, "epoch": 3}, PLAIN),
        ({"a": {"b": {"c": PLAIN}}}, PLAIN),
        ({"model": PLAIN, "optimizer": {"state": {0: {"step": 1.0}}}}, PLAIN),
        (prefixed("module."), PLAIN),
        ({"model": prefixed("module.module.")}, PLAIN),
        (prefixed("module.") | PLAIN, prefixed("module.") | PLAIN),
    ],
)
def test_found(saved: object, found: dict[str, float]) -> None:
    assert dict(find_tensors(saved, is_tensor)) == found


@pytest.mark.parametrize(
    ("saved", "words"),
    [
        ({"a": PLAIN, "b": PLAIN}, "2 state dicts"),
        ({"weights": OF_A_MODEL}, r"no state dict of LoRA tensors.*\['weights'\]"),
        ({}, "a dict without names"),
        ([PLAIN], "of type list"),
        (None, "of type NoneType"),
        (PLAIN | {"epoch": 3}, "'epoch' is no tensor but a value of type int"),
        ({"state_dict": PLAIN | {"config": {"r": 8}}}, "'config' is no tensor but a dict"),
        (PLAIN | {7: 1.0}, "no text but a value of type int"),
        ({"a": {"b": {"c": {"d": {"e": PLAIN}}}}}, "no state dict"),
    ],
)
def test_refused(saved: object, words: str) -> None:
    with pytest.raises(StateDictError, match=words):
        find_tensors(saved, is_tensor)


def test_what_takes_for_ever_to_spell_is_not_spelled() -> None:
    endless: Any = ()
    for _ in range(64):
        endless = (endless, endless)
    loop: dict[str, Any] = {}
    loop["lora_"] = loop
    for saved in ({"x": endless}, PLAIN | {"x": endless}, loop, {"\x1b" * 10**6: 1}):
        with pytest.raises(StateDictError) as refused:
            find_tensors(saved, is_tensor)
        assert len(str(refused.value)) < 1000


VALUES = st.recursive(
    st.one_of(st.floats(), st.integers(), st.none(), st.text()),
    lambda child: st.one_of(
        st.lists(child, max_size=4),
        st.dictionaries(
            st.one_of(st.text(max_size=9), st.just(A), st.integers()), child, max_size=4
        ),
    ),
    max_leaves=20,
)


@given(VALUES)
def test_anything_is_found_or_refused(saved: object) -> None:
    try:
        found = find_tensors(saved, is_tensor)
    except StateDictError:
        return
    assert all(isinstance(name, str) and is_tensor(value) for name, value in found.items())


@pytest.mark.parametrize(
    ("message", "name"),
    [
        ("Unsupported global: GLOBAL posix.system was not an allowed global", "posix.system"),
        ("Trying to load unsupported GLOBAL builtins.eval whose module", "builtins.eval"),
        ("Unsupported class", ""),
    ],
)
def test_what_the_unpickler_refused(message: str, name: str) -> None:
    assert refused_global(message) == name
