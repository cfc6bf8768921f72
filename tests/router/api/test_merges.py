"""`merged_adapters` and `adapter_scale`: what arrives, and what is refused by its field's name."""

import json
from typing import Any

import pytest

from loraplex.router.api.lorax import request as lorax
from loraplex.router.api.messages import request as messages
from loraplex.router.api.openai import chat, completions
from loraplex.router.api.request.formatter import ApiLimits, ApiRequest
from loraplex.router.call import AdapterChoice, MergedChoice, RequestError

LIMITS = ApiLimits(("small", "org/small"), "hub")
TWO = {"ids": ["org/a@main", "b"], "weights": [0.5, -1]}


def parse(**parameters: Any) -> ApiRequest:
    return lorax.parse(json.dumps({"inputs": "x", "parameters": parameters}).encode(), LIMITS)


def choice(**fields: Any) -> MergedChoice:
    found = parse(api_token="hf_x", merged_adapters=TWO | fields).call.adapter
    assert isinstance(found, MergedChoice)
    return found


def test_what_is_asked_for_arrives() -> None:
    found = choice(merge_strategy="dare_ties", density=0.5, majority_sign_method="frequency")
    assert [member.adapter_id for member in found.members] == ["org/a@main", "b"]
    assert [member.ref.source for member in found.members] == ["hub", "alias"]
    assert {member.token for member in found.members} == {"hf_x"}
    assert (found.weights, found.strategy) == ((0.5, -1.0), "dare_ties")
    assert (found.density, found.majority_sign_method) == (0.5, "frequency")
    assert found.adapter_id == "org/a@main,b"
    assert found.source == "hub,alias"
    assert "hf_x" not in repr(found)


def test_defaults_and_nulls() -> None:
    nulls = {"merge_strategy": None, "density": None, "majority_sign_method": None, "odd": 1}
    for found in (choice(), choice(**nulls), choice(density=0.0)):
        assert (found.strategy, found.majority_sign_method) == ("linear", "total")
    assert parse(adapter_id="", merged_adapters=TWO).call.adapter is not None
    assert parse(adapter_id="b", merged_adapters=None).call.adapter is not None


def test_a_source_is_that_of_every_name_without_one() -> None:
    found = parse(adapter_source="local", merged_adapters=TWO | {"ids": ["a", "b/c"]}).call.adapter
    assert isinstance(found, MergedChoice)
    assert [member.ref.source for member in found.members] == ["local", "local"]


@pytest.mark.parametrize(
    ("fields", "param", "said"),
    [
        ({"merge_strategy": "magic"}, "merge_strategy", "linear, ties, dare_linear, dare_ties"),
        ({"merge_strategy": ""}, "merge_strategy", "linear"),
        ({"merge_strategy": 3}, "merge_strategy", "str"),
        ({"majority_sign_method": "vote"}, "majority_sign_method", "total, frequency"),
        ({"ids": []}, "ids", "1 to 16"),
        ({"ids": ["a"] * 17, "weights": [1] * 17}, "ids", "got 17"),
        ({"ids": "a"}, "ids", "array"),
        ({"ids": ["a", 3]}, "ids[1]", "str"),
        ({"ids": ["a", "../b"]}, "ids[1]", "'../b'"),
        ({"ids": ["a", ""]}, "ids[1]", "the base model"),
        ({"ids": ["small", "a"]}, "ids[0]", "the base model"),
        ({"ids": ["a", "ftp:bucket/key"]}, "ids[1]", "unknown source"),
        ({"ids": ["a"]}, "weights", "each of 1 ids, got 2"),
        ({"weights": []}, "weights", "each of 2 ids, got 0"),
        ({"weights": [0, -0.0]}, "weights", "differ from 0"),
        ({"weights": [1, 1001]}, "weights", "+-1000"),
        ({"weights": [1, None]}, "weights[1]", "float"),
        ({"merge_strategy": "ties"}, "density", "for 'ties', got 0"),
        ({"merge_strategy": "dare_linear", "density": 1.01}, "density", "at most 1"),
        ({"merge_strategy": "dare_ties", "density": -0.1}, "density", "above 0"),
        ({"density": "half"}, "density", "float"),
    ],
)
def test_what_cannot_be_is_refused_by_name(fields: dict[str, Any], param: str, said: str) -> None:
    with pytest.raises(RequestError) as caught:
        choice(**fields)
    assert caught.value.param == f"merged_adapters.{param}"
    assert said in caught.value.message


def test_fields_that_must_be_there() -> None:
    with pytest.raises(RequestError, match="ids"):
        parse(merged_adapters={"weights": [1]})
    with pytest.raises(RequestError, match="cannot both"):
        parse(adapter_id="a", merged_adapters=TWO)


HELLO = [{"role": "user", "content": "hi"}]
# Each API's body beside the adapter, and the field that names it.
APIS: dict[str, tuple[Any, dict[str, Any], str]] = {
    "completions": (completions.parse, {"prompt": "x"}, "model"),
    "chat": (chat.parse, {"messages": HELLO}, "model"),
    "messages": (messages.parse, {"messages": HELLO, "max_tokens": 5}, "model"),
}


def adapter_asked(api: str, model: str, **fields: Any) -> object:
    parse_body, body, field = APIS[api]
    return parse_body(json.dumps(body | {field: model} | fields).encode(), LIMITS).call.adapter


@pytest.mark.parametrize("api", APIS)
def test_other_apis_merge_beside_the_bases_name(api: str) -> None:
    for base in ("small", ""):
        found = adapter_asked(api, base, merged_adapters=TWO)
        assert isinstance(found, MergedChoice)
        assert found.weights == (0.5, -1.0)
    with pytest.raises(RequestError, match="cannot both") as caught:
        adapter_asked(api, "b", merged_adapters=TWO)
    assert caught.value.param == "merged_adapters"


@pytest.mark.parametrize("api", APIS)
def test_a_scale_is_the_requests_own(api: str) -> None:
    found = adapter_asked(api, "b", adapter_scale=0.5)
    assert isinstance(found, AdapterChoice)
    assert (found.adapter_id, found.scale) == ("b", 0.5)
    assert adapter_asked(api, "b", adapter_scale=1) == adapter_asked(api, "b")


@pytest.mark.parametrize(
    ("model", "fields", "said"),
    [
        ("b", {"adapter_scale": 0}, "leave the adapter out"),
        ("b", {"adapter_scale": 1001}, "within"),
        ("small", {"adapter_scale": 2}, "needs an adapter"),
        ("small", {"adapter_scale": 2, "merged_adapters": TWO}, "are the scales"),
        ("b", {"adapter_scale": "2"}, "adapter_scale"),
    ],
)
def test_scales_that_are_none(model: str, fields: dict[str, Any], said: str) -> None:
    with pytest.raises(RequestError, match=said) as caught:
        adapter_asked("chat", model, **fields)
    assert caught.value.param == "adapter_scale"
