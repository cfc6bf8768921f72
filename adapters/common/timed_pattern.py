"""Regular expressions of unknown origin, matched within a bounded time.

PEFT matches `target_modules` and the like with Python's `re`, which backtracks without end: a
tenant's pattern could hold a core for years. Here `regex` matches, which takes a timeout. `re`
says first whether a pattern is well-formed. Patterns keep to the syntax that both read alike.
"""

import re
import time

import regex

MAX_PATTERN_CHARS = 4096
MAX_WEIGHT = 1 << 13
MAX_CPU_S = 5.0
_MAX_LEVELS = 33
# CPU time of the whole process. A match of a trainer's pattern takes some microseconds.
_MATCH_S = 0.05

_CLASS = r"\\(?:[dDwWsSntrfva]|[^0-9A-Za-z])"
_REPEAT = r"\{(?:\d+(?:,\d*)?|,\d*)\}"
_TOKEN = re.compile(
    rf"{_CLASS}|\\[AZbB]|\[\^?+\]?+(?:(?!--|&&|~~|\|\|)[^\\\[\]]|{_CLASS})*\]"
    rf"|\((?:\?(?:[:=!]|<[=!])|(?!\?))|(?:[*+?]|{_REPEAT})(?!\+)|(?!{_REPEAT})[^\\\[(*+?]"
)
_NUMBER = re.compile(r"\d+")


class PatternError(ValueError):
    """The pattern is malformed, too large, too slow, or uses what is not supported. str(): why."""


class PatternBudget:
    """Bounds the weight and the CPU time of all patterns of one config together.

    A pattern's weight is the number of its parts, each counted as often as it is repeated.
    """

    def __init__(self, weight: int = MAX_WEIGHT, cpu_s: float = MAX_CPU_S) -> None:
        self._weight = weight
        self._cpu_s = cpu_s

    def spend(self, *, weight: int = 0, cpu_s: float = 0.0) -> None:
        """Takes weight and processor time from what the patterns may still use. Raises PatternError
        when too little is left.
        """
        self._weight -= weight
        self._cpu_s -= cpu_s
        if self._weight < 0:
            raise PatternError("the patterns have too many parts and repetitions")
        if self._cpu_s < 0:
            raise PatternError("the patterns take too long to match")


class TimedPattern:
    """A compiled pattern that answers as `re.fullmatch` does, within a bounded time.

    budget: bounds this pattern and others that share it; None = a budget of its own. before, after:
    trusted syntax that is put around `text`. Making one raises PatternError, as matching does.
    """

    def __init__(
        self, text: str, budget: PatternBudget | None = None, before: str = "", after: str = ""
    ) -> None:
        self._budget = budget or PatternBudget()
        start = time.thread_time()
        tokens = _tokens(text)
        try:
            re.compile(text)
            self._budget.spend(weight=_weight(tokens))
            # Elsewhere than in `re`, a brace may begin an approximate match.
            exact = "".join(r"\{" if token == "{" else token for token in tokens)
            self._compiled = regex.compile(f"{before}{exact}{after}")
        except RecursionError:
            raise PatternError("groups are nested too deep") from None
        except (re.error, regex.error, OverflowError) as error:
            # The reason may quote the pattern, and messages are printable.
            raise PatternError(ascii(str(error))[1:-1]) from None
        self._budget.spend(cpu_s=time.thread_time() - start)

    def fullmatch(self, name: str) -> bool:
        """Whether the pattern matches the whole of `name`. Raises PatternError."""
        start = time.thread_time()
        try:
            found = self._compiled.fullmatch(name, timeout=_MATCH_S)
        except TimeoutError:
            raise PatternError("the pattern takes too long to match") from None
        self._budget.spend(cpu_s=time.thread_time() - start)
        return found is not None


def _tokens(text: str) -> list[str]:
    if len(text) > MAX_PATTERN_CHARS:
        raise PatternError(f"longer than {MAX_PATTERN_CHARS} characters")
    tokens: list[str] = _TOKEN.findall(text)
    read = 0
    for token in tokens:
        if not text.startswith(token, read):
            break
        read += len(token)
    if read != len(text):
        raise PatternError(f"the syntax at position {read} is not supported")
    return tokens


def _weight(tokens: list[str]) -> int:
    """Sums the parts of a well-formed pattern, each as often as `regex` writes it out."""
    levels, last = [0], 0
    for token in tokens:
        if token[0] == "(":
            levels.append(0)
            if len(levels) > _MAX_LEVELS:
                raise PatternError("groups are nested too deep")
        elif token == ")":
            last = levels.pop()
            levels[-1] += last
        elif token in ("*", "?"):
            continue
        elif token == "+" or (token[0] == "{" and len(token) > 1):
            times = 1 + max([1, *map(int, _NUMBER.findall(token))])
            levels[-1] += last * (times - 1)
            last *= times
        else:
            last = 1
            levels[-1] += 1
    return levels[0]
