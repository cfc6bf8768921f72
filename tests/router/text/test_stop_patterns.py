"""Patterns that end an answer: what goes out, what is held back, and what takes too long."""

import time

import pytest
import regex
from hypothesis import given
from hypothesis import strategies as st

from loraplex.router.call import RequestError
from loraplex.router.text import stop_patterns
from loraplex.router.text.stop_patterns import MAX_HELD, compiled
from loraplex.router.text.stops import StopMatcher

Read = tuple[str, str, str | None]


def read(text: str, *patterns: str, include: bool = False, stops: tuple[str, ...] = ()) -> Read:
    """Character by character: what went out each time, what remained, and what ended it."""
    matcher = StopMatcher(stops, include, patterns)
    out = [matcher.push(character) for character in text]
    return "|".join(out), matcher.flush(), matcher.hit


@pytest.mark.parametrize(
    ("text", "patterns", "expected"),
    [
        ("ab12cd", (r"\d{2}",), ("a|b||||", "", r"\d{2}")),
        ("ab1cd", (r"\d{2}",), ("a|b||1c|d", "", None)),
        ("ab1", (r"\d{2}",), ("a|b|", "1", None)),
        ("say END", ("END|STOP",), ("s|a|y| |||", "", "END|STOP")),
        ("a\nb\n", (r"^b$",), ("a|\n|b|\n", "", None)),
        ("a\nb\n", (r"(?m)^b$",), ("a|\n||", "", r"(?m)^b$")),
        ("xab", (r"(?<=x)a",), ("x||", "", r"(?<=x)a")),
        ("xyz", ("z", "y"), ("x||", "", "y")),
        ("abc", ("bc", "ab"), ("||", "", "ab")),
        ("a€b", ("€",), ("a||", "", "€")),
        ("aab", (r"a(?=b)",), ("|a|", "", r"a(?=b)")),
    ],
)
def test_table(text: str, patterns: tuple[str, ...], expected: tuple[str, str, str | None]) -> None:
    assert read(text, *patterns) == expected


def test_kept_matches_hold_nothing_back() -> None:
    assert read("ab12c", r"\d\d", include=True) == ("a|b|1|2|", "", r"\d\d")


def test_beside_strings() -> None:
    assert read("one two", "t.", stops=("wo",))[::2] == ("o|n|e| |||", "t.")
    assert read("one two", r"\d", stops=("wo",))[::2] == ("o|n|e| |t||", "wo")


@given(
    st.text("ab1\n", max_size=40),
    st.lists(st.sampled_from([r"\d+", "a+b", "ab|ba", "(?:ab)+1", r"b\n", "1.*1"]), min_size=1),
    st.lists(st.integers(1, 5), min_size=40, max_size=40),
)
def test_pieces_against_searches_of_the_whole(
    text: str, patterns: list[str], sizes: list[int]
) -> None:
    """No text goes out that a search of all the text so far finds to be a match's."""
    matcher, out, end = StopMatcher((), False, tuple(patterns)), "", 0
    for size in sizes:
        piece, end = text[end : end + size], end + size
        out += matcher.push(piece)
        found = [m for p in patterns if (m := regex.search(p, text[:end]))]
        assert (matcher.hit is not None) == bool(found)
        if found:
            first = min(m.start() for m in found)
            assert out == text[:first]
            return
        assert text.startswith(out)
    assert out + matcher.flush() == text


def test_what_is_held_back_is_bounded() -> None:
    matcher, out = StopMatcher((), False, ("x.*y",)), 0
    held = [
        count - (out := out + len(matcher.push(c))) for count, c in enumerate("x" + "a" * 1999, 1)
    ]
    assert held == [*range(1, MAX_HELD + 1), MAX_HELD] + [0] * (2000 - MAX_HELD - 1)
    assert matcher.push("y") == "y"
    assert matcher.hit is None


def test_a_pattern_that_takes_too_long_is_a_fault_of_the_request() -> None:
    with pytest.raises(RequestError, match="takes too long") as caught:
        read("x" * 400, "(x+x+)+y")
    assert (caught.value.cause, caught.value.param) == ("invalid", "stop_regex")


@pytest.mark.parametrize("pattern", ["(", "a*", "^", "a|", "[", "(?P<a>x)(?P=b)", "$"])
def test_refused(pattern: str) -> None:
    with pytest.raises(ValueError, match="regular expression|empty text"):
        compiled(pattern)


class Slow:
    """A pattern whose searches find nothing, and take so long by a clock of their own."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, search_s: float) -> None:
        self.searches, self._search_s = 0, search_s
        monkeypatch.setattr(stop_patterns, "compiled", lambda pattern: self)
        monkeypatch.setattr(time, "thread_time", self._now)

    def _now(self) -> float:
        return self.searches * self._search_s

    def search(self, text: str, start: int, *, partial: bool, timeout: float) -> None:
        if timeout < self._search_s:
            raise TimeoutError
        self.searches += 1


def test_all_answers_of_a_request_share_the_time_of_their_patterns(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    slow = Slow(monkeypatch, 0.001)
    first = StopMatcher((), False, ("a",))
    for _ in range(45):
        first.twin().push("text")
    with pytest.raises(RequestError, match="takes too long"):
        [first.twin().push("text") for _ in range(15)]
    assert slow.searches < 120


def test_a_twin_reads_a_text_of_its_own() -> None:
    first = StopMatcher(("END",), False, ("x+y",))
    twins = [first.twin() for _ in range(3)]
    out = [twin.push(text) for twin, text in zip(twins, ("aEN", "xx", "b"), strict=True)]
    assert out == ["a", "", "b"]
    rest = [twin.push(text) + twin.flush() for twin, text in zip(twins, "DyD", strict=True)]
    assert rest == ["", "", "D"]
    assert [twin.hit for twin in twins] == ["END", "x+y", None]


def test_patterns_of_others_do_not_cost_an_answer_its_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """However many there are: each is compiled once for a request."""
    matcher = StopMatcher((), False, ("a",))
    monkeypatch.setattr(stop_patterns, "compiled", None)
    assert matcher.twin().push("b") == "b"
