"""`merged_adapters` of LoRAX's bodies: what arrives, and what is refused by its field's name."""

import json
from typing import Any

import pytest

from router.api.lorax import request as lorax
from router.api.request.formatter import ApiLimits, ApiRequest
from router.call import MergedChoice, RequestError

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
