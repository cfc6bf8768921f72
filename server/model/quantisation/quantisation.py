"""The form of each module's weights, as a configuration's table of quantised weights says. Pure."""

import re
from functools import cache

import msgspec

from loraplex.server.model.quantisation.forms import WeightForm, input_form


class QuantisationRule(msgspec.Struct, frozen=True):
    """Rule on how modules are quantised. pattern: of a module's path, matched from its beginning;
    None = every module. form: of those that match; None = they are not quantised.
    """

    pattern: str | None
    form: WeightForm | None

    def takes(self, path: str) -> bool:
        return self.pattern is None or _compiled(self.pattern).match(path) is not None


class Quantisation(msgspec.Struct, frozen=True):
    """Quantisation of a checkpoint's weights. scheme: for people. rules: the first that takes a
    module counts.
    """

    scheme: str
    rules: tuple[QuantisationRule, ...]

    @property
    def text(self) -> str:
        """The scheme, and whether products round their inputs; for people."""
        rounds = any(input_form(rule.form) is not None for rule in self.rules)
        return f"{self.scheme}, inputs in FP8" if rounds else self.scheme

    def form(self, path: str) -> WeightForm | None:
        """The form of the module at `path`, where the checkpoint holds it quantised."""
        return next((rule.form for rule in self.rules if rule.takes(path)), None)


def of_every_module(scheme: str, form: WeightForm) -> Quantisation:
    return Quantisation(scheme, (QuantisationRule(None, form),))


@cache
def _compiled(pattern: str) -> re.Pattern[str]:
    return re.compile(pattern)
