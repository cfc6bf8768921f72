"""Finds the modules that a config targets, with their rank and alpha, by PEFT's rules. Pure.

Source: PEFT 0.21, `check_target_module_exists` and `get_pattern_key`.
"""

import re
from collections.abc import Callable, Iterator
from itertools import chain, groupby
from typing import Generic, TypeVar

from loraplex.adapters.base import ANY_EXPERT, BaseSpec, base_modules
from loraplex.adapters.common.timed_pattern import PatternBudget, PatternError, TimedPattern
from loraplex.adapters.errors import Findings, invalid, shown
from loraplex.adapters.peft.config import TABLES, PeftConfig, names_table
from loraplex.adapters.peft.own_weights import are_tied, whole_tables
from loraplex.adapters.peft.tensor_names import NAMINGS, Naming

# What PEFT's `target_parameters` calls the weight of an ordinary module.
_WEIGHT = ".weight"
# PEFT wraps a module once for each targeted tensor of it, the first one innermost.
INNER = ".base_layer"
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

    def targets(self, path: str, is_other: bool) -> bool:
        """Whether PEFT would adapt this module. is_other: whether it is the embedding, the output
        head, or no linear module."""
        config = self.config
        if self._excluded.match(path):
            return False
        if self.targets_all_linear:
            return not is_other
        if isinstance(config.target_modules, str):
            return self._targets.match(path)
        if path in self._targets.names:
            return True
        return self._targets.match(path) and self._in_layers(path)

    @property
    def targets_all_linear(self) -> bool:
        """Whether the config targets every linear module, whatever its name."""
        targets = self.config.target_modules
        return isinstance(targets, str) and targets.lower() == _ALL_LINEAR

    @property
    def names_tables(self) -> bool:
        """Whether PEFT sees that a table is targeted."""
        targets = self.config.target_modules
        if isinstance(targets, str):
            return any(map(self._targets.match, TABLES))
        return names_table(targets)

    def targets_parameter(self, path: str) -> bool:
        """Whether PEFT would adapt this parameter of the base. Neither `exclude_modules` nor
        `layers_to_transform` speak of parameters."""
        return self._parameters.match(path)

    def lora_rank(self, path: str) -> int:
        """The rank that a module or parameter at this path has."""
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
    """Matches paths of modules against `target_modules` or `exclude_modules`.

    The value is a pattern for the whole path, or names of its end.
    """

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
    """Finds a path's value in `rank_pattern` or `alpha_pattern`.

    Patterns are for the end of a path; the first match wins.
    """

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
        """Returns None, and adds to the findings, when the pattern is refused. before, after: what
        PEFT puts around the pattern."""
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
    """Compiles the expressions that find a layer's index in a path."""
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


def expert_path(path: str, expert: int) -> str:
    """The path of one expert's module, from a path that stands for every expert's."""
    return path.replace(ANY_EXPERT, str(expert))


def module_paths(base: BaseSpec) -> Iterator[str]:
    """Whole names of the base's modules, each expert's on its own."""
    for module in base_modules(base):
        if module.shape.is_of_experts:
            for expert in range(module.shape.experts):
                yield expert_path(module.path, expert)
        else:
            yield module.path


def targeted_paths(matcher: Targeting, base: BaseSpec, naming: Naming) -> dict[str, str]:
    """Maps each targeted module or tensor of experts to its name in the trained model.

    Keys are paths in the base. Patterns of rank and alpha are matched with the names. Whole tables
    are not targeted. Of tied ones both are, if one is and the config ties them.
    """
    others, targeted = base.tables | _convolutions(base), dict[str, str]()
    whole = whole_tables(matcher.config, base) & base.model_modules.keys()
    saved = {base.module(-1, name).path for name in whole}
    names = chain(((path, path) for path in module_paths(base)), aliases(base))
    for name, path in names:
        spelled = naming.spelled(name)
        if spelled is None or path in targeted or path in saved:
            continue
        if matcher.targets(spelled, is_other=path in others):
            targeted[path] = spelled
        elif matcher.targets_parameter(spelled + _WEIGHT):
            targeted[path] = spelled + _WEIGHT
    ties = matcher.names_tables and not matcher.config.ties_saved
    if ties and are_tied(matcher.config, base) and base.tables & targeted.keys():
        both = ((path, naming.spelled(path)) for path in base.tables)
        targeted |= {path: spelled for path, spelled in both if spelled is not None}
    for path in _stacked_paths(base):
        spelled = naming.spelled(path)
        if spelled is not None and matcher.targets_parameter(spelled):
            targeted[path] = spelled
    return targeted


def _convolutions(base: BaseSpec) -> frozenset[str]:
    return frozenset(module.path for module in base_modules(base) if module.shape.kernel)


def check_parameters(names: tuple[str, ...], base: BaseSpec, findings: Findings) -> None:
    """Refuses names in `target_parameters` of what is not served."""
    if not names:
        return
    if base.is_inferred:
        message = "target_parameters can only be checked against the base model; name it"
        findings.add("needs_base", "target_parameters", message)
        return
    modules = chain(module_paths(base), (alias for alias, _ in aliases(base)))
    known = {*_stacked_paths(base), *(path + _WEIGHT for path in modules)}
    for name in names:
        if not _names_any(name, known):
            message = (
                f"target_parameters: the base model has no weight {shown(name)} that is served"
            )
            findings.add("unknown_target", "target_parameters", message)


def aliases(base: BaseSpec) -> Iterator[tuple[str, str]]:
    """Other whole names of modules, with their own."""
    for layer in base.layers:
        for alias, path in layer.aliases.items():
            yield layer.whole(alias), layer.whole(path)
        for other in layer.others:
            for shape in layer.modules.values():
                yield f"{other}.{shape.path}", layer.whole(shape.path)


def _names_any(name: str, paths: set[str]) -> bool:
    """Whether `name` is the end of a path, as any kind of model spells it."""
    last = name.rpartition(".")[2]
    return any(
        spelled == name or spelled.endswith(f".{name}")
        for path in paths
        if path.endswith(last)
        for naming in NAMINGS
        if (spelled := naming.spelled(path)) is not None
    )


def _stacked_paths(base: BaseSpec) -> Iterator[str]:
    for layer in base.layers:
        for weight in layer.expert_weights:
            yield layer.whole(weight.path)


def holders(base: BaseSpec) -> Iterator[str]:
    """Yields the modules under whose names PEFT may save LoRA on tensors of all experts."""
    for layer in base.layers:
        for holder, held in groupby(layer.expert_weights, key=lambda weight: weight.holder):
            for depth in range(len(list(held))):
                yield layer.whole(holder) + INNER * depth
