"""Whatever the masks of a pattern, a grammar or tags let through is of that form."""

import re

from hypothesis import given

from loraplex.router.shape.shape import Grammar, Regex, StructuralTag, Tag
from loraplex.router.tools.compose import compose
from tests.router.shape.drawn import many
from tests.router.shape.made_texts import (
    NODES,
    Node,
    check_tags,
    lark_source,
    made_tags,
    pattern,
)
from tests.router.shape.walks import BYTES

SEEDS = 5
MOST = 600


@many(100)
@given(NODES)
def test_patterns(node: Node) -> None:
    answers = BYTES.answers(compose(Regex(pattern(node), "pattern")).grammar, SEEDS, MOST)
    assert answers
    for text in answers:
        assert re.fullmatch(pattern(node), text), text


@many(50)
@given(NODES)
def test_grammars(node: Node) -> None:
    source = lark_source(node)
    answers = BYTES.answers(compose(Grammar(source, "lark", "grammar")).grammar, SEEDS, MOST)
    assert answers
    for text in answers:
        assert re.fullmatch(pattern(node), text), (source, text)


@many(40)
@given(made_tags("<t"))
def test_tags(tags: tuple[Tag, ...]) -> None:
    grammar = compose(StructuralTag(tags, ("<t",), "tags")).grammar
    answers = BYTES.answers(grammar, SEEDS, MOST, begin="see <t")
    assert answers
    for text in answers:
        assert check_tags(tags, "<t", text)
