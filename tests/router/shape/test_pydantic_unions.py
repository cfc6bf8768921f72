"""Tagged unions as pydantic writes their schemas: a tag with a default is not required there."""

from typing import Annotated, Any, Literal

import pytest
from pydantic import BaseModel, Field, TypeAdapter, ValidationError

from tests.router.shape.matching import writes


class Cat(BaseModel):
    kind: Literal["cat"] = "cat"
    lives: int


class BigDog(BaseModel):
    kind: Literal["dog"] = "dog"
    size: Literal["big"] = "big"


class SmallDog(BaseModel):
    kind: Literal["dog"] = "dog"
    size: Literal["small"] = "small"
    friend: "Pet | None" = None


Dog = Annotated[BigDog | SmallDog, Field(discriminator="size")]
Pet = Annotated[Cat | Dog, Field(discriminator="kind")]


class Owner(BaseModel):
    pets: list[Pet]
    first: Pet | None = None


SmallDog.model_rebuild()
Owner.model_rebuild()
SMALL = {"kind": "dog", "size": "small"}
ANSWERS: list[dict[str, Any]] = [
    {"pets": []},
    {"pets": [{"kind": "cat", "lives": 9}], "first": None},
    {"pets": [{"kind": "dog", "size": "big"}, SMALL], "first": SMALL},
    {"pets": [{**SMALL, "friend": {"kind": "cat", "lives": 1}}]},
    {"pets": [{**SMALL, "friend": {**SMALL, "friend": None}}]},
    {"pets": [{"lives": 9}]},
    {"pets": [{"kind": "dog"}]},
    {"pets": [{"size": "small"}]},
    {"pets": [{"kind": "cat", "size": "small"}]},
    {"pets": [{**SMALL, "friend": {"lives": 1}}]},
    {"pets": [], "first": {"kind": "cow"}},
]


@pytest.mark.parametrize("answer", ANSWERS, ids=str)
def test_an_answer_is_what_pydantic_takes(answer: dict[str, Any]) -> None:
    adapter = TypeAdapter(Owner)
    try:
        adapter.validate_python(answer)
        taken = True
    except ValidationError:
        taken = False
    assert writes(adapter.json_schema(), answer) is taken
