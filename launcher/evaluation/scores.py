"""Scores of answers, their intervals, and comparisons of adapters line by line. Pure."""

import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec

Z95 = 1.959964  # two-sided 95 % of the normal distribution
MOST_POINTS = 10
# Kinds of scores, and of questions, whose lines need no right answer.
_UNANSWERED = ("judge", "logprobs")


def is_image(part: Any) -> bool:
    """Whether a part of a message is no text."""
    return isinstance(part, dict) and part.get("type") != "text"


class EvalLine(msgspec.Struct, frozen=True, kw_only=True):
    """A line of data. parameters: more fields of the request. Lines may have fields beside these.

    answer: the texts or the pattern that is right, a JSON value, or a choice's number or text.
    """

    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None
    answer: Any = None
    choices: list[str] = []
    schema: dict[str, Any] | None = None
    parameters: dict[str, Any] = {}

    @property
    def images(self) -> list[dict[str, Any]]:
        """The parts of messages that are no texts, in order."""
        contents = (message.get("content") for message in self.messages or ())
        parts = (part for content in contents if isinstance(content, list) for part in content)
        return [part for part in parts if is_image(part)]

    @property
    def right_choice(self) -> int:
        """The number of the right choice, from 0. Raises ValueError."""
        is_number = type(self.answer) is int
        at = self.choices.index(self.answer) if self.answer in self.choices else -1
        at = self.answer if is_number else at
        if not 0 <= at < len(self.choices):
            raise ValueError(f"`answer` is none of the {len(self.choices)} `choices`")
        return at


def exact(text: str, case: EvalLine) -> float:
    """1 for an answer's text, or for one of several, but for white space around."""
    right = case.answer if isinstance(case.answer, list) else [case.answer]
    return float(text.strip() in [str(one).strip() for one in right])


def regex(text: str, case: EvalLine) -> float:
    """1 if the pattern occurs in the text."""
    return float(re.search(case.answer, text) is not None)


def json_value(text: str, case: EvalLine) -> float:
    """1 if the text is JSON that the schema allows, and that equals the answer; a line may have
    one of the two. Order of keys and the writing of numbers do not matter.
    """
    from jsonschema.validators import validator_for

    try:
        value = msgspec.json.decode(text)
    except (msgspec.MsgspecError, RecursionError, UnicodeEncodeError):
        return 0.0
    rules = [case.schema or {}, {} if case.answer is None else {"const": case.answer}]
    return float(all(validator_for(rule)(rule).is_valid(value) for rule in rules))


def choice(likelihoods: Sequence[float], case: EvalLine) -> float:
    """1 if the right choice is the likeliest; of equals the first counts."""
    return float(likelihoods.index(max(likelihoods)) == case.right_choice)


def judged(text: str) -> float | None:
    """A judge's points as a share of the most; None = the text has none."""
    points = int(text) if re.fullmatch(r"\s*[0-9]{1,2}\s*", text, re.ASCII) else -1
    return points / MOST_POINTS if 0 <= points <= MOST_POINTS else None


OF_TEXT: Mapping[str, Callable[[str, EvalLine], float]] = {
    "exact": exact,
    "regex": regex,
    "json": json_value,
}


def fault_of(case: EvalLine, score: str) -> str | None:
    """Why a line cannot be scored so, or asked for `logprobs`; None = it can."""
    if (case.prompt is None) == (case.messages is None):
        return "it needs either `prompt` or `messages`"
    if score == "logprobs" and case.images:
        return "texts alone are compared, no images"
    if case.answer is None and score not in _UNANSWERED and not (score == "json" and case.schema):
        return "it has no `answer`"
    try:
        if score == "choice":
            _ = case.right_choice
        elif score == "regex" and not isinstance(case.answer, str):
            return f"`answer` must be a pattern, got {case.answer!r}"
        elif score == "regex":
            re.compile(case.answer)
        elif score == "json":
            _check_schema(case.schema or {})
    except (re.error, TypeError, ValueError) as error:
        return str(error)
    return None


def _check_schema(schema: dict[str, Any]) -> None:
    """Raises ValueError."""
    from jsonschema import SchemaError
    from jsonschema.validators import validator_for

    try:
        validator_for(schema).check_schema(schema)
    except SchemaError as error:
        raise ValueError(f"`schema`: {error.message}") from None


def interval(scores: Sequence[float]) -> tuple[float, float]:
    """Bounds of the mean at 95 %: Wilson's where all scores are 0 or 1, else the normal
    distribution's. Of one score that is neither, of none: 0 and 1.
    """
    n = len(scores)
    if n and set(scores) <= {0.0, 1.0}:
        return wilson(int(sum(scores)), n)
    if n < 2:
        return 0.0, 1.0
    mean = sum(scores) / n
    half = Z95 * math.sqrt(sum((score - mean) ** 2 for score in scores) / (n - 1) / n)
    return max(0.0, mean - half), min(1.0, mean + half)


def wilson(hits: int, n: int) -> tuple[float, float]:
    share, z2 = hits / n, Z95 * Z95
    middle = (share + z2 / (2 * n)) / (1 + z2 / n)
    half = Z95 / (1 + z2 / n) * math.sqrt(share * (1 - share) / n + z2 / (4 * n * n))
    return (0.0 if hits == 0 else middle - half), (1.0 if hits == n else middle + half)


def compare(ours: Sequence[float | None], theirs: Sequence[float | None]) -> tuple[int, int, int]:
    """Wins, losses and ties, line by line. None stands for a line without a score."""
    pairs = [(a, b) for a, b in zip(ours, theirs, strict=True) if a is not None and b is not None]
    wins, losses = sum(a > b for a, b in pairs), sum(a < b for a, b in pairs)
    return wins, losses, len(pairs) - wins - losses


def sign_test(wins: int, losses: int) -> float:
    """p of the two-sided sign test, without ties."""
    n = wins + losses
    logs = (
        math.lgamma(n + 1) - math.lgamma(k + 1) - math.lgamma(n - k + 1) - n * math.log(2)
        for k in range(min(wins, losses) + 1)
    )
    return min(1.0, 2 * sum(map(math.exp, logs)))
