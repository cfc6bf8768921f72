"""Drafts come from texts of the same owner alone, and equal what a plain scan finds."""

from collections.abc import Iterator

from hypothesis import given
from hypothesis import strategies as st

from loraplex.server.engine.drafts.draft import LONGEST, NO_DRAFT, Draft, DraftOwner, vote
from loraplex.server.engine.drafts.source import VOTERS, WINDOWS, DraftSource

MUCH = 1 << 20
OWNER = DraftOwner("adapter", "tenant")
OTHERS = (DraftOwner("adapter", "another"), DraftOwner("other", "tenant"), DraftOwner("", "tenant"))
OWNERS = (OWNER, *OTHERS)
SHARED = 3  # token ids that all owners' texts have; each owner has one more of its own

Text = list[int]


def texts(own: int) -> st.SearchStrategy[Text]:
    return st.lists(st.sampled_from([*range(SHARED), SHARED + own]), max_size=40)


ANSWERS = st.lists(
    st.integers(0, len(OWNERS) - 1).flatmap(
        lambda own: st.tuples(st.just(own), texts(own), texts(own))
    ),
    max_size=8,
)


def matches(tokens: Text, text: Text, start: int, window: int) -> Iterator[tuple[int, int]]:
    """(position, length of the match before it), the latest first."""
    for position in range(len(text) - 1, max(start, window) - 1, -1):
        for length in range(min(LONGEST, position, len(tokens)), window - 1, -1):
            if text[position - length : position] == tokens[len(tokens) - length :]:
                yield position, length
                break


def scan(tokens: Text, answers: list[tuple[Text, int]], most: int) -> Draft:
    """A slow reference. answers: others, the latest first, and where their places begin."""
    for window in WINDOWS:
        own = [
            (length, tokens[at : at + most]) for at, length in matches(tokens, tokens, 0, window)
        ]
        other = [
            (length, text[at : at + most])
            for text, start in answers
            for at, length in matches(tokens, text, start, window)
        ]
        if found := own[:VOTERS] + other[:VOTERS]:
            longest = max(length for length, _ in found)
            return vote([said for length, said in found if length == longest], longest)
    return NO_DRAFT


@given(texts(0), st.lists(texts(0), max_size=5), ANSWERS, st.integers(0, 8))
def test_drafts_are_those_of_a_scan(
    prompt: Text, parts: list[Text], before: list[tuple[int, Text, Text]], most: int
) -> None:
    source = DraftSource(MUCH)
    answers: list[tuple[Text, int]] = []
    for own, other_prompt, answer in before:
        source.keep(OWNERS[own], [*other_prompt, *answer], len(other_prompt))
        if OWNERS[own] == OWNER and answer:
            lead = other_prompt[-LONGEST:]
            answers.insert(0, (lead + answer, len(lead)))
    drafts = source.open(OWNER, prompt)
    tokens = list(prompt)
    for part in [[], *parts]:
        drafts.extend(part)
        tokens += part
        draft = drafts.propose(most)
        assert draft == scan(tokens, answers, most)
        assert all(0 < chance < 1 for chance in draft.chances)
        assert len(draft.chances) == len(draft.token_ids) <= most
        assert set(draft.token_ids) <= {*range(SHARED + 1)}, "another owner's token"


@given(ANSWERS, st.integers(0, 4000))
def test_bytes_stay_below_the_bound(answers: list[tuple[int, Text, Text]], bound: int) -> None:
    source = DraftSource(bound)
    for own, prompt, answer in answers:
        source.keep(OWNERS[own], [*prompt, *answer], len(prompt))
        assert source._num_tokens * source.TOKEN_BYTES <= bound


def answered(source: DraftSource, owner: DraftOwner, tokens: Text) -> None:
    source.keep(owner, tokens, 0)


def proposed(source: DraftSource, owner: DraftOwner) -> Text:
    return source.open(owner, [1, 2, 3]).propose(1).token_ids


def test_a_dropped_adapter_leaves_nothing() -> None:
    source = DraftSource(MUCH)
    for owner, token in zip(OWNERS, (10, 11, 12, 13), strict=True):
        answered(source, owner, [1, 2, 3, token])
    assert [proposed(source, owner) for owner in OWNERS] == [[10], [11], [12], [13]]
    source.drop("adapter")
    assert [proposed(source, owner) for owner in OWNERS] == [[], [], [12], [13]]
    source.drop("other")
    source.drop("")
    assert source._num_tokens == 0


def test_the_owner_goes_first_that_was_used_longest_ago() -> None:
    source = DraftSource(8 * DraftSource.TOKEN_BYTES)  # two answers
    answered(source, OWNERS[0], [1, 2, 3, 10])
    answered(source, OWNERS[1], [1, 2, 3, 11])
    assert proposed(source, OWNERS[0]) == [10]
    answered(source, OWNERS[2], [1, 2, 3, 12])
    assert [proposed(source, owner) for owner in OWNERS[:3]] == [[10], [], [12]]


def test_a_prompt_without_an_answer_is_not_kept() -> None:
    source = DraftSource(MUCH)
    source.keep(OWNER, [1, 2, 3, 4], 4)
    assert source._num_tokens == 0
    assert source.open(OWNER, [1, 2, 3]).propose(4) == NO_DRAFT


def test_a_chance_is_the_part_of_continuations_that_say_so() -> None:
    draft = DraftSource(MUCH).open(OWNER, [1, 2, 3, 7, 8, 1, 2, 3, 7, 9, 1, 2, 3]).propose(3)
    assert draft.token_ids == [7, 9, 1]
    first, second, third = draft.chances
    assert first > third > second
