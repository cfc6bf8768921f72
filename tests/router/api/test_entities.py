"""Entities of a text from the labels of its tokens."""

import pytest

from loraplex.router.api.vectors.pooled import Entity, entities, rows_of

TEXT = "Ada Byron met Bob in Bath"
SPANS = [(0, 0), (0, 3), (4, 9), (10, 13), (14, 17), (18, 20), (21, 23), (23, 25), (0, 0)]


def found(*labels: str) -> list[tuple[str, str]]:
    tokens = [("O", 1.0), *((label, 0.5) for label in labels), ("O", 1.0)]
    return [(one.entity_group, one.word) for one in entities(TEXT, SPANS, tokens)]


@pytest.mark.parametrize(
    ("labels", "expected"),
    [
        (
            ("B-PER", "I-PER", "O", "B-PER", "O", "B-LOC", "I-LOC"),
            [("PER", "Ada Byron"), ("PER", "Bob"), ("LOC", "Bath")],
        ),
        (
            ("B-PER", "B-PER", "I-LOC", "O", "O", "O", "O"),
            [("PER", "Ada"), ("PER", "Byron"), ("LOC", "met")],
        ),
        (("PER", "PER", "O", "O-X", "O", "O", "O"), [("PER", "Ada Byron"), ("O-X", "Bob")]),
        (("O",) * 7, []),
    ],
)
def test_groups(labels: tuple[str, ...], expected: list[tuple[str, str]]) -> None:
    assert found(*labels) == expected


def test_a_score_is_the_mean_of_its_tokens() -> None:
    tokens = [("B-A", 0.5), ("I-A", 1.0)]
    assert entities("ab", [(0, 1), (1, 2)], tokens) == [Entity("A", 0.75, "ab", 0, 2)]


def test_rows_of_tokens() -> None:
    assert rows_of((1.0, 2.0, 3.0, 4.0), 2) == [(1.0, 2.0), (3.0, 4.0)]
