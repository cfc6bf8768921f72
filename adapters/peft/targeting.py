"""Which modules a config targets, and with which rank and alpha: PEFT's matching rules. Pure.

Source: PEFT 0.21, `check_target_module_exists` and `get_pattern_key`.
"""

import re
from collections.abc import Callable
from typing import Generic, TypeVar

from loraplex.adapters.common.timed_pattern import PatternBudget, PatternError, TimedPattern
from loraplex.adapters.peft.config import PeftConfig
from loraplex.adapters.violations import Findings, invalid, shown

# Plain names cannot make `re` backtrack, so they need no timeout.
_PLAIN = re.compile(r"\^?[A-Za-z0-9_.]{1,512}")
_PLAIN_LAYER = re.compile(r"[A-Za-z0-9_.]{1,64}")
_ALL_LINEAR = "all-linear"
_Value = TypeVar("_Value", int, float)
# Whether a path matches. Raises AdapterError `invalid` when the patterns take too long together.
_Matches = Callable[[str], bool]


class Targeting:
    """A config's matching rules, compiled. Paths are a module's name in the base model.

    Patterns outside the supported language are added to `findings`. The targets are then unknown,
    and `is_sound` is false.
    """

    def __init__(self, config: PeftConfig, findings: Findings) -> None:
        self.config = config
        before = len(findings)
        compiler = _Compiler(findings)
        self._targets = _Names(config.target_modules, "target_modules", compiler)
        self._excluded = _Names(config.exclude_modules, "exclude_modules", compiler)
        self._parameters = _Names(config.target_parameters, "target_parameters", compiler)
        self._ranks = _Overrides(config.rank_pattern, "rank_pattern", compiler)
        self._alphas = _Overrides(config.alpha_pattern, "alpha_pattern", compiler)
        self._layer_index = _layer_expressions(config, findings)
        self.is_sound = len(findings) == before

    def targets(self, path: str, is_output_head: bool) -> bool:
        """Whether PEFT would adapt this module, given only linear modules and the embedding."""
        config = self.config
        if self._excluded.match(path):
            return False
        if isinstance(config.target_modules, str):
            if config.target_modules.lower() == _ALL_LINEAR:
                return not is_output_head and not path.endswith("embed_tokens")
            return self._targets.match(path)
        if path in self._targets.names:
            return True
        return self._targets.match(path) and self._in_layers(path)

    def targets_parameter(self, path: str) -> bool:
        """Whether PEFT would adapt this parameter of the base. Neither `exclude_modules` nor
        `layers_to_transform` speak of parameters."""
        return self._parameters.match(path)

    def lora_rank(self, path: str) -> int:
        """path: of a module, or of a parameter."""
        return self._ranks.get(path, self.config.lora_rank)

    def lora_alpha(self, path: str) -> float:
        return self._alphas.get(path, self.config.lora_alpha)

    def _in_layers(self, path: str) -> bool:
        wanted = self.config.layers_to_transform
        if wanted is None:
            return True
        for expression in self._layer_index:
            found = expression.match(path)
            if found:
                index = int(found["idx"])
                return index == wanted if isinstance(wanted, int) else index in wanted
        return False


class _Names:
    """`target_modules` or `exclude_modules`: a pattern for the whole path, or names of its end."""

    def __init__(self, value: str | tuple[str, ...], key: str, compiler: "_Compiler") -> None:
        self.names = frozenset() if isinstance(value, str) else frozenset(value)
        # A model of many experts has many modules, of which most end in nothing that is named.
        self._ends = frozenset(name.rpartition(".")[2] for name in self.names)
        self._pattern: _Matches | None = None
        if isinstance(value, str) and value and value.lower() != _ALL_LINEAR:
            self._pattern = compiler.compile(value, key)

    def match(self, path: str) -> bool:
        if self._pattern is not None:
            return self._pattern(path)
        rest = path if path.rpartition(".")[2] in self._ends else ""
        while rest:
            if rest in self.names:
                return True
            rest = rest.partition(".")[2]
        return False


class _Overrides(Generic[_Value]):
    """`rank_pattern` or `alpha_pattern`: patterns for the end of a path, the first match wins."""

    def __init__(
        self, pairs: tuple[tuple[str, _Value], ...], key: str, compiler: "_Compiler"
    ) -> None:
        self._matchers: list[tuple[Callable[[str], object], _Value]] = []
        for pattern, value in pairs:
            if _PLAIN.fullmatch(pattern):
                plain = re.compile(rf"(.*\.)?({pattern})$")
                self._matchers.append((plain.match, value))
                continue
            compiled = compiler.compile(pattern, key, r"(.*\.)?(", ")")
            if compiled is not None:
                self._matchers.append((compiled, value))

    def get(self, path: str, default: _Value) -> _Value:
        for matches, value in self._matchers:
            if matches(path):
                return value
        return default


class _Compiler:
    """Compiles the patterns of a config, which share one budget."""

    def __init__(self, findings: Findings) -> None:
        self._findings = findings
        self._budget = PatternBudget()

    def compile(self, pattern: str, key: str, before: str = "", after: str = "") -> _Matches | None:
        """Returns None, and adds to the findings, when the pattern is refused.

        before, after: what PEFT puts around the pattern.
        """
        place = f"{key}: pattern {shown(pattern)}"
        try:
            compiled = TimedPattern(pattern, self._budget, before, after)
        except PatternError as error:
            self._findings.add("bad_pattern", key, f"{place}: {error}")
            return None

        def matches(path: str) -> bool:
            try:
                return compiled.fullmatch(path)
            except PatternError as error:
                raise invalid("bad_pattern", key, f"{place}: {error}") from None

        return matches


def _layer_expressions(config: PeftConfig, findings: Findings) -> list[re.Pattern[str]]:
    """How a layer's index is found in a path."""
    if not config.layers_pattern:
        return [re.compile(r".*?\.[^.]*\.(?P<idx>\d+)\.")]
    expressions = []
    for name in config.layers_pattern:
        if _PLAIN_LAYER.fullmatch(name):
            expressions.append(re.compile(rf"(?:^|.*?\.){name}\.(?P<idx>\d+)\."))
        else:
            message = f"layers_pattern: expected plain names, got {shown(name)}"
            findings.add("bad_pattern", "layers_pattern", message)
    return expressions
