"""Terminals of llguidance's Lark for the texts and numbers of JSON. Pure.

Each text is written in one way alone: `\\u` stands for control characters that have no shorter
escape, so that no name hides behind one.
"""

import json
import math
import re
from fractions import Fraction
from typing import Any

from loraplex.router.shape.schema.values import CannotHold, Numbers, step_of
from loraplex.router.shape.texts.regex import (
    ANY_CHAR,
    Alt,
    Both,
    CharSet,
    Not,
    Regex,
    Rep,
    Seq,
    Words,
    met_ranges,
    other_chars,
)

_SHORT = {8: "b", 9: "t", 10: "n", 12: "f", 13: "r", 34: '"', 92: r"\\"}
_ESCAPED = CharSet(((0, 31), (34, 34), (92, 92), (127, 127)))
_ANY = r'(?:[^"\\\x00-\x1f\x7f]|\\(?:["\\bfnrt]|u00(?:0[0-7bef]|1[0-9a-f]|7f)))'
_ANY_STRING = f'/"{_ANY}*"/'
# An exclusive bound and six digits after the point never round to the bound itself.
_PLACES, _MOST_OPEN = 6, 10**9
_MOST_STEP = 4_000
_NOT_WHOLE = r"/-?(?:0|[1-9][0-9]{0,8})\.[0-9]{0,5}[1-9]/"


def string(regex: Regex) -> str:
    """The expression of strings whose texts are in the set, for the body of a terminal."""
    match regex:
        case Alt(options) if not _is_plain(regex):
            return f"({' | '.join(map(string, _sorted(options)))})"
        case Both(parts):
            known = [string(part) for part in _sorted(parts) if not isinstance(part, Not)]
            left = [f"~{string(part.part)}" for part in _sorted(parts) if isinstance(part, Not)]
            return f"({' & '.join([*(known or [_ANY_STRING]), *left])})"
        case Not(part):
            return f"({_ANY_STRING} & ~{string(part)})"
    return f'/"{_written(regex)}"/'


def literal(value: Any) -> str:
    """The expression of one JSON value that is no array and no object."""
    if isinstance(value, str):
        return json.dumps(f'"{_spelled(value)}"', ensure_ascii=False)
    return json.dumps(json.dumps(value))


def number(numbers: Numbers) -> str:
    """The body of a rule for such numbers, of which there are some. Raises CannotHold."""
    low, high = numbers.low, numbers.high
    if numbers.only is not None:
        texts = (json.dumps(_plain_number(one)) for one in sorted(numbers.only))
        return f"/{'|'.join(map(_quoted, texts))}/"
    if low is not None and low == high:
        return literal(_plain_number(low))
    if numbers.whole is False:
        if low is not None or high is not None or numbers.step is not None:
            raise CannotHold("numbers that are not whole have no bounds here")
        return _NOT_WHOLE
    return f"%json {json.dumps(_bounded(numbers))}"


def few_numbers(numbers: Numbers, most: int) -> list[int | float] | None:
    """Lists the numbers if there are at most `most`, else None."""
    if numbers.only is not None:
        return [_plain_number(one) for one in sorted(numbers.only)]
    low, high, step = numbers.low, numbers.high, step_of(numbers)
    if low is None or high is None or (step is None and low != high):
        return None
    step = step or Fraction(1)
    size = (high - low) / step
    if size > most:
        return None
    steps = range(math.ceil(low / step), math.floor(high / step) + 1)
    found = [low] if low == high else [step * one for one in steps]
    opened = {low} if numbers.low_is_open else set()
    opened |= {high} if numbers.high_is_open else set()
    return [_plain_number(one) for one in found if one not in opened]


def _bounded(numbers: Numbers) -> dict[str, Any]:
    """The schema of the numbers for llguidance. Raises CannotHold."""
    low, high, step = numbers.low, numbers.high, step_of(numbers)
    said: dict[str, Any] = {"type": "integer" if numbers.whole else "number"}
    opened = numbers.low_is_open, numbers.high_is_open
    if numbers.whole:
        low = (
            None if low is None else Fraction(math.floor(low) + 1 if opened[0] else math.ceil(low))
        )
        high = (
            None
            if high is None
            else Fraction(math.ceil(high) - 1 if opened[1] else math.floor(high))
        )
        opened = False, False
        step = None if step == 1 else step
    for limit, is_open, keyword in ((low, opened[0], "Minimum"), (high, opened[1], "Maximum")):
        if limit is None:
            continue
        if (
            is_open
            and step is None
            and (abs(limit) > _MOST_OPEN or 10**_PLACES % limit.denominator)
        ):
            places = f"with {_PLACES} digits after the point at most"
            reason = f"must lie within ±10^9, {places}, or `type` be integer"
            raise CannotHold(reason, f"exclusive{keyword}")
        said[f"exclusive{keyword}" if is_open else keyword.lower()] = _plain_number(limit)
    if any(opened) and step is None:
        step = Fraction(1, 10**_PLACES)
    if step is not None:
        said["multipleOf"] = _step(step)
    return said


def _step(step: Fraction) -> int | float:
    """Writes a step as a number that llguidance can hold to. Raises CannotHold."""
    scale = next((n for n in range(_PLACES + 1) if 10**n % step.denominator == 0), None)
    if scale is None or step * 10**scale > _MOST_STEP:
        reason = f"must be at most {_MOST_STEP}, or that with {_PLACES} digits after the point"
        raise CannotHold(reason, "multipleOf")
    return _plain_number(step)


def _plain_number(value: Fraction) -> int | float:
    return int(value) if value.denominator == 1 else float(value)


def _spelled(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)[1:-1].replace("\x7f", "\\u007f")


def _sorted(several: frozenset[Regex]) -> list[Regex]:
    return sorted(several, key=repr)


def _is_plain(regex: Regex) -> bool:
    match regex:
        case Both() | Not():
            return False
        case Alt(options):
            return all(map(_is_plain, options))
    return True


def _written(regex: Regex) -> str:
    """A pattern, in Rust's syntax, of the texts as JSON writes them between quotes."""
    match regex:
        case CharSet():
            return _ANY if regex == ANY_CHAR else _class(regex)
        case Words(texts):
            options = (_quoted(_spelled(text)) for text in sorted(texts))
            return f"(?:{'|'.join(options)})"
        case Seq(parts):
            return "".join(map(_written, parts))
        case Alt(options):
            return f"(?:{'|'.join(map(_written, _sorted(options)))})"
        case Rep(part, least, most):
            if (least, most) == (0, None):
                return f"(?:{_written(part)})*"
            return f"(?:{_written(part)}){{{least},{'' if most is None else most}}}"
    raise AssertionError(regex)


def _class(of: CharSet) -> str:
    ways: list[str] = []
    kept = met_ranges(of.ranges, other_chars(_ESCAPED).ranges)
    if kept:
        ways.append("[" + "".join(f"\\x{{{a:x}}}-\\x{{{b:x}}}" for a, b in kept) + "]")
    codes = [code for a, b in _ESCAPED.ranges for code in range(a, b + 1) if code in of]
    for code in codes:
        ways.append(rf"\\{_SHORT[code]}" if code in _SHORT else rf"\\u{code:04x}")
    return ways[0] if len(ways) == 1 else f"(?:{'|'.join(ways)})"


def _quoted(text: str) -> str:
    return re.sub(r"[^\w ]", lambda m: f"\\x{{{ord(m[0]):x}}}", text, flags=re.ASCII)
