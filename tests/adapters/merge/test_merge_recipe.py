"""A recipe says what is merged: equal results have equal recipes, and impossible ones none."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loraplex.adapters.errors import AdapterError
from loraplex.adapters.merge.recipe import (
    MAX_MEMBERS,
    MAX_WEIGHT,
    STRATEGIES,
    MergeMember,
    MergeRecipe,
    make_recipe,
    recipe_problem,
    sole_member,
)

A, B, C = "a" * 64, "b" * 64, "c" * 64
WEIGHTS = st.floats(-10, 10).filter(lambda weight: abs(weight) > 1e-3)
MEMBERS = st.lists(
    st.builds(MergeMember, st.sampled_from([A, B, C]), WEIGHTS), min_size=2, max_size=6
)


def linear(*pairs: tuple[str, float]) -> MergeRecipe:
    return make_recipe([MergeMember(*pair) for pair in pairs], "linear", 0.3, "frequency")


def test_the_digest_names_everything_that_matters() -> None:
    plain = make_recipe([MergeMember(A, 1.0), MergeMember(B, 0.5)], "ties", 0.5, "total")
    others = [
        make_recipe([MergeMember(B, 0.5), MergeMember(A, 1.0)], "ties", 0.5, "total"),
        make_recipe([MergeMember(A, 1.0), MergeMember(C, 0.5)], "ties", 0.5, "total"),
        make_recipe([MergeMember(A, 1.0), MergeMember(B, 0.25)], "ties", 0.5, "total"),
        make_recipe([MergeMember(A, 1.0), MergeMember(B, 0.5)], "dare_ties", 0.5, "total"),
        make_recipe([MergeMember(A, 1.0), MergeMember(B, 0.5)], "ties", 0.25, "total"),
        make_recipe([MergeMember(A, 1.0), MergeMember(B, 0.5)], "ties", 0.5, "frequency"),
    ]
    digests = {recipe.digest for recipe in (plain, *others)}
    assert len(digests) == 7
    assert all(len(digest) == 64 for digest in digests)


def test_the_digest_is_the_same_for_ever() -> None:
    """Other workers, and what lies on disks, know merges by it."""
    recipe = MergeRecipe((MergeMember(A, 1.0), MergeMember(B, -0.5)), "dare_ties", 0.5, "total")
    assert recipe.digest == "b349eb345f55980aa9d6297fbc7f73be91231b718ea7e3894cb38bd88aff1080"


def test_values_that_a_strategy_does_not_use_are_left_out() -> None:
    members = [MergeMember(A, 1.0), MergeMember(B, 0.5)]
    assert make_recipe(members, "linear", 0.3, "frequency") == MergeRecipe(tuple(members))
    dare = make_recipe(members, "dare_linear", 0.3, "frequency")
    assert dare == make_recipe(members, "dare_linear", 0.3, "total")


@given(MEMBERS)
def test_linear_weights_of_the_same_content_add_up(members: list[MergeMember]) -> None:
    sums = {d: sum(m.weight for m in members if m.digest == d) for d in (A, B, C)}
    if all(abs(weight) < 1e-6 for weight in sums.values()):
        return
    recipe = make_recipe(members, "linear", 0.0, "total")
    assert {m.digest: m.weight for m in recipe.members} == pytest.approx(
        {digest: weight for digest, weight in sums.items() if abs(weight) >= 1e-9}
    )


@given(MEMBERS, st.integers(0, 6), st.sampled_from([0.0, -0.0]))
def test_a_weight_of_zero_changes_no_linear_merge(
    members: list[MergeMember], place: int, zero: float
) -> None:
    members = [MergeMember(A, 3.0), *(m for m in members if m.digest != A)]
    more = [*members[:place], MergeMember("d" * 64, zero), *members[place:]]
    plain = make_recipe(members, "linear", 0.0, "total")
    assert make_recipe(more, "linear", 0.0, "total").digest == plain.digest


def test_a_weight_of_zero_votes_in_ties() -> None:
    recipe = make_recipe([MergeMember(A, 1.0), MergeMember(B, 0.0)], "ties", 0.5, "total")
    assert [member.digest for member in recipe.members] == [A, B]


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_one_member_is_linear(strategy: str) -> None:
    recipe = make_recipe([MergeMember(A, 0.5)], strategy, 0.2, "total")  # type: ignore[arg-type]
    assert recipe == MergeRecipe((MergeMember(A, 0.5),))


def test_what_leaves_an_adapter_as_it_is() -> None:
    assert sole_member(linear((A, 1.0))) == A
    assert sole_member(linear((B, 0.0), (A, 1.0))) == A
    assert sole_member(linear((A, 0.5), (A, 0.5))) == A
    assert sole_member(linear((A, 0.5))) is None
    assert sole_member(linear((A, 1.0), (B, 1.0))) is None


@pytest.mark.parametrize(
    ("recipe", "said"),
    [
        (MergeRecipe(()), "every weight is 0"),
        (MergeRecipe((MergeMember(A, 0.0),)), "every weight is 0"),
        (MergeRecipe((MergeMember(A, 1.0),) * (MAX_MEMBERS + 1)), "at most 16"),
        (MergeRecipe((MergeMember(A, 2 * MAX_WEIGHT),)), "1000"),
        (MergeRecipe((MergeMember(A, float("nan")),)), "1000"),
        (MergeRecipe((MergeMember(A, float("inf")),)), "1000"),
        (MergeRecipe((MergeMember(A, 1.0),), "ties", 0.0), "density"),
        (MergeRecipe((MergeMember(A, 1.0),), "ties", 1.5), "density"),
        (MergeRecipe((MergeMember(A, 1.0),), "ties", float("nan")), "density"),
        (MergeRecipe((MergeMember("../x", 1.0),)), "digest"),
    ],
)
def test_recipes_by_which_nothing_is_made(recipe: MergeRecipe, said: str) -> None:
    assert said in (recipe_problem(recipe) or "")


def test_weights_that_cancel_each_other_out_are_refused() -> None:
    with pytest.raises(AdapterError, match="cancel"):
        linear((A, 0.1), (A, 0.2), (A, -0.3))
