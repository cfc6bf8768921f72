"""The form of each module's weights, as a configuration's table of quantised weights says. Pure."""

import re
from collections.abc import Iterable
from functools import cache

import msgspec

from loraplex.server.model.quantisation.forms import WeightForm, input_form

_BODY = "model."


class QuantisationRule(msgspec.Struct, frozen=True):
    """Rule on how modules are quantised. pattern: of a module's path, matched from its beginning;
    None = every module. form: of those that match; None = they are not quantised.
    """

    pattern: str | None
    form: WeightForm | None

    def takes(self, names: Iterable[str]) -> bool:
        if self.pattern is None:
            return True
        return any(map(_compiled(self.pattern).match, names))


class Quantisation(msgspec.Struct, frozen=True):
    """Quantisation of a checkpoint's weights. scheme: for people. rules: the first that takes a
    module counts. bodies: what rules may write in place of a path's first name, `model`.
    """

    scheme: str
    rules: tuple[QuantisationRule, ...]
    bodies: tuple[str, ...] = ()

    @property
    def text(self) -> str:
        """The scheme, and whether products round their inputs; for people."""
        rounds = any(input_form(rule.form) is not None for rule in self.rules)
        return f"{self.scheme}, inputs in FP8" if rounds else self.scheme

    def form(self, *paths: str) -> WeightForm | None:
        """The form of a module, where the checkpoint holds it quantised. paths: all that rules may
        mean it by, beside those of `bodies`."""
        inner = [path[len(_BODY) :] for path in paths if path.startswith(_BODY)]
        names = [*paths, *(f"{body}.{rest}" for body in self.bodies for rest in inner)]
        return next((rule.form for rule in self.rules if rule.takes(names)), None)


def of_every_module(scheme: str, form: WeightForm) -> Quantisation:
    return Quantisation(scheme, (QuantisationRule(None, form),))


@cache
def _compiled(pattern: str) -> re.Pattern[str]:
    return re.compile(pattern)
